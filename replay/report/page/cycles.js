// Pauses and resumes: a list of them, and for the chosen one what each rank did when.

const cycles = (() => {
  // A phase's word without "pause: " before it, and its colour. An undo has phases of both kinds side by side, so all differ.
  const phaseOf = (phase) => [(data.phases[phase] || '').replace(/^.*: /, ''), 'p' + phase];
  const isUndo = (phase, cycle) => (phase >= 5) !== (cycle.kind === 1);
  const undoOr = (phase, cycle) => (isUndo(phase, cycle) ? 'undo, ' : '') + data.phases[phase];
  let selected = -1;
  let list = null;

  const began = (part) => (part.b === null ? part.a : part.b);
  const nameOf = (cycle) => `${cycleWord(cycle.kind)} ${cycle.parts[0].n}${ofTag(cycle)}`;
  const failedParts = (cycle) => cycle.parts.filter((part) => part.o === 1 || part.o === 2);
  const durationOf = (cycle) => Math.max(...cycle.parts.map((part) => part.e - began(part)));
  // All ranks are equally long in a pause or resume, because each waits for the others: the slowest is the one whose own part took
  // longest. Where somebody did not come, or not finish, that is who the others waited for.
  const workOf = (part) => sum(part.p.filter((p) => part.b !== null && p[1] >= part.b).map((p) => p[2] - p[1]));
  function slowest(cycle) {
    if (cycle.absent.length && neverBegan(cycle)) return { who: cycle.absent, why: 'did not come' };
    const stuck = cycle.parts.filter((part) => part.o === 3 && part.p.length && part.p.at(-1)[3] === null && part.p.at(-1)[6] === 0);
    if (stuck.length && stuck.length < cycle.parts.length) return { who: stuck.map((part) => part.s), why: 'did not finish' };
    const part = cycle.parts.reduce((a, b) => (workOf(b) > workOf(a) ? b : a));
    return { who: [part.s], why: cycle.absent.length ? 'of those whose journals are here' : '' };
  }
  function slowestText(cycle) {
    if (cycle.parts.length + cycle.absent.length < 2) return '';
    const { who, why } = slowest(cycle);
    const names = who.length > 3 ? `${who.slice(0, 3).map(nameOf_).join(', ')} and ${who.length - 3} more` : who.map(nameOf_).join(', ');
    return why ? `${names} (${why})` : names;
  }
  const moved = (cycle) => sum(cycle.parts.map((part) => part.d[0] - part.d[1])) * (cycle.kind === 0 ? 1 : -1);

  // Of a pause, what became of the contents of all ranks: copied, unchanged, zero; null: that is not recorded.
  const contentsOf = (cycle) => cycle.parts.reduce((all, part) => (part.x ? part.x.map((n, i) => n + (all ? all[i] : 0)) : all), null);

  function spanOf(cycle) {
    return { begin: Math.min(...cycle.parts.map((p) => p.a)), end: Math.max(...cycle.parts.map((p) => p.e)), failed: failedParts(cycle).length > 0 };
  }
  function outcomeOf(cycle) {
    const failed = failedParts(cycle);
    if (failed.some((part) => part.o === 2)) return 'failed, not undone';
    if (failed.length) return neverBegan(cycle) ? 'never began' : 'failed, undone';
    return cycle.parts.some((part) => part.o === 3) ? 'not finished' : 'done';
  }
  const badge = (text) => el('span', { class: 'badge ' + (text === 'done' ? 'good' : text === 'not finished' ? 'warn' : 'bad') },
    el('span', { 'aria-hidden': 'true' }, text === 'done' ? '\u2713 ' : text === 'not finished' ? '\u2026 ' : '\u2715 '), text);

  const neverBegan = (cycle) => cycle.parts.every((part) => part.b === null);

  // Where a session itself is why a pause or resume failed.
  function failuresOf(session) {
    const failures = [];
    for (const cycle of data.cycles) {
      if (failedParts(cycle).length === 0) continue;
      if (neverBegan(cycle) && cycle.absent.includes(session)) failures.push({ t: spanOf(cycle).begin, text: `did not come to ${nameOf(cycle)}` });
      for (const part of cycle.parts) {
        if (part.s !== session || part.o === 0 || part.o === 3 || !(part.f || part.c === session)) continue;
        const phase = part.p.find((p) => p[4] === 0);
        failures.push({ t: phase ? phase[2] : part.e, text: `${nameOf(cycle)} failed: ${part.m || ''}` });
      }
    }
    return failures;
  }

  // ---- the chosen one ----------------------------------------------------------------------------------------------------------

  // From the moment all had come; how long each had waited for that is told in words. From the first arrival if it never began.
  function ganttStart(cycle) {
    const began_ = cycle.parts.filter((part) => part.b !== null).map((part) => part.b);
    return began_.length === cycle.parts.length ? Math.min(...began_) : spanOf(cycle).begin;
  }
  function gantt(cycle, index, width) {
    const begin = ganttStart(cycle), end = spanOf(cycle).end;
    const span = Math.max(end - begin, 1);
    const waited = cycle.parts.some((part) => part.a < begin);
    const narrow = width < 560;
    const label = (narrow ? 52 : 70) + (waited ? (narrow ? 62 : 110) : 8), rowHeight = 24, right = 8;
    const height = (cycle.parts.length + cycle.absent.length) * rowHeight + 26;
    const x = (t) => label + (Math.max(t - begin, 0) / span) * (width - label - right);
    const root = svg('svg', { class: 'gantt', viewBox: `0 0 ${width} ${height}`, role: 'img',
      'aria-label': `${nameOf(cycle)}: phases of ${cycle.parts.length} ranks over ${duration(span)}. The table below has the same times.` });
    const step = roundStep(span, (width - label) / 90);
    for (let t = 0; t <= span; t += step) {
      const at = x(begin + t), near = at > width - 28;
      root.append(svg('line', { class: 'gridline', x1: at, x2: at, y1: 0, y2: height - 20 }),
        svg('text', { class: 'scale', x: at, y: height - 6, 'text-anchor': near ? 'end' : t === 0 ? 'start' : 'middle' }, tick(t, step)));
    }
    cycle.parts.forEach((part, row) => root.append(ganttRow(cycle, index, part, row * rowHeight, label, rowHeight, x, begin, narrow)));
    cycle.absent.forEach((who, index) => {
      const y = (cycle.parts.length + index) * rowHeight;
      root.append(svg('text', { class: 'row-label', x: 0, y: y + 15 }, nameOf_(who)),
        svg('text', { class: 'cross', x: label, y: y + 17 }, neverBegan(cycle) ? '\u2715' : ''),
        svg('text', { class: 'scale', x: label + (neverBegan(cycle) ? 18 : 4), y: y + 16 }, who >= sessions.length ? 'its journal was not given' : neverBegan(cycle) ? 'did not come' : 'nothing of it in its journal'));
    });
    return root;
  }
  const nameOf_ = (index) => capital(everybody[index] ? everybody[index].name : 'unknown');

  function ganttRow(cycle, index, part, y, label, rowHeight, x, begin, narrow) {
    const g = svg('g', {}, svg('text', { class: 'row-label', x: 0, y: y + 16 }, nameOf_(part.s)));
    if (part.a < begin) {
      g.append(svg('text', { class: 'scale', x: label - 10, y: y + 16, 'text-anchor': 'end' }, (narrow ? '' : 'waited ') + duration(begin - part.a)));
    }
    for (const [at, [phase, begun, worked, decided, passed, steps, voted]] of part.p.entries()) {
      if (part.b !== null && decided !== null && decided <= part.b) continue;  // the wait for the others
      const [word, colour] = phaseOf(phase);
      const undo = isUndo(phase, cycle);
      const end = decided === null ? part.e : decided;
      const from = x(begun), middle = x(worked), to = Math.max(x(end), from + 0.7);
      const title = `${nameOf_(part.s)}, ${undo ? 'undo: ' : ''}${word}: ${duration(worked - begun)} of work` +
        ` (${plural(steps, 'step')}), ${voted ? (voted > 0 ? 'voted for it' : 'voted against it') + ', ' : ''}then ${duration(end - worked)} waiting for others${decided === null ? '; never decided' : passed ? '' : '; FAILED'}`;
      const bar = svg('a', { href: links.phase(index, part, at), tabindex: -1, 'data-phase': links.phase(index, part, at), class: 'phase ' + colour + (undo ? ' undo' : '') + (passed ? '' : ' failed') }, svg('title', {}, title),
        svg('rect', { class: 'wait', x: from, y: y + 4, width: to - from, height: rowHeight - 8 }),
        svg('rect', { class: 'work', x: from, y: y + 4, width: Math.max(middle - from, 0), height: rowHeight - 8 }));
      if (voted) bar.append(svg('line', { class: 'vote', x1: middle, x2: middle, y1: y + 2, y2: y + rowHeight - 2 }));
      const text = undo ? 'undo: ' + word : word;
      if (to - from > text.length * 6.6 + 8) bar.append(svg('text', { x: from + 5, y: y + 16 }, text));
      g.append(bar);
      if (!passed && (decided !== null || part.o !== 0)) {
        g.append(svg('text', { class: 'cross', x: Math.max(to - 11, from), y: y + 17 }, part.f || part.c === part.s ? '\u2715' : ''));
      }
    }
    return g;
  }

  function phaseTable(cycle, index) {
    const rows = cycle.parts.flatMap((part) => part.p.map((phase, at) => ({ part, phase, at })));
    return tableOf({ caption: `${nameOf(cycle)}: phases of each rank`, unit: ['phase', 'phases'], rows, perPage: 60, columns: [
      { label: 'Rank', first: true, cell: (r) => capital(sessions[r.part.s].name), sort: (r) => r.part.s },
      { label: 'Phase', cell: (r) => links.link(links.phase(index, r.part, r.at), undoOr(r.phase[0], cycle)), sort: (r) => r.phase[1] },
      figure('Steps', (r) => r.phase[5], grouped),
      figure('Work', (r) => r.phase[2] - r.phase[1], duration),
      { label: 'Wait', number: true, cell: (r) => (r.phase[3] === null ? 'to the end' : duration(r.phase[3] - r.phase[2])),
        sort: (r) => (r.phase[3] === null ? Infinity : r.phase[3] - r.phase[2]), downFirst: true },
      { label: 'Own vote', cell: (r) => ['against', 'not recorded', 'for'][r.phase[6] + 1], sort: (r) => r.phase[6] },
      { label: 'Decision', cell: (r) => (r.phase[3] === null ? 'never decided' : r.phase[4] ? 'passed' : 'failed'), sort: (r) => r.phase[4] },
    ] });
  }

  function stepSummary(cycle) {
    const totals = new Map();
    for (const part of cycle.parts) {
      for (const [kind, count, ns] of part.st) {
        const t = totals.get(kind) || { count: 0, ns: 0, worst: 0, who: 0 };
        t.count += count;
        t.ns += ns;
        if (ns > t.worst) { t.worst = ns; t.who = part.s; }
        totals.set(kind, t);
      }
    }
    return tableOf({ caption: `${nameOf(cycle)}: steps by kind, all ranks`, rows: [...totals.keys()], perPage: 20, columns: [
      { label: 'Step', first: true, cell: (k) => data.steps[k], sort: (k) => k },
      figure('How many', (k) => totals.get(k).count, grouped),
      figure('Mean', (k) => totals.get(k).ns / totals.get(k).count, duration),
      figure('Longest sum', (k) => totals.get(k).worst, duration),
      { label: 'Of', cell: (k) => nameOf_(totals.get(k).who), sort: (k) => totals.get(k).who },
    ] });
  }

  function legend(cycle) {
    const used = new Set();
    for (const part of cycle.parts) for (const [phase] of part.p) used.add(phase);
    const waited = cycle.parts.some((part) => part.a < ganttStart(cycle));
    return el('div', { class: 'legend small' }, [...used].sort((a, b) => a - b).map((phase) =>
      el('span', { class: 'key' }, el('i', { class: 'swatch ' + phaseOf(phase)[1] }), undoOr(phase, cycle))),
    el('span', { class: 'key' }, el('i', { class: 'swatch waiting' }), 'paler: waiting for other ranks'),
    cycle.parts.some((part) => part.p.some((p) => p[6])) ? el('span', { class: 'key' }, el('i', { class: 'swatch vote-mark' }), 'its vote') : '',
    waited ? el('span', { class: 'key muted' }, 'The clock starts when all ranks had come; \u201cwaited\u201d is what each had waited for that.') : '');
  }

  // Who held the device when its memory ran out: what the journals of this job say of that moment.
  function holders(cycle) {
    const tables = [];
    for (const part of cycle.parts.filter((p) => p.f)) {
      const shortage = data.shortages.find((s) => s.s === part.s && s.q === part.f.seq);
      if (!shortage) continue;
      const host = el('div', { class: 'holders' }, el('h4', {}, `Who held device ${shortage.device} of ${sessions[shortage.s].name}` + (shortage.uuid ? ` (${shortage.uuid})` : '') + ' at that moment'));
      if (shortage.holders.length) {
        const anywhere = shortage.holders.some((h) => h[3]);
        makeTable(host, { caption: 'Memory of the device by rank when it ran out', rows: shortage.holders, perPage: 20, sorted: { column: 1, down: true }, columns: [
          { label: 'Rank', first: true, cell: (h) => nameOf_(h[0]), sort: (h) => h[0] },
          figure('Held', (h) => h[1], bytes),
          figure('Given back, must return', (h) => h[2], bytes),
          ...(anywhere ? [figure('Pools and cuMemAlloc, any device', (h) => h[3], bytes)] : []),
        ] });
      }
      host.append(el('p', { class: 'muted small' }, (shortage.holders.length ? 'This is NCCL\u2019s memory under AMem. ' : 'No rank of this job held NCCL\u2019s memory on it. ') +
        'What the same or other processes held besides is not in the journals; where the driver told, the message above names them.'));
      tables.push(host);
    }
    return tables;
  }

  const detail = el('div', { id: 'cycle-detail', class: 'detail', tabindex: -1, role: 'region', 'aria-label': 'The chosen pause or resume' });
  let drawGantt = () => {};
  // The phase that a link named, in the chart.
  let marked = '';
  function markPhase(href, move) {
    for (const bar of detail.querySelectorAll('.phase')) {
      const here = bar.dataset.phase === href;
      bar.classList.toggle('found-phase', here);
      if (!here || !move) continue;
      bar.scrollIntoView({ block: 'center' });
      bar.focus({ preventScroll: true });
    }
  }
  // False: this rank took no such phase.
  function revealPhase(index, session, word) {
    const part = data.cycles[index].parts.find((p) => p.s === session);
    const at = part ? part.p.findIndex((_, i) => links.phaseWord(part, i) === word) : -1;
    if (at < 0) return false;
    marked = links.phase(index, part, at);
    markPhase(marked, true);
    return true;
  }
  // The pause or resume of a kind at a time, by index; -1: its phases are not in the page.
  const at = (kind, begin, end) => data.cycles.findIndex((cycle) => !cycle.tag && cycle.kind === kind && spanOf(cycle).begin <= end && spanOf(cycle).end >= begin);
  function select(index, move) {
    selected = index;
    marked = '';
    const cycle = data.cycles[index];
    const { begin, end } = spanOf(cycle);
    const contents = (contentsOf(cycle) || []).map(bytes);
    const holder = el('div', { class: 'gantt-box' });
    const told = failedParts(cycle).filter((part) => part.m);
    const root = told.find((part) => part.f) || told.find((part) => part.c === part.s) || told[0];
    const reason = root && (root.f ? root.f.message : root.m);
    const others = told.find((part) => part !== root && !part.m.includes(reason));
    detail.replaceChildren(
      el('div', { class: 'head' }, el('h3', {}, links.link(links.cycle(index), nameOf(cycle)), ' ', badge(outcomeOf(cycle))),
        el('div', { class: 'tools' }, el('button', { type: 'button', onclick: () => {
          const margin = (end - begin) * 0.4 + 1e5;
          links.go(links.time(Math.max(0, begin - margin), end + margin));
        } }, 'Show in the memory chart'), el('button', { type: 'button', onclick: () => events.around(cycle) }, 'Show its events'))),
      root ? el('p', { class: 'failure-text' }, el('strong', {}, capital(sessions[root.s].name) + ': '), reason) : '',
      others ? el('p', { class: 'muted small' }, `${capital(sessions[others.s].name)} was told: ${others.m}`) : '',
      contents.length ? el('p', { class: 'muted small' }, `Contents: ${contents[0]} copied, ${contents[1]} unchanged since the pause before, ${contents[2]} zero.`) : '',
      ...holders(cycle), holder, legend(cycle),
      el('details', {}, el('summary', {}, 'Steps by kind'), stepSummary(cycle)),
      el('details', {}, el('summary', {}, 'Phases as a table'), phaseTable(cycle, index)));
    drawGantt = () => {
      const width = holder.clientWidth;
      if (width > 0) holder.replaceChildren(gantt(cycle, index, width));
      markPhase(marked, false);
    };
    drawGantt();
    if (list) list.redraw();
    if (move) show(detail);
  }

  function start() {
    const host = byId('cycles-body');
    if (data.cycles.length === 0) {
      host.append(el('p', { class: 'muted' }, 'No pause was ever asked for.'));
      return;
    }
    list = makeTable(host, { caption: 'Pauses and resumes', unit: ['pause or resume', 'pauses and resumes'], perPage: 12, class: 'pick',
      rows: data.cycles.map((_, i) => i), sorted: { column: 1, down: true },
      note: () => (data.job.cycles_left_out ? `; ${grouped(data.job.cycles_left_out)} more a rank are in the strip above the memory charts only` : ''),
      rowClass: (i) => (i === selected ? 'chosen' : ''),
      columns: [
        { label: 'What', first: true, sort: (i) => data.cycles[i].kind * 1e9 + data.cycles[i].parts[0].n,
          cell: (i) => links.link(links.cycle(i), nameOf(data.cycles[i])) },
        { label: 'At', number: true, sort: (i) => spanOf(data.cycles[i]).begin, cell: (i) => moment(spanOf(data.cycles[i]).begin) },
        { label: 'Ranks', number: true, sort: (i) => data.cycles[i].parts.length, cell: (i) => grouped(data.cycles[i].parts.length + data.cycles[i].absent.length) },
        figure('Duration', (i) => durationOf(data.cycles[i]), duration),
        { label: 'Slowest', sort: (i) => slowest(data.cycles[i]).who[0], cell: (i) => slowestText(data.cycles[i]) },
        figure('Given back / brought back', (i) => moved(data.cycles[i]), bytes),
        ...(data.cycles.some(contentsOf) ? [{ label: 'Contents copied', number: true, downFirst: true,
          sort: (i) => (contentsOf(data.cycles[i]) || [-1])[0], cell: (i) => (contentsOf(data.cycles[i]) ? bytes(contentsOf(data.cycles[i])[0]) : '') }] : []),
        { label: 'Result', sort: (i) => outcomeOf(data.cycles[i]), cell: (i) => badge(outcomeOf(data.cycles[i])) },
      ] });
    host.append(detail);
    let index = data.cycles.length - 1;
    data.cycles.forEach((cycle, i) => { if (outcomeOf(cycle) !== 'done') index = i; });
    select(index);
    list.turnTo(index);
    new ResizeObserver(() => drawGantt()).observe(host);
  }
  return { start, select, revealPhase, at, spanOf, outcomeOf, durationOf, failuresOf };
})();
