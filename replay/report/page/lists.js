// The allocations and the events: long lists with filters and a search.

const rankChoices = () => [['', 'all ranks']].concat(sessions.map((session, index) => [String(index), session.name]));

// Whether a choice lets a row pass that has this number; '' lets all.
const lets = (choice, number) => choice.value === '' || Number(choice.value) === number;

// A search among rows: of a text, whether a row has all its words, in any order. The words of a row are put together when first needed.
function searcher(wordsOf) {
  const known = [];
  const haystack = (i) => (known[i] = known[i] || wordsOf(i).join(' ').replaceAll(THIN, ' ').toLowerCase());
  return (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return (i) => words.every((word) => haystack(i).includes(word));
  };
}

const allocations = (() => {
  const c = data.allocations.columns;
  const count = c.s.length;
  const everyRow = Array.from({ length: count }, (_, i) => i);
  const STATES = ['held', 'given back', 'freed', 'stays: host memory', 'stays: registered with a network card', 'stays: multicast', 'stays: the program\u2019s own'];
  const stateOf = (i) => STATES[c.state[i]] || 'held';
  const address = (i) => (c.addr[i] ? '0x' + c.addr[i] : '');
  const linkId = (i) => (c.id[i] ? String(c.id[i]) : `${address(i)}.${c.q[i]}`);  // an address may be used again
  const idOf = (i) => (c.id[i] ? String(c.id[i]) : address(i));
  const site = (i) => data.allocations.sites[c.site[i]] || '';
  const communicator = (i) => data.allocations.communicators[c.comm[i]] || '';
  const anyCommunicator = data.allocations.communicators.some((name) => name);
  const place = (i) => data.allocations.locations[c.loc[i]] || '';
  const peer = (i) => (c.peer[i] >= 0 ? `${nameOf(c.peer[i])}, allocation ${c.pid[i]}` : '');
  const lived = (i) => (c.qe[i] ? c.te[i] : sessions[c.s[i]].end) - c.t[i];
  const note = (i) => data.allocations.notes[i];
  let list = null;

  const search = searcher((i) => [sessions[c.s[i]].name, 'allocation ' + idOf(i), address(i), data.allocation_kinds[c.kind[i]], bytes(c.bytes[i]),
    peer(i), site(i), communicator(i), place(i), stateOf(i), c.slab[i] ? 'slab ' + c.slab[i] : '', note(i) || '', c.q[i]]);
  const inputs = {
    text: searchBox('id, address, call site, communicator, peer', apply), rank: choice(rankChoices(), apply),
    kind: choice([['', 'all kinds']].concat(data.allocation_kinds.map((k, i) => [String(i), k])), apply),
    state: choice([['', 'all'], ['there', 'there at the end'], ['0', 'held'], ['1', 'given back'], ['2', 'freed'], ['4', 'stays: registered'], ['5', 'stays: multicast'], ['6', 'stays: the program\u2019s own']], apply),
    group: choice([['', 'nothing, list all'], ...(anyCommunicator ? [['communicator', 'communicator']] : []), ['site', 'call site'], ['rank', 'rank'], ['peer', 'owner'], ['bytes', 'size']], apply),
  };
  function matching() {
    const found = search(inputs.text.value);
    return everyRow.filter((i) => lets(inputs.rank, c.s[i]) && lets(inputs.kind, c.kind[i]) &&
      (inputs.state.value === 'there' ? c.state[i] !== 2 : lets(inputs.state, c.state[i])) && found(i));
  }
  const isSlab = (i) => c.kind[i] === 6 || c.kind[i] === 7;  // what lies in it is listed itself
  const total = (rows) => ', ' + bytes(rows.reduce((all, i) => all + (isSlab(i) ? 0 : c.bytes[i]), 0)) + (rows.some(isSlab) ? ' without slabs' : '');

  const columns = [
    { label: 'Rank', first: true, cell: (i) => capital(sessions[c.s[i]].name), sort: (i) => c.s[i] },
    { label: 'Allocation', number: true, cell: (i) => links.link(links.allocation(c.s[i], linkId(i)), c.id[i] ? grouped(c.id[i]) : '\u00b7'), sort: (i) => c.id[i] },
    { label: 'Kind', cell: (i) => data.allocation_kinds[c.kind[i]], sort: (i) => c.kind[i] },
    { label: 'Size', number: true, cell: (i) => bytes(c.bytes[i]), sort: (i) => (note(i) ? 1e18 : 0) + c.bytes[i], downFirst: true },
    { label: 'State', sort: (i) => c.state[i], cell: (i) => (note(i) ? el('span', { class: 'badge bad', title: note(i) }, '\u2715 ' + stateOf(i) + ', a step failed') : stateOf(i) + (c.slab[i] && c.state[i] !== 2 ? `, in slab ${grouped(c.slab[i])}` : '')) },
    { label: 'Made', number: true, cell: (i) => moment(c.t[i]), sort: (i) => c.t[i] },
    figure('Lived', lived, duration),
    { label: 'Peers', cell: (i) => peer(i) || (c.most[i] ? `held by ${grouped(c.imp[i])}, at most ${grouped(c.most[i])}` : ''), sort: (i) => (c.peer[i] >= 0 ? 1e6 + c.peer[i] : c.most[i]), downFirst: true },
    { label: 'Address', cell: (i) => (address(i) ? el('code', {}, address(i)) : ''), sort: (i) => c.addr[i].padStart(16, '0') },
    ...(anyCommunicator ? [{ label: 'Communicator', wide: true, cell: communicator, sort: communicator }] : []),
    { label: 'Call site', wide: true, cell: (i) => (site(i) ? el('code', {}, site(i)) : ''), sort: site },
  ];

  // ---- summed up by something --------------------------------------------------------------------------------------------------

  const KEYS = { communicator: ['Communicator', (i) => communicator(i) || 'none known'], site: ['Call site', (i) => site(i) || 'unknown'], rank: ['Rank', (i) => capital(sessions[c.s[i]].name)], bytes: ['Size', (i) => bytes(c.bytes[i])],
    peer: ['Owner', (i) => (c.peer[i] >= 0 ? capital(nameOf(c.peer[i])) : 'own')] };
  function groups(rows) {
    const by = inputs.group.value, [label, key] = KEYS[by];
    const all = new Map();
    for (const i of rows) {
      const name = key(i);
      const g = all.get(name) || { name, count: 0, bytes: 0, there: 0, first: c.t[i] };
      if (isSlab(i)) continue;
      ++g.count;
      g.bytes += c.bytes[i];
      if (c.state[i] !== 2) g.there += c.bytes[i];
      all.set(name, g);
    }
    return tableOf({ caption: 'Allocations by ' + label.toLowerCase(), unit: ['group', 'groups'], rows: [...all.values()], perPage: 25, sorted: { column: 3, down: true }, columns: [
      { label, first: true, cell: (g) => (by === 'site' ? el('code', {}, g.name) : g.name), sort: (g) => g.name },
      figure('Allocations', (g) => g.count, grouped),
      figure('Sum', (g) => g.bytes, bytes),
      figure('There at the end', (g) => g.there, bytes),
    ] });
  }

  const listHost = el('div'), groupHost = el('div', { hidden: true });
  function apply() {
    const rows = matching(), grouping = inputs.group.value !== '';
    listHost.hidden = grouping;
    groupHost.hidden = !grouping;
    if (grouping) groupHost.replaceChildren(groups(rows)); else list.setRows(rows);
  }

  function start() {
    const host = byId('allocations-body');
    const left = data.allocations.left_out;
    host.append(el('div', { class: 'filters', role: 'search', 'aria-label': 'Filter allocations' },
      field('Search', inputs.text, 'grow'), field('Rank', inputs.rank), field('Kind', inputs.kind), field('State', inputs.state), field('Sum up by', inputs.group)));
    if (left) host.append(el('p', { class: 'muted small' }, `${grouped(count)} of ${plural(data.allocations.total, 'allocation')} are listed: those there at the end, and of the others the largest. The other ${grouped(left)} add up to ${bytes(data.allocations.left_out_bytes)}.`));
    host.append(listHost, groupHost);
    list = makeTable(listHost, { caption: 'Allocations of all ranks', unit: ['allocation', 'allocations'], rows: everyRow, columns, note: total, sorted: { column: 3, down: true },
      rowClass: (i) => (note(i) ? 'bad-row' : ''), nothing: count ? undefined : 'No allocation was made.' });
  }
  // The row of an allocation, whatever the list showed before. False: it is not listed.
  function reveal(session, id) {
    const row = everyRow.find((i) => c.s[i] === session && linkId(i) === id);
    if (row === undefined) return false;
    for (const input of Object.values(inputs)) input.value = '';
    inputs.rank.value = String(session);
    apply();
    return list.reveal(row);
  }
  return { start, reveal };
})();

const events = (() => {
  const c = data.events.columns;
  const count = c.s.length;
  const t = new Float64Array(count), seq = new Float64Array(count);
  for (let i = 0; i < count; ++i) {  // differences within each session
    const fresh = i === 0 || c.s[i] !== c.s[i - 1];
    t[i] = c.t[i] + (fresh ? 0 : t[i - 1]);
    seq[i] = c.q[i] + (fresh ? 0 : seq[i - 1]);
  }
  const everyRow = Array.from({ length: count }, (_, i) => i).sort((a, b) => t[a] - t[b] || a - b);
  const isFailure = (i) => c.w[i] === 0;
  let list = null;
  let stretch = null;  // { begin, end } of the time that is shown; null: all of it

  const search = searcher((i) => [sessions[c.s[i]].name, '#' + seq[i], c.k[i] >= 0 ? data.kinds[c.k[i]] : '', c.x[i], 't' + c.th[i]]);
  const kinds = [...new Set(c.k.filter((k) => k >= 0))].sort((a, b) => (data.kinds[a] < data.kinds[b] ? -1 : 1));
  const inputs = {
    text: searchBox('words, address, #number', apply), rank: choice(rankChoices(), apply),
    kind: choice([['', 'all kinds']].concat(kinds.map((k) => [String(k), data.kinds[k]])), apply),
    failures: el('input', { type: 'checkbox', onchange: apply }),
  };
  function matching() {
    const found = search(inputs.text.value);
    return everyRow.filter((i) => lets(inputs.rank, c.s[i]) && lets(inputs.kind, c.k[i]) && (!inputs.failures.checked || isFailure(i)) &&
      (stretch === null || (t[i] + c.d[i] >= stretch.begin && t[i] <= stretch.end)) && found(i));
  }
  const columns = [
    { label: 'Time', number: true, cell: (i) => moment(t[i]), sort: (i) => t[i] },
    { label: 'Rank', first: true, cell: (i) => capital(sessions[c.s[i]].name), sort: (i) => c.s[i] * 1e12 + seq[i] },
    { label: 'Event', number: true, cell: (i) => links.link(links.event(c.s[i], seq[i]), c.k[i] >= 0 ? '#' + grouped(seq[i]) : `#${grouped(seq[i])} +${grouped(c.n[i] - 1)}`), sort: (i) => seq[i] },
    { label: 'What happened', wide: true, cell: (i) => (c.k[i] >= 0 ? (isFailure(i) ? [el('span', { class: 'cross', 'aria-label': 'failure' }, '\u2715 '), c.x[i]] : c.x[i])
      : `${grouped(c.n[i])} events in ${duration(c.d[i])}, not listed: ${c.x[i]}`) },
    { label: 'Thread', number: true, cell: (i) => (c.th[i] ? String(c.th[i]) : ''), sort: (i) => c.th[i] },
  ];

  const between = el('p', { class: 'muted small', hidden: true });
  function apply() {
    between.hidden = stretch === null;
    if (stretch !== null) {
      between.replaceChildren(`Only from ${moment(stretch.begin)} to ${moment(stretch.end)}. `,
        el('button', { type: 'button', class: 'link', onclick: () => { stretch = null; apply(); } }, 'All times'));
    }
    list.setRows(matching());
  }
  // Shows all events of a rank ('': of every rank) in a stretch of time (null: at all times).
  function only(rank, time) {
    inputs.text.value = inputs.kind.value = '';
    inputs.failures.checked = false;
    inputs.rank.value = rank;
    stretch = time;
    apply();
  }

  // The row of an event, or the row that counts it.
  function reveal(session, number) {
    only(String(session), null);
    return list.reveal(everyRow.find((i) => c.s[i] === session && seq[i] <= number && number < seq[i] + c.n[i]));
  }
  function around(cycle) {
    only('', cycles.spanOf(cycle));
    show(byId('events'));
  }

  function start() {
    const host = byId('events-body');
    host.append(el('div', { class: 'filters', role: 'search', 'aria-label': 'Filter events' },
      field('Search', inputs.text, 'grow'), field('Rank', inputs.rank), field('Kind', inputs.kind), field('Only failures', inputs.failures, 'tick')), between);
    if (data.events.left_out) host.append(el('p', { class: 'muted small' }, `Of ${plural(data.job.events, 'event')}, ${grouped(data.job.events - data.events.left_out)} are listed, all around failures among them. The others are counted at their places, in grey. `, el('code', {}, 'amem-replay log'), ' prints every one.'));
    const holder = el('div');
    host.append(holder);
    list = makeTable(holder, { caption: 'Events of all ranks by time', unit: ['row', 'rows'], rows: everyRow, columns, perPage: 100, sorted: { column: 0, down: false }, class: 'log',
      rowClass: (i) => (c.k[i] < 0 ? 'sum' : isFailure(i) ? 'bad-row' : c.w[i] <= 2 ? 'landmark' : '') });
  }
  return { start, reveal, around };
})();
