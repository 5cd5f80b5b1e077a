// Who holds whose memory: a graph where it stays readable, and a matrix.

const references = (() => {
  const GRAPH_LIMIT = 16;
  const links = data.links.map(([importer, owner, nowBytes, nowCount, mostBytes, mostCount, total]) =>
    ({ importer, owner, now: [nowBytes, nowCount], most: [mostBytes, mostCount], total }));
  const who = [...new Set(links.flatMap((l) => [l.importer, l.owner]))].sort((a, b) => a - b);
  let when = 'most', focus = null;
  const size = (l) => l[when][0];

  function graph() {
    const radius = 150, middle = 210;
    const place = new Map(who.map((index, i) => {
      const angle = (i / who.length) * 2 * Math.PI - Math.PI / 2;
      return [index, [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle), angle]];
    }));
    const largest = Math.max(1, ...links.map(size));
    const root = svg('svg', { class: 'graph', viewBox: '0 0 420 420', role: 'img',
      'aria-label': 'Graph of ranks; an arrow goes from a rank to the one whose memory it holds. The table has the same figures.' });
    root.append(svg('defs', {}, svg('marker', { id: 'arrow', viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 10, markerHeight: 10,
      orient: 'auto', markerUnits: 'userSpaceOnUse' }, svg('path', { d: 'M0,0.8 L8,4 L0,7.2 Z', class: 'arrow-head' }))));
    for (const link of links) {
      if (size(link) === 0) continue;
      const [x1, y1] = place.get(link.importer), [x2, y2] = place.get(link.owner);
      // Bent to one side, so that the two directions are two lines; short of both circles.
      const dx = x2 - x1, dy = y2 - y1, length = Math.hypot(dx, dy) || 1;
      const bend = Math.min(38, length * 0.16);
      const cx = (x1 + x2) / 2 - (dy / length) * bend, cy = (y1 + y2) / 2 + (dx / length) * bend;
      const toward = (x, y, gap) => {
        const l = Math.hypot(cx - x, cy - y) || 1;
        return [x + ((cx - x) / l) * gap, y + ((cy - y) / l) * gap];
      };
      const [ax, ay] = toward(x1, y1, 23), [bx, by] = toward(x2, y2, 25);
      const touched = focus === null || link.importer === focus || link.owner === focus;
      root.append(svg('path', { class: 'edge' + (!touched ? ' dim' : focus === null ? '' : link.owner === focus ? ' lit in' : ' lit'),
        d: `M${ax.toFixed(1)},${ay.toFixed(1)} Q${cx.toFixed(1)},${cy.toFixed(1)} ${bx.toFixed(1)},${by.toFixed(1)}`,
        style: touched && focus === null ? `opacity:${(0.22 + 0.55 * Math.sqrt(size(link) / largest)).toFixed(2)}` : null,
        'stroke-width': (0.8 + 4.5 * Math.sqrt(size(link) / largest)).toFixed(2), 'marker-end': 'url(#arrow)' },
      svg('title', {}, sentence(link))));
    }
    for (const index of who) {
      const [x, y] = place.get(index);
      const known = index < sessions.length;
      const toggle = () => { focus = focus === index ? null : index; draw(); };
      const node = svg('g', { class: 'node' + (known ? '' : ' unknown') + (focus === index ? ' chosen' : ''), role: 'button', tabindex: 0,
        'aria-pressed': String(focus === index), 'data-node': index,
        'aria-label': `${capital(everybody[index].name)}: show only its references`,
        onclick: toggle, onkeydown: (event) => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); toggle(); refocus(index); } } },
      svg('title', {}, everybody[index].name + (known ? '' : ' (its journal was not given)')),
      svg('circle', { cx: x, cy: y, r: 20 }), svg('text', { x, y: y + 4.5 }, shortName(index)));
      root.append(node);
    }
    return root;
  }
  function refocus(index) {
    const node = byId('references-body').querySelector(`[data-node="${index}"]`);
    if (node) node.focus();
  }
  const shortName = (index) => everybody[index].name.replace(/^rank /, '').replace(/^(pid|session) /, '').replace(/, pid.*/, '').slice(0, 6);
  const sentence = (l) => `${capital(everybody[l.importer].name)} holds ${bytes(size(l))} of ${everybody[l.owner].name}` +
    ` (${plural(l[when][1], 'allocation')}; ${plural(l.total, 'import')} in all)`;

  function matrix() {
    const largest = Math.max(1, ...links.map(size));
    const at = new Map(links.map((l) => [l.importer + ' ' + l.owner, l]));
    const head = el('tr', {}, el('th', { scope: 'col' }, el('span', { class: 'muted' }, 'holder \u2193 of \u2192')),
      who.map((index) => el('th', { scope: 'col', class: 'number' }, who.length > 8 ? shortName(index) : capital(everybody[index].name))),
      el('th', { scope: 'col', class: 'number' }, 'Sum'));
    const body = who.map((importer) => {
      const own = links.filter((l) => l.importer === importer);
      return el('tr', {}, el('th', { scope: 'row' }, capital(everybody[importer].name)), who.map((owner) => {
        const link = at.get(importer + ' ' + owner);
        const value = link ? size(link) : 0;
        const strength = value ? 0.1 + 0.5 * Math.sqrt(value / largest) : 0;
        return el('td', { class: 'number heat', style: value ? `--heat:${strength.toFixed(2)}` : null, title: link ? sentence(link) : null },
          importer === owner ? '' : value ? bytes(value) : '\u00b7');
      }), el('td', { class: 'number' }, bytes(sum(own.map(size)))));
    });
    return scroller('Who holds whose memory, as a table',
      el('table', { class: 'grid matrix' }, el('caption', { class: 'hidden-text' }, 'Bytes that the rank of a row holds of the rank of a column'),
        el('thead', {}, head), el('tbody', {}, body)));
  }

  const holder = el('div', { class: 'references' });
  function draw() {
    const parts = [];
    if (who.length <= GRAPH_LIMIT) parts.push(el('div', { class: 'graph-box' }, graph(),
      el('p', { class: 'muted small' }, focus === null ? 'An arrow goes from the holder to the owner; the wider, the more. Choose a rank to see only its own.'
        : `Orange: what others hold of ${everybody[focus].name}. Blue: what it holds of others. Choose it again for all.`)));
    parts.push(matrix());
    holder.replaceChildren(...parts);
  }

  function start() {
    const host = byId('references-body');
    if (links.length === 0) {
      host.append(el('p', { class: 'muted' }, 'No session ever imported memory of another.'));
      return;
    }
    byId('references-tools').append(field('Shown', choice([['most', 'the most at once'], ['now', 'at the end']], (value) => { when = value; draw(); })));
    host.append(holder);
    draw();
  }
  return { start };
})();
