// The head of the page, the list of ranks, what is left out; and the start of everything.

const sentence = (text) => capital(text) + (/[.!?]$/.test(text) ? '' : '.');

// `Words in backquotes` are what one types.
const typed = (text) => text.split('`').map((part, i) => (i % 2 ? el('code', {}, part) : part));

// Up to when the journals of living processes tell what they did: the moment of reading, or of packing. A report is read later.
function presentText() {
  const known = sessions.map((s) => s.as_of).filter((t) => t !== null);
  const t = known.length ? Math.max(...known) : data.job.duration;
  return data.job.began_ms ? localTime(data.job.began_ms + t / 1e6) : moment(t);
}

function drawVerdict() {
  const v = data.verdict;
  const evidence = v.evidence.map((e) => el('li', { class: 'role' + e.role },
    e.s >= 0 ? el('strong', {}, capital(nameOf(e.s)) + ' ') : '',
    e.q && e.s >= 0 && e.s < sessions.length ? links.link(links.event(e.s, e.q), `#${grouped(e.q)}`) : '',
    e.t !== null && e.t !== undefined ? el('span', { class: 'muted' }, ` ${moment(e.t)} `) : ' ', e.x,
    e.role === 1 ? el('span', { class: 'badge bad' }, 'cause') : e.role === 2 ? el('span', { class: 'badge' }, 'consequence') : ''));
  fill(byId('verdict'), { class: 'card verdict ' + (v.healthy ? 'good' : 'bad') },
    [el('p', { class: 'eyebrow' }, el('span', { 'aria-hidden': 'true' }, v.healthy ? '\u2713 ' : '\u2715 '), v.healthy ? 'Healthy' : v.healthy === null ? 'Incomplete' : 'A failure', sessions.some((s) => s.as_of !== null) ? `, as of ${presentText()}` : ''),
      el('h1', { id: 'verdict-title' }, v.headline || (v.healthy ? 'Nothing is wrong' : 'Something failed')),
      v.summary ? el('p', {}, typed(v.summary)) : '',
      v.remedy ? el('p', { class: 'remedy' }, el('strong', {}, 'To do. '), typed(sentence(v.remedy))) : '',
      !v.healthy && v.s >= 0 && v.s < sessions.length && v.q ? el('p', {}, el('button', { type: 'button', onclick: () => links.go(links.event(v.s, v.q)) }, `Show event #${grouped(v.q)} of ${nameOf(v.s)}`)) : '',
      evidence.length ? el('details', { open: evidence.length <= 12 }, el('summary', {}, `Evidence, ${plural(evidence.length, 'fact')}`), el('ol', { class: 'evidence' }, evidence)) : '',
      v.notes.length ? el('ul', { class: 'muted' }, v.notes.map((note) => el('li', {}, typed(sentence(note))))) : '',
      v.damage.length ? el('ul', { class: 'damage' }, v.damage.map((note) => el('li', {}, 'Not readable: ' + note))) : '']);
}

function drawFacts() {
  const hosts = new Set(sessions.map((s) => s.host).filter(Boolean));
  const peaks = sessions.map((s) => s.peak[1]);
  const tile = (label, value, more) => el('div', { class: 'tile' }, el('dt', {}, label), el('dd', {}, el('strong', {}, value), more ? el('span', { class: 'muted' }, more) : ''));
  const cycleTile = (kind, word, known) => {
    const all = data.cycles.filter((cycle) => !cycle.tag && cycle.kind === kind);
    const times = all.filter((cycle) => cycles.outcomeOf(cycle) === 'done').map(cycles.durationOf), bad = all.length - times.length;
    return tile(word, grouped(Math.max(times.length, known)), [times.length ? `median ${duration(median(times))}` : '', bad ? `${grouped(bad)} failed` : ''].filter(Boolean).join(', '));
  };
  const began = data.job.began_ms ? localTime(data.job.began_ms) : '';
  byId('facts').append(el('dl', { class: 'tiles' },
    tile(sessions.every((s) => s.rank >= 0) ? 'Ranks' : 'Sessions', grouped(sessions.length), hosts.size ? `on ${plural(hosts.size, 'host')}` : ''),
    tile('Time', duration(data.job.duration), began ? `from ${began}` : ''),
    tile('Events', grouped(data.job.events), `in ${bytes(data.job.bytes)} of journals`),
    tile('Device memory', bytes(Math.max(0, ...peaks)), sessions.length > 1 ? `peak of one rank, ${bytes(sum(peaks))} of all` : 'peak'),
    cycleTile(0, 'Pauses done', Math.max(0, ...sessions.map((s) => s.pauses))), cycleTile(1, 'Resumes done', Math.max(0, ...sessions.map((s) => s.resumes)))));
}

// What is known of a session's process besides its journal: who noticed its end, what others saw of it, its own threads.
function processFacts(i) {
  const s = sessions[i];
  const facts = [];
  if (s.died) facts.push(el('li', {}, 'its end was noticed by ', nameOf(s.died[1]), ' ', moment(s.died[0]), ' ', links.link(links.event(s.died[1], s.died[2]), `#${grouped(s.died[2])}`)));
  for (const [by, q, t, text] of s.seen.by) facts.push(el('li', {}, `${nameOf(by)} saw it ${moment(t)}: ${text} `, links.link(links.event(by, q), `#${grouped(q)}`)));
  for (const thread of s.seen.threads) facts.push(el('li', {}, thread));
  if (s.refused) facts.push(el('li', {}, plural(s.refused, 'launch was', 'launches were') + ' refused, because memory was paused'));
  for (const [q, t, text] of s.outside) facts.push(el('li', {}, `${moment(t)}: ${text} `, links.link(links.event(i, q), `#${grouped(q)}`)));
  if (s.exit >= 0) facts.push(el('li', {}, `exit code ${s.exit}`));
  return facts.length ? el('ul', { class: 'facts' }, facts) : '';
}

function drawRanks() {
  const trouble = (s) => [s.broken && 'broken: ' + s.broken, s.stopped && 'memory and pauses are shown only up to where ' + s.stopped,
    s.incomplete && 'incomplete: ' + s.incomplete, s.damaged ? plural(s.damaged, 'damaged record') + ': ' + s.damage : '', s.torn && 'its last append was cut short', s.dropped && `begins with event ${grouped(s.first)}, from a snapshot`]
    .filter(Boolean).join('; ');
  makeTable(byId('ranks-body'), { caption: 'Ranks and their journals', unit: ['session', 'sessions'], rows: sessions.map((_, i) => i), perPage: 64, columns: [
    { label: 'Rank', first: true, cell: (i) => capital(sessions[i].name), sort: (i) => i },
    { label: 'Process', cell: (i) => `pid ${sessions[i].pid}` + (sessions[i].host ? ` on ${sessions[i].host}` : ''), sort: (i) => sessions[i].host + sessions[i].pid },
    { label: 'Journal', sort: (i) => sessions[i].status, cell: (i) => el('span', { class: 'badge ' + ({ closed: 'good', live: 'good', crashed: 'bad', broken: 'bad' }[sessions[i].status] || '') }, sessions[i].status) },
    { label: 'State', cell: (i) => sessions[i].lifecycle, sort: (i) => sessions[i].lifecycle },
    figure('Events', (i) => sessions[i].events, grouped),
    figure('Allocations', (i) => sessions[i].allocations, grouped),
    { label: 'Opened', number: true, cell: (i) => moment(sessions[i].start), sort: (i) => sessions[i].start },
    { label: 'Pauses, resumes, failed', number: true, cell: (i) => [sessions[i].pauses, sessions[i].resumes, sessions[i].failed].map(grouped).join(' \u00b7 '), sort: (i) => sessions[i].failed, downFirst: true },
    { label: 'Versions', cell: (i) => [sessions[i].nccl && 'NCCL ' + sessions[i].nccl, sessions[i].driver && 'driver ' + sessions[i].driver, sessions[i].amem && 'AMem ' + sessions[i].amem].filter(Boolean).join(', ') },
    { label: 'Layout', cell: (i) => [sessions[i].layout, sessions[i].content].filter(Boolean).join(', ') },
    { label: 'GPU', cell: (i) => sessions[i].gpus.join(', ') },
    { label: 'Session', cell: (i) => el('code', {}, sessions[i].id) },
    ...(sessions.some((_, i) => processFacts(i)) ? [{ label: 'Its process', wide: true, cell: processFacts }] : []),
    { label: 'Note', wide: true, cell: (i) => trouble(sessions[i]) },
  ] });
  const kinds = new Map();
  for (const s of sessions) for (const [kind, n] of s.kinds) kinds.set(kind, (kinds.get(kind) || 0) + n);
  const byKind = tableOf({ caption: 'Events by kind', rows: [...kinds.keys()], perPage: 64, sorted: { column: 1, down: true }, columns: [
    { label: 'Kind', first: true, cell: (k) => data.kinds[k], sort: (k) => data.kinds[k] },
    figure('Events', (k) => kinds.get(k), grouped)] });
  byId('ranks-body').append(el('details', {}, el('summary', {}, 'Events by kind, all ranks'), byKind));
}

function drawLeftOut() {
  const points = sum(sessions.map((s) => s.series.t.length)), changes = sum(sessions.map((s) => s.changes));
  const lines = [
    changes > points ? `Memory over time: ${grouped(points)} of ${plural(changes, 'change')} are drawn. Of what lies between, every highest and lowest sum stays, at its own time.` : `Memory over time: all ${plural(changes, 'change')}.`,
    data.events.left_out ? `Events: ${grouped(data.events.left_out)} of ${grouped(data.job.events)} are only counted, in the grey rows of the list.` : `Events: all ${grouped(data.job.events)}.`,
    data.allocations.left_out ? `Allocations: ${grouped(data.allocations.left_out)} of ${grouped(data.allocations.total)}, ${bytes(data.allocations.left_out_bytes)} in all; the smallest and oldest of those that were freed.` : `Allocations: all ${grouped(data.allocations.total)}.`,
    data.job.cycles_left_out ? `Pauses and resumes: all are in the strip above the charts. Of their phases are left out: up to ${grouped(data.job.cycles_left_out)} of each rank, none of the first, the last, and the latest failures.` : `Pauses and resumes: all ${grouped(data.cycles.length)}.`,
    ...data.job.notes,
  ];
  byId('left-out-body').append(el('ul', {}, lines.map((line) => el('li', {}, line))),
    el('p', { class: 'muted small print-only' }, 'Printed lists show the rows that were on the screen.'));
  byId('foot').append(`Made by amem-replay ${data.version} on ${data.made_at}. Times count from the first event of the job. The page holds all its data and loads nothing.`);
}

// Patterns for what colour alone should not tell.
function drawPatterns() {
  document.body.append(svg('svg', { width: 0, height: 0, class: 'patterns', 'aria-hidden': 'true' }, svg('defs', {},
    svg('pattern', { id: 'stripes', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
      svg('rect', { width: 2, height: 6, class: 'stripe' })),
    svg('pattern', { id: 'hatch', width: 4, height: 4, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
      svg('rect', { width: 4, height: 4, class: 'hatch-ground' }), svg('rect', { width: 2, height: 4, class: 'hatch' })))));
}

// The sections behind the memory, which are all alike: a title with tools beside it, and a body.
function addSections() {
  for (const [id, title] of Object.entries({ cycles: 'Pauses and resumes', allocations: 'Allocations', references: 'Who holds whose memory',
    events: 'Events', ranks: 'Ranks', 'left-out': 'What this page leaves out' })) {
    document.querySelector('main').append(el('section', { id, class: 'card', 'aria-labelledby': id + '-title', tabindex: -1 },
      el('div', { class: 'head' }, el('h2', { id: id + '-title' }, title), el('div', { class: 'tools', id: id + '-tools' })), el('div', { id: id + '-body' })));
  }
}

try {
  addSections();
  drawPatterns();
  drawVerdict();
  drawFacts();
  cycles.start();
  memory.start();
  allocations.start();
  references.start();
  events.start();
  drawRanks();
  drawLeftOut();
  links.start();
  document.documentElement.dataset.ready = 'yes';
} catch (error) {
  const place = byId('broken-page');
  place.hidden = false;
  place.textContent = `This page could not draw everything: ${error.message}. It needs a browser of 2023 or later; amem-replay has the same facts as text.`;
  throw error;
}
