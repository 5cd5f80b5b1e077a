// Links into the page: an event, an allocation, a pause or resume, a phase of one rank in it, a stretch of time. Each is a
// fragment of the address, so that it can be copied, sent, and left again with the browser's back button.
//
//   #event/r2/1234   #allocation/r2/17   #cycle/resume-3   #phase/resume-3/r2/create   #time/12.5/13

const links = (() => {
  // "r2" while one session only has that rank, else the session's id.
  const keys = sessions.map((s) => (s.rank >= 0 && sessions.filter((o) => o.rank === s.rank).length === 1 ? 'r' + s.rank : s.id));
  const sessionOf = (key) => keys.indexOf(key);

  // A failed resume may be tried again under its number: from the second on they are told apart.
  const cycleKeys = [];
  const seen = new Map();
  for (const cycle of data.cycles) {
    const name = `${cycle.kind === 0 ? 'pause' : 'resume'}-${cycle.parts[0].n}${cycle.tag ? '-of-' + cycle.tag.replace(/[^A-Za-z0-9]+/g, '-') : ''}`;
    const times = (seen.get(name) || 0) + 1;
    seen.set(name, times);
    cycleKeys.push(times === 1 ? name : `${name}.${times}`);
  }
  const phaseWord = (part, at) => {
    const word = data.phases[part.p[at][0]].replace(/^.*: /, '').replaceAll(' ', '-');
    const before = part.p.slice(0, at).filter((p) => p[0] === part.p[at][0]).length;
    return before ? `${word}.${before + 1}` : word;
  };

  const event = (session, number) => `#event/${keys[session]}/${number}`;
  const allocation = (session, id) => `#allocation/${keys[session]}/${id}`;
  const cycle = (index) => '#cycle/' + cycleKeys[index];
  const phase = (index, part, at) => `#phase/${cycleKeys[index]}/${keys[part.s]}/${phaseWord(part, at)}`;
  const time = (from, to) => `#time/${(from / 1e9).toFixed(6)}/${(to / 1e9).toFixed(6)}`;

  const missing = (what) => {
    const place = byId('no-such-place');
    place.hidden = false;
    place.textContent = `This page has no ${what}: the link is of another report, or the list leaves it out.`;
    show(place);
  };
  const routes = {
    event: (session, number) => session >= 0 && events.reveal(session, Number(number)),
    allocation: (session, id) => session >= 0 && allocations.reveal(session, id),
  };
  // Shows what an address names. False: it names a section, which the browser finds by itself, or nothing.
  function follow(hash) {
    byId('no-such-place').hidden = true;
    const [kind, first, second, third] = decodeURIComponent(hash.slice(1)).split('/');
    if (routes[kind]) return routes[kind](sessionOf(first), second) || missing(`${kind} ${second} of ${first}`);
    if (kind === 'time') return memory.setDomain(Number(first) * 1e9, Number(second) * 1e9), show(byId('memory'));
    if (kind !== 'cycle' && kind !== 'phase') return;
    const index = cycleKeys.indexOf(first);
    if (index < 0) return missing(`pause or resume ${first}`);
    cycles.select(index, true);
    if (kind === 'phase' && !cycles.revealPhase(index, sessionOf(second), third)) missing(`phase ${third} of ${second}`);
  }
  // As if the link was chosen; again, where the address is that already.
  function go(hash) {
    if (location.hash === hash) follow(hash); else location.hash = hash;
  }
  function start() {
    addEventListener('hashchange', () => follow(location.hash));
    if (location.hash) follow(location.hash);
  }
  const link = (hash, ...children) => el('a', { href: hash, class: 'deep', onclick: () => { if (location.hash === hash) follow(hash); } }, children);
  return { event, allocation, cycle, phase, phaseWord, time, go, link, start };
})();
