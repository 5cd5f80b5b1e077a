// A table that sorts, filters and turns pages. Rows are numbers; columns say what a row's cell holds.
//
//   makeTable(host, { caption, columns: [{ label, cell: (row) => node or text, sort: (row) => key, number, wide, first }],
//                     rows: [...], unit: ['allocation', 'allocations'], perPage, sorted: { column, down }, rowClass: (row) => '',
//                     note: (rows) => text, nothing: text })
// Returns { setRows(rows), redraw(), turnTo(row), reveal(row) }.

function makeTable(host, spec) {
  const narrow = matchMedia('screen and (max-width: 46rem)').matches;  // rows are cards there, and long
  const perPage = Math.min(spec.perPage || 50, narrow ? 15 : Infinity);
  let rows, page;
  let sorted = spec.sorted || null;  // { column, down }

  const head = el('tr', { role: 'row' });
  const body = el('tbody', { role: 'rowgroup' });
  const table = el('table', { role: 'table', class: 'grid' + (spec.class ? ' ' + spec.class : '') },
    el('caption', { class: 'hidden-text' }, spec.caption), el('thead', { role: 'rowgroup' }, head), body);
  const count = el('span', { class: 'count', role: 'status', 'aria-live': 'polite' });
  const back = el('button', { type: 'button', onclick: () => turn(page - 1) }, '\u2039 Previous');
  const next = el('button', { type: 'button', onclick: () => turn(page + 1) }, 'Next \u203a');
  const pager = el('div', { class: 'pager' }, count, el('span', { class: 'turn' }, back, next));
  host.append(scroller(spec.caption, table), pager);

  const headers = spec.columns.map((column, index) => {
    const mark = el('span', { class: 'mark', 'aria-hidden': 'true' });
    const label = column.sort
      ? el('button', { type: 'button', class: 'sort', onclick: () => sortBy(index) }, column.label, mark)
      : column.label;
    const th = el('th', { scope: 'col', role: 'columnheader', class: column.number ? 'number' : null }, label);
    head.append(th);
    return { th, mark };
  });

  function sortBy(index) {
    sorted = { column: index, down: sorted && sorted.column === index ? !sorted.down : Boolean(spec.columns[index].downFirst) };
    setRows(rows);
  }
  function arrange() {
    headers.forEach(({ th, mark }, index) => {
      const here = sorted && sorted.column === index;
      if (spec.columns[index].sort) th.setAttribute('aria-sort', here ? (sorted.down ? 'descending' : 'ascending') : 'none');
      mark.textContent = here ? (sorted.down ? ' \u25be' : ' \u25b4') : '';
    });
    if (!sorted) return;
    const key = spec.columns[sorted.column].sort, sign = sorted.down ? -1 : 1;
    const keyed = Array.from(rows, (row) => [key(row), row]);
    keyed.sort((a, b) => (a[0] < b[0] ? -sign : a[0] > b[0] ? sign : 0));
    rows = keyed.map((pair) => pair[1]);
  }
  function turn(to) {
    page = Math.max(0, Math.min(to, Math.ceil(rows.length / perPage) - 1));
    draw();
    host.scrollIntoView({ block: 'nearest' });
  }
  function draw() {
    const from = page * perPage, to = Math.min(rows.length, from + perPage);
    body.replaceChildren(...rows.slice(from, to).map(drawRow));
    if (rows.length === 0) {
      body.append(el('tr', { role: 'row' }, el('td', { role: 'cell', colspan: spec.columns.length, class: 'none' },
        spec.nothing || 'Nothing matches. Clear the search or choose other filters.')));
    }
    const many = rows.length > perPage;
    pager.hidden = !spec.unit && !many;
    back.disabled = page === 0;
    next.disabled = to >= rows.length;
    back.hidden = next.hidden = !many;
    const extent = many ? `${grouped(from + 1)}\u2013${grouped(to)} of ` : '';
    count.textContent = spec.unit ? extent + plural(rows.length, ...spec.unit) + (spec.note ? spec.note(rows) : '') : extent + grouped(rows.length);
  }
  function drawRow(row) {
    const tr = el('tr', { role: 'row', class: (spec.rowClass && spec.rowClass(row)) || null });
    for (const column of spec.columns) {
      const content = column.cell(row);
      const type = column.first ? 'th' : 'td';
      tr.append(el(type, { role: column.first ? 'rowheader' : 'cell', scope: column.first ? 'row' : null, 'data-label': column.label,
        class: [column.number && 'number', column.wide && 'wide', content === '' && 'empty'].filter(Boolean).join(' ') || null }, content));
    }
    return tr;
  }

  function setRows(fresh) {
    rows = fresh;
    page = 0;
    arrange();
    draw();
  }
  function turnTo(row) {
    page = Math.max(0, Math.floor(rows.indexOf(row) / perPage));
    draw();
  }
  // Turns to the page of a row, marks it and moves the focus there. False: the row is not in the table.
  function reveal(row) {
    if (!rows.includes(row)) return false;
    turnTo(row);
    const tr = body.children[rows.indexOf(row) % perPage];
    tr.classList.add('found');
    tr.tabIndex = -1;
    tr.scrollIntoView({ block: 'center' });
    tr.focus({ preventScroll: true });
    return true;
  }

  setRows(spec.rows);
  return { setRows, redraw: draw, turnTo, reveal };
}

// A table in an element of its own.
function tableOf(spec) {
  const host = el('div');
  makeTable(host, spec);
  return host;
}

// A column of numbers, the largest first: what a row's number is, and how it is written.
const figure = (label, value, write) => ({ label, number: true, downFirst: true, sort: value, cell: (row) => write(value(row)) });

// What is wider than its place is scrolled sideways, and says so for as long as there is more to see.
function scroller(caption, content) {
  const box = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption }, content);
  const hint = el('p', { class: 'scroll-hint muted small', hidden: true }, 'More columns to the right: scroll sideways \u2192');
  const look = () => {
    const left = box.scrollWidth - box.clientWidth - box.scrollLeft;
    hint.hidden = left < 4;
    box.classList.toggle('more', left >= 4);
  };
  box.addEventListener('scroll', look, { passive: true });
  const observer = new ResizeObserver(look);
  observer.observe(box);
  observer.observe(content);
  return el('div', { class: 'scroll-frame' }, box, hint);
}

// A label over an input, a choice or a tick.
function field(label, input, extra) {
  const id = 'f' + (field.next = (field.next || 0) + 1);
  input.id = id;
  return el('span', { class: 'field' + (extra ? ' ' + extra : '') }, el('label', { for: id }, label), input);
}
function choice(options, onchange) {
  return el('select', { onchange: (event) => onchange(event.target.value) },
    options.map(([value, text]) => el('option', { value }, text)));
}
function searchBox(placeholder, onsearch) {
  let timer = 0;
  return el('input', { type: 'search', placeholder, autocomplete: 'off', spellcheck: 'false', oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(onsearch, 80);
  } });
}
