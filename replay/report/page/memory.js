// Memory held over time: one chart a rank, stacked by class, all on one scale: above the line what lies on its device, below what
// lies elsewhere. A lane above shows pauses and resumes.

const memory = (() => {
  const series = sessions.map((session) => {
    const t = running(session.series.t);
    const held = session.series.h.map((deltas) => (deltas.length ? running(deltas) : null));
    // Of a process that died the memory was held until its end, which others noticed after its last event.
    return { t, held, end: session.died ? Math.max(session.end, session.died[0]) : session.end };
  });
  const present = STACK.filter((c) => sessions.some((session) => session.most[c] > 0));
  const shown = new Set(present);
  const whole = [0, Math.max(data.job.duration, 1)];
  let domain = whole.slice();
  let cursor = null;  // { t, session }
  const charts = [];

  // Cumulative heights of the classes shown: upwards of those on the device, downwards of the others.
  function stack(index) {
    const { t, held } = series[index];
    const layers = [], last = { 1: new Float64Array(t.length), '-1': new Float64Array(t.length) };
    for (const c of present) {
      if (!shown.has(c) || !held[c]) continue;
      const way = ON_DEVICE.includes(c) ? 1 : -1, below = last[way];
      last[way] = below.map((value, i) => value + way * held[c][i]);
      layers.push({ c, below, top: last[way] });
    }
    return layers;
  }
  let stacks, highest, lowest;
  function restack() {
    stacks = sessions.map((_, index) => stack(index));
    highest = 1;
    lowest = 0;
    for (const { top } of stacks.flat()) {
      for (const value of top) {
        highest = Math.max(highest, value);
        lowest = Math.min(lowest, value);
      }
    }
  }

  // The last point at or before a time; -1: before the first.
  function indexAt(t, time) {
    let low = 0, high = t.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (t[middle] <= time) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------------------

  function areaPath(index, layer, x, y) {
    const { t, end } = series[index];
    const from = Math.max(0, indexAt(t, domain[0])), to = indexAt(t, domain[1]);
    if (to < from) return '';
    const stop = x(Math.min(domain[1], end)).toFixed(1);
    let upper = '', lower = '';
    for (let i = from; i <= to; ++i) {
      const at = x(Math.max(t[i], domain[0])).toFixed(1);
      upper += (upper ? 'H' + at : 'M' + at + ',' + y(layer.top[i]).toFixed(1)) + 'V' + y(layer.top[i]).toFixed(1);
      lower = 'V' + y(layer.below[i]).toFixed(1) + 'H' + at + lower;
    }
    return upper + 'H' + stop + lower + 'Z';
  }

  function timeAxis(width, x) {
    const span = domain[1] - domain[0];
    const step = span > 120e9 ? roundStep(span / 60e9, width / 110, [1, 2, 3, 5, 6, 10]) * 60e9 : roundStep(span, width / 95);
    const g = svg('g', { class: 'axis' });
    for (let t = Math.ceil(domain[0] / step) * step; t <= domain[1]; t += step) {
      const at = x(t);
      const anchor = at > width - 30 ? 'end' : at < 24 ? 'start' : 'middle';
      g.append(svg('line', { x1: at, x2: at, y1: 0, y2: 4 }), svg('text', { x: at, y: 15, 'text-anchor': anchor }, tick(t, step)));
    }
    return g;
  }

  const heightOf = () => (sessions.length > 32 ? 46 : sessions.length > 16 ? 60 : sessions.length > 4 ? 80 : 116);

  function draw() {
    for (const chart of charts) if (!chart.row.hidden) chart.draw();
    drawLane();
    placeCursor();
  }

  // ---- the strip of all pauses and resumes -------------------------------------------------------------------------------------

  const SUMMED = 40;  // pixels, of a mark that sums up several: narrow enough to show when failures were
  let strip = [];
  function readStrip() {
    const c = data.strip, t = running(c.t);
    const records = Array.from(t, (begin, i) => ({ begin, end: begin + c.d[i], kind: c.k[i], number: c.m[i], count: c.n[i], failed: c.f[i] }));
    // Failures that the rank with the most pauses has no record of.
    for (const cycle of data.cycles) {
      const { begin, end, failed } = cycles.spanOf(cycle);
      if (failed && !cycle.tag && !records.some((r) => r.failed && r.begin <= end && r.end >= begin)) {
        records.push({ begin, end, kind: cycle.kind, number: cycle.parts[0].n, count: 1, failed: 1 });
      }
    }
    return records.sort((a, b) => a.begin - b.begin);
  }
  // What of it is seen, with those put together that would be drawn over each other.
  function stripMarks(x, width) {
    const marks = [];
    for (const record of strip) {
      const from = x(record.begin), to = Math.max(x(record.end), from + 3);
      if (to < 0 || from > width) continue;
      const last = marks[marks.length - 1];
      if (last && from < last.to + 1 && to - last.from < SUMMED) {
        Object.assign(last, { to: Math.max(last.to, to), end: Math.max(last.end, record.end), count: last.count + record.count, failed: last.failed + record.failed });
      } else {
        marks.push({ ...record, from, to });
      }
    }
    return marks;
  }
  const laneNote = el('p', { class: 'muted small lane-note', hidden: true });

  const laneSvg = svg('svg', { class: 'lane-svg', 'aria-hidden': 'true' }), axisSvg = svg('svg', { class: 'axis-svg', 'aria-hidden': 'true' });
  function drawLane() {
    const width = laneSvg.parentNode.clientWidth || 600;
    const x = (t) => ((t - domain[0]) / (domain[1] - domain[0])) * width;
    laneSvg.setAttribute('viewBox', `0 0 ${width} 22`);
    laneSvg.replaceChildren();
    let free = -1e9;  // labels do not run into each other
    const marks = stripMarks(x, width);
    for (const m of marks) {
      const many = m.count > 1;
      const index = many ? -1 : cycles.at(m.kind, m.begin, m.end);
      const name = many ? `${grouped(m.count)} pauses and resumes, ${m.failed ? grouped(m.failed) + ' of them failed' : 'all done'}; choose to look closer`
        : `${cycleWord(m.kind)} ${m.number}: ${index >= 0 ? cycles.outcomeOf(data.cycles[index]) : m.failed ? 'failed' : 'done'}, ${duration(m.end - m.begin)}` +
          (index < 0 ? '; its phases are not in this page' : '');
      const margin = Math.max((m.end - m.begin) * 0.1, 1e6);
      const mark = svg('g', { class: 'lane ' + (many ? 'many' : m.kind === 0 ? 'pause' : 'resume') + (m.failed ? ' failed' : ''), 'data-count': m.count, tabindex: -1,
        onclick: () => links.go(many || index < 0 ? links.time(Math.max(0, m.begin - margin), m.end + margin) : links.cycle(index)) },
      svg('title', {}, name),
      svg('rect', { x: m.from.toFixed(1), y: 13, width: (m.to - m.from).toFixed(1), height: 7, rx: 2 }));
      const label = (m.failed ? '\u2715 ' : '') + (many ? '\u00d7' + grouped(m.count) : (m.kind === 0 ? 'P' : 'R') + m.number);
      if (m.from > free && m.from < width - 20) {
        mark.append(svg('text', { x: Math.max(0, m.from).toFixed(1), y: 10 }, label));
        free = m.from + label.length * 7 + 6;
      }
      laneSvg.append(mark);
    }
    const summed = marks.filter((m) => m.count > 1);
    laneNote.hidden = summed.length === 0;
    laneNote.textContent = `${grouped(sum(marks.map((m) => m.count)))} pauses and resumes are in view; ${plural(summed.length, 'hatched mark sums', 'hatched marks sum')} up ` +
      `${grouped(sum(summed.map((m) => m.count)))} of them. Choose one, or zoom in, to see them one by one.`;
    axisSvg.setAttribute('viewBox', `0 0 ${width} 20`);
    axisSvg.replaceChildren(timeAxis(width, x));
  }

  function makeChart(index) {
    const session = sessions[index];
    const plot = svg('svg', { class: 'plot', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
    const scale = svg('svg', { class: 'axis-scale', 'aria-hidden': 'true' });
    const line = el('span', { class: 'cursor', hidden: true }), band = el('span', { class: 'band', hidden: true });
    const peak = session.peak[1];
    const box = el('div', { class: 'plot-box', tabindex: 0, role: 'img', 'data-session': index,
      'aria-label': `Memory held by ${session.name} over time. At most ${bytes(peak)} on its device, at ${moment(session.peak[0])}` +
        ` of ${duration(data.job.duration)}. ${session.failed ? plural(session.failed, 'pause or resume', 'pauses or resumes') + ' failed. ' : ''}` +
        'Arrow keys move a cursor; its values are read out below the charts.' }, plot, line, band);
    const row = el('div', { class: 'chart' },
      el('div', { class: 'chart-label' }, el('strong', {}, capital(session.name)),
        el('span', { class: 'muted' }, 'peak ', el('span', { class: 'nowrap' }, bytes(peak))),
        el('span', { class: 'muted end' }, howItEnds())),
      scale, box);

    function howItEnds() {
      if (session.died) return `crashed, as ${nameOf(session.died[1])} noticed`;
      return { closed: 'closed', crashed: 'crashed after its last event', broken: 'broken' }[session.status] || '';
    }

    function drawChart() {
      const width = box.clientWidth || 600, height = heightOf();
      plot.setAttribute('viewBox', `0 0 ${width} ${height}`);
      plot.setAttribute('height', height);
      const x = (t) => ((t - domain[0]) / (domain[1] - domain[0])) * width;
      const y = (value) => height - 5.5 - ((value - lowest) / (highest - lowest)) * (height - 14);
      plot.replaceChildren();
      const wide = scale.clientWidth || 54;
      scale.setAttribute('viewBox', `0 0 ${wide} ${height}`);
      scale.setAttribute('height', height);
      scale.replaceChildren();
      const step = roundBytes(highest - lowest, height > 90 ? 4 : 2.2);
      for (let value = Math.ceil(lowest / step) * step; value < highest * 1.02; value += step) {
        plot.append(svg('line', { class: 'gridline', x1: 0, x2: width, y1: y(value), y2: y(value) }));
        scale.append(svg('text', { class: 'scale', x: wide, y: Math.max(9, y(value) + 4), 'text-anchor': 'end' }, value === 0 ? '0' : axisBytes(Math.abs(value))));
      }
      for (const layer of stacks[index]) {
        plot.append(svg('path', { class: 'area c' + layer.c, 'data-class': CLASSES[layer.c].name, d: areaPath(index, layer, x, y) }));
        if (layer.c === 2) plot.append(svg('path', { class: 'stripes', d: areaPath(index, layer, x, y) }));
      }
      plot.append(svg('line', { class: 'baseline', x1: 0, x2: width, y1: y(0), y2: y(0) }));
      const end = x(series[index].end);
      if (end >= 0 && end <= width) plot.append(svg('line', { class: 'ended', x1: end, x2: end, y1: 0, y2: height }, svg('title', {}, howItEnds() || 'last event so far')));
      for (const failure of cycles.failuresOf(index)) {
        const at = x(failure.t);
        if (at < 0 || at > width) continue;
        plot.append(svg('g', { class: 'failure' }, svg('title', {}, failure.text),
          svg('line', { x1: at, x2: at, y1: 0, y2: height }), svg('text', { x: Math.min(at + 3, width - 12), y: 11 }, '\u2715')));
      }
    }

    // ---- looking closer ------------------------------------------------------------------------------------------------------
    let start = null;
    const timeAt = (event) => {
      const rect = box.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - rect.left) / rect.width));
      return domain[0] + part * (domain[1] - domain[0]);
    };
    box.addEventListener('pointermove', (event) => {
      if (start !== null) {
        const [a, b] = [start, timeAt(event)].sort((p, q) => p - q);
        const percent = (t) => ((t - domain[0]) / (domain[1] - domain[0])) * 100;
        band.hidden = false;
        band.style.left = percent(a) + '%';
        band.style.width = percent(b) - percent(a) + '%';
      }
      setCursor(timeAt(event), index);
    });
    box.addEventListener('pointerdown', (event) => {
      if (event.button !== 0 || event.pointerType === 'touch') return;
      start = timeAt(event);
      box.setPointerCapture(event.pointerId);
    });
    box.addEventListener('pointerup', (event) => {
      if (start === null) return;
      const [a, b] = [start, timeAt(event)].sort((p, q) => p - q);
      start = null;
      band.hidden = true;
      if ((b - a) / (domain[1] - domain[0]) > 0.01) setDomain(a, b);
    });
    box.addEventListener('pointercancel', () => { start = null; band.hidden = true; });
    box.addEventListener('pointerleave', () => { if (document.activeElement !== box) setCursor(null); });
    box.addEventListener('keydown', (event) => onKey(event, index));
    box.addEventListener('focus', () => { if (!cursor || cursor.session !== index) setCursor(cursor ? cursor.t : domain[0], index); });
    charts.push({ draw: drawChart, row, line });
    return row;
  }

  // Of many ranks those that failed come first, then one of each kind: ranks that held about as much as another are folded.
  const FEW = 8;
  function addCharts(host) {
    const failed = (index) => cycles.failuresOf(index).length > 0 || ['crashed', 'broken'].includes(sessions[index].status);
    const alike = (a, b) => sessions[a].most.every((value, c) => Math.abs(value - sessions[b].most[c]) <= 0.15 * Math.max(value, sessions[b].most[c]));
    const kinds = [], folded = [];
    const order = sessions.map((_, index) => index);
    if (order.length > FEW) order.sort((a, b) => failed(b) - failed(a) || a - b);
    for (const index of order) {
      const row = makeChart(index);
      row.hidden = order.length > FEW && !failed(index) && kinds.some((kind) => alike(index, kind));
      if (row.hidden) folded.push(row);
      else if (!failed(index)) kinds.push(index);
      host.append(row);
    }
    if (!folded.length) return;
    const button = el('button', { type: 'button', 'aria-expanded': 'false', onclick: () => {
      const open = folded[0].hidden;
      for (const row of folded) row.hidden = !open;
      button.setAttribute('aria-expanded', String(open));
      button.textContent = name(open);
      draw();
    } });
    const name = (open) => (open ? 'Hide' : 'Show') + ` ${plural(folded.length, 'rank')} that held about as much as one above`;
    button.textContent = name(false);
    host.append(el('p', { class: 'folded' }, button));
  }

  function onKey(event, index) {
    const { t } = series[index];
    const span = domain[1] - domain[0];
    const now = cursor ? cursor.t : domain[0];
    const at = indexAt(t, now);
    const stride = event.shiftKey ? 10 : 1;
    const steps = {
      ArrowRight: () => moveTo(t[Math.min(t.length - 1, at + stride)]),
      ArrowLeft: () => moveTo(t[Math.max(0, now > t[at] ? at - stride + 1 : at - stride)]),
      '+': () => zoom(0.5, now), '=': () => zoom(0.5, now), '-': () => zoom(2, now),
      Home: () => setDomain(...whole), PageUp: () => shift(-0.5), PageDown: () => shift(0.5),
    };
    function moveTo(time) {
      if (time === undefined) return;
      if (time < domain[0] || time > domain[1]) setDomain(time - span / 2, time + span / 2);
      setCursor(time, index);
    }
    if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    steps[event.key]();
  }

  function setDomain(from, to) {
    if (!present.length) return;  // there is no chart
    const span = Math.min(Math.max(to - from, 2e3), whole[1]);
    from = Math.min(Math.max(from, whole[0]), whole[1] - span);
    domain = [from, from + span];
    draw();
    wholeJob.disabled = domain[0] <= whole[0] && domain[1] >= whole[1];
    extent.textContent = span >= whole[1] ? duration(span) : `${duration(domain[1] - domain[0])} from ${moment(domain[0])}`;
  }
  function zoom(factor, around = (domain[0] + domain[1]) / 2) {
    setDomain(around - (around - domain[0]) * factor, around + (domain[1] - around) * factor);
  }
  function shift(by) {
    const way = by * (domain[1] - domain[0]);
    setDomain(domain[0] + way, domain[1] + way);
  }

  // ---- the cursor ------------------------------------------------------------------------------------------------------------

  function setCursor(time, session) {
    cursor = time === null ? null : { t: time, session };
    placeCursor();
  }
  const readout = byId('memory-readout');
  function placeCursor() {
    const part = cursor ? (cursor.t - domain[0]) / (domain[1] - domain[0]) : -1;
    for (const { line } of charts) {
      line.hidden = part < 0 || part > 1;
      line.style.left = part * 100 + '%';
    }
    if (!cursor) {
      readout.replaceChildren(el('span', { class: 'muted' }, 'Point at a chart, or focus one and use the arrow keys, to read values.'));
      return;
    }
    const { t, held, end } = series[cursor.session];
    const at = indexAt(t, cursor.t);
    const values = present.map((c) => [c, at < 0 || !held[c] || cursor.t > end ? 0 : held[c][at]]);
    const device = sum(values.filter(([c]) => ON_DEVICE.includes(c)).map(([, value]) => value));
    readout.replaceChildren(
      el('strong', {}, capital(sessions[cursor.session].name)), el('span', { class: 'nowrap' }, moment(cursor.t)),
      el('span', { class: 'nowrap' }, 'on the device ', el('strong', {}, bytes(device))),
      values.map(([c, value]) => el('span', { class: 'nowrap' }, el('i', { class: 'swatch c' + c }), `${CLASSES[c].label} ${bytes(value)}`)));
  }

  // ---- around the charts -----------------------------------------------------------------------------------------------------

  const extent = el('span', { class: 'muted small extent', 'aria-live': 'polite' });
  const tool = (label, text, action) => el('button', { type: 'button', 'aria-label': label, title: label, onclick: action }, text);
  const wholeJob = tool('The whole job', 'Whole job', () => setDomain(...whole));
  function makeLegend() {
    for (const c of present) {
      const box = el('input', { type: 'checkbox', checked: true, onchange: () => {
        if (box.checked) shown.add(c); else shown.delete(c);
        restack();
        draw();
      } });
      byId('memory-legend').append(el('label', { class: 'key', title: CLASSES[c].hint }, box,
        el('i', { class: 'swatch c' + c, 'aria-hidden': 'true' }), CLASSES[c].label,
        el('span', { class: 'muted' }, ' ' + CLASSES[c].hint)));
    }
    if (strip.length) {
      byId('memory-legend').append(el('span', { class: 'key lanes' }, el('i', { class: 'swatch lane-pause' }), 'P pause',
        el('i', { class: 'swatch lane-resume' }), 'R resume', el('i', { class: 'swatch lane-many' }), 'several', el('i', { class: 'cross', 'aria-hidden': 'true' }, '\u2715'), 'failed'));
    }
  }
  function makeTable_() {
    const columns = [{ label: 'Rank', first: true, cell: (i) => capital(sessions[i].name), sort: (i) => i },
      figure('Peak on the device', (i) => sessions[i].peak[1], bytes),
      { label: 'Peak at', number: true, cell: (i) => moment(sessions[i].peak[0]), sort: (i) => sessions[i].peak[0] }];
    for (const c of present) {
      const last = (i) => (series[i].held[c] ? series[i].held[c][series[i].t.length - 1] : 0);
      columns.push(figure(`${CLASSES[c].label}, at most`, (i) => sessions[i].most[c], bytes));
      columns.push(figure(`${CLASSES[c].label}, at the end`, last, bytes));
    }
    makeTable(byId('memory-table'), { caption: 'Memory held by rank', columns, rows: sessions.map((_, i) => i) });
  }

  function start() {
    const host = byId('memory-charts');
    strip = readStrip();
    if (present.length === 0) {
      host.append(el('p', { class: 'muted' }, 'No memory was ever held.'));
      byId('memory-readout').hidden = true;
      return;
    }
    byId('memory-tools').append(extent, el('span', { class: 'buttons' },
      tool('Earlier', '\u25c2', () => shift(-0.5)), tool('Zoom out', '\u2212', () => zoom(2)), tool('Zoom in', '+', () => zoom(0.5)),
      tool('Later', '\u25b8', () => shift(0.5)), wholeJob));
    makeLegend();
    host.append(el('div', { class: 'chart' }, el('div', { class: 'chart-label muted small' }, strip.length ? 'Pauses, resumes' : ''), el('span'), el('div', {}, laneSvg, laneNote)));
    addCharts(host);
    host.append(el('div', { class: 'chart' }, el('div', { class: 'chart-label' }), el('span'), el('div', {}, axisSvg)));
    makeTable_();
    restack();
    setDomain(...whole);
    new ResizeObserver(() => draw()).observe(host);
  }
  return { start, setDomain };
})();
