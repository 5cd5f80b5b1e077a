// The data, and what all parts of the page use: elements, numbers with units, names.

const data = JSON.parse(document.getElementById('data').textContent);
const sessions = data.sessions;
const everybody = sessions.concat(data.others);  // also those that were only heard of

const byId = (id) => document.getElementById(id);

// Gives `node` attributes and children; text is always text, never markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of [children].flat(2)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);

// ---- numbers with units ------------------------------------------------------------------------------------------------------

const THIN = '\u202f';  // a narrow space that does not break
const grouped = (number) => String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, THIN);
const plural = (count, one, many) => `${grouped(count)}${THIN}${count === 1 ? one : many || one + 's'}`;

function decimals(value) {
  if (value >= 100 || Number.isInteger(value)) return grouped(value);
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, '');
}
function bytes(value) {
  if (value < 0) return '\u2212' + bytes(-value);
  const mib = 2 ** 20;
  if (value >= 10000 * mib) return decimals(value / 2 ** 30) + THIN + 'GiB';
  if (value >= mib) return decimals(value / mib) + THIN + 'MiB';
  if (value >= 1024) return decimals(value / 1024) + THIN + 'KiB';
  return grouped(value) + THIN + 'B';
}
const axisBytes = (value) => (value >= 2 ** 30 && value % 2 ** 29 === 0 ? decimals(value / 2 ** 30) + THIN + 'GiB' : bytes(value));
function duration(ns) {
  if (ns < 0) return '\u2212' + duration(-ns);
  if (ns < 1e3) return grouped(ns) + THIN + 'ns';
  if (ns < 1e6) return decimals(ns / 1e3) + THIN + '\u00b5s';
  if (ns < 1e9) return decimals(ns / 1e6) + THIN + 'ms';
  if (ns < 60e9) return decimals(ns / 1e9) + THIN + 's';
  const seconds = Math.round(ns / 1e9), minutes = Math.floor(seconds / 60);
  const two = (n) => String(n).padStart(2, '0');
  if (minutes < 60) return `${minutes}${THIN}min${THIN}${two(seconds % 60)}${THIN}s`;
  return `${Math.floor(minutes / 60)}${THIN}h${THIN}${two(minutes % 60)}${THIN}min`;
}
// A moment: seconds since the job's first event, to the microsecond.
function moment(ns) {
  const negative = ns < 0, micro = Math.round(Math.abs(ns) / 1e3);
  return (negative ? '\u2212' : '+') + grouped(Math.floor(micro / 1e6)) + '.' + String(micro % 1e6).padStart(6, '0') + THIN + 's';
}
// Milliseconds since 1970 as a date, in the time zone of whoever reads.
function localTime(ms) {
  const ahead = -new Date(ms).getTimezoneOffset(), two = (n) => String(n).padStart(2, '0'), far = Math.abs(ahead);
  const zone = ahead === 0 ? 'UTC' : (ahead < 0 ? '-' : '+') + two(Math.floor(far / 60)) + two(far % 60);
  return new Date(ms + ahead * 60e3).toISOString().replace('T', ' ').slice(0, 19) + ' ' + zone;
}
// The same, no longer than what is looked at needs.
function tick(ns, step) {
  if (ns === 0) return '0';
  if (step >= 60e9) return ns % 60e9 === 0 && ns < 3600e9 ? ns / 60e9 + THIN + 'min' : duration(ns);
  const unit = step >= 1e9 ? ['s', 1e9] : step >= 1e6 ? (ns >= 1e9 || ns <= -1e9 ? ['s', 1e9] : ['ms', 1e6]) :
    ns >= 1e9 ? ['s', 1e9] : ns >= 1e6 ? ['ms', 1e6] : ['\u00b5s', 1e3];
  const digits = Math.max(0, Math.ceil(Math.log10(unit[1] / step) - 1e-9));
  return (ns / unit[1]).toFixed(Math.min(digits, 9)) + THIN + unit[0];
}

// Round steps that cut `span` into at most `most` parts.
function roundStep(span, most, bases = [1, 2, 5, 10]) {
  const raw = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  return bases.find((base) => base * power >= raw) * power;
}
function roundBytes(span, most) {  // powers of two: 1, 2, 4 of their unit
  let step = 1;
  while (span / step > most) step *= 2;
  return step;
}

// ---- words -------------------------------------------------------------------------------------------------------------------

const CLASSES = [
  { name: 'own', label: 'Own', hint: 'own device memory that a pause gives back' },
  { name: 'kept', label: 'Own, stays', hint: 'own device memory that a pause leaves in place: registered, multicast, or the program\u2019s own' },
  { name: 'imported', label: 'Imported', hint: 'memory of peers, mapped here; it occupies the peer\u2019s device' },
  { name: 'host', label: 'Pinned host', hint: 'pinned host memory' },
  { name: 'pool', label: 'Pools', hint: 'memory of the driver\u2019s asynchronous pools' },
  { name: 'driver', label: 'cuMemAlloc', hint: 'cuMemAlloc memory that is the driver\u2019s own' },
  { name: 'tagged', label: 'Tags', hint: 'the program\u2019s tensors under tags, such as weights and optimizer' },
];
const ON_DEVICE = [0, 1, 4, 5, 6];  // classes that occupy the rank's own device
const STACK = [0, 1, 6, 5, 4, 3, 2];  // away from the line between the device and elsewhere

const nameOf = (index) => (index >= 0 && everybody[index] ? everybody[index].name : 'unknown');
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const cycleWord = (kind) => (kind === 0 ? 'Pause' : 'Resume');
const ofTag = (cycle) => (cycle.tag ? ' of ' + cycle.tag : '');  // a pause of a tag concerns no other rank

function running(deltas) {
  const out = new Float64Array(deltas.length);
  let sum = 0;
  for (let i = 0; i < deltas.length; ++i) out[i] = sum += deltas[i];
  return out;
}
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length === 0 ? 0 : sorted[Math.floor(sorted.length / 2)];
};
const sum = (values) => values.reduce((a, b) => a + b, 0);

// Brings a section into view and moves the focus there, for those who follow with a keyboard.
function show(node) {
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  node.scrollIntoView({ block: 'start', behavior: calm ? 'auto' : 'smooth' });
  node.focus({ preventScroll: true });
}
