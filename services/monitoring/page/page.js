// The page of one state server: asks /status.json each second, and draws its answer. Everything from the server goes into the document
// as text, never as HTML.
'use strict';

const PERIOD_MS = 1000;
const SILENCE_MS = 1700;  // without an answer the server counts as gone: a killed server shows within two seconds
const ASK_MS = 10000;     // a request is given up
const STEPS_SHOWN = 60;
const SVG = 'http://www.w3.org/2000/svg';

// Names, in the order in which they are stacked, with their words.
const PARTS = {
  state: 'state', working: 'working copies', slices: 'slices in flight', buffers: 'buffers', staging: 'staging', log: 'log',
  pins: 'kept versions', spare: 'spare', other: 'other',
};
const STAGES = {
  push: 'slices coming in', seal_wait: 'waiting for the last rank', log_sync: 'log to disk', state_read: 'state from disk',
  kernel: 'computing', state_write: 'state to disk', flush: 'flushing', pin: 'pinning', move: 'moving chunks',
  idle: 'waiting for trainers',
};

const TRAINERS = {compute: 'computing', pull_wait: 'waiting for pulls', gather: 'gathering', push_wait: 'pushing'};

const $ = (id) => document.getElementById(id);
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const setAttribute = (node, name, value) => { if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value); };

function element(name, attributes = {}, ...children) {
  const node = name.startsWith('svg:') ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Makes the children of `parent` those of `items`, in order. A child stays the same node as long as its key is there.
function each(parent, items, keyOf, make, update) {
  const before = parent.nodesByKey ?? new Map();
  parent.nodesByKey = new Map();
  let at = parent.firstChild;
  items.forEach((item, index) => {
    const key = keyOf(item, index);
    const node = before.get(key) ?? make(item, index);
    before.delete(key);
    parent.nodesByKey.set(key, node);
    update(node, item, index);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  });
  for (const node of before.values()) node.remove();
}
const sentences = (list, texts) => each(list, texts, (_, i) => i, () => element('li'), setText);

// The units of `ballastctl`.
function bytes(count) {
  for (const [power, unit, digits] of [[30, 'GiB', 2], [20, 'MiB', 1], [10, 'KiB', 1]]) {
    if (count >= 2 ** power) return `${(count / 2 ** power).toFixed(digits)} ${unit}`;
  }
  return `${count} B`;
}
function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}
const percent = (part, whole) => whole > 0 ? `${(100 * part / whole).toFixed(0)} %` : '-';
const count = (n, noun) => `${n} ${noun}${Number(n) === 1 ? '' : 's'}`;

// A fill of colour and texture for each kind, so that no kind is known by its colour alone.
function makeFills() {
  const textures = ['', 'M0 8L8 0', 'M2 2h2v2h-2z', 'M0 4h8', 'M0 0l8 8', 'M4 0v8', 'M0 0l8 8M0 8l8-8', 'M5 5h1v1h-1z', 'M0 4h8M4 0v8', 'M0 2h8M0 6h8'];
  const fills = textures.map((path, i) => element('svg:pattern', {id: `fill-${i}`, width: 8, height: 8, patternUnits: 'userSpaceOnUse'},
      element('svg:rect', {width: 8, height: 8, class: `kind-${i}`}), element('svg:path', {d: path, class: 'texture'})));
  document.body.append(element('svg:svg', {class: 'unseen', 'aria-hidden': 'true'}, element('svg:defs', {}, ...fills)));
}
const fillOf = (kinds, name) => `url(#fill-${Math.max(0, Object.keys(kinds).indexOf(name))})`;

// The legend of a stack: key, name and amount of each kind. `shown`: [name, amount, text of the amount].
function drawLegend(list, kinds, shown) {
  each(list, shown, ([name]) => name, ([name]) => {
    const key = element('svg:svg', {class: 'key', 'aria-hidden': 'true'}, element('svg:rect', {width: '100%', height: '100%', fill: fillOf(kinds, name)}));
    return element('li', {}, key, kinds[name] ?? name, ' ', element('data'));
  }, (item, [, amount, text]) => {
    const data = item.lastChild;
    setAttribute(data, 'value', amount);
    setText(data, text);
  });
}

// [name, bytes] of each part of a tier.
const partsOf = (tier) => tier.parts.map(({part, bytes: size}) => [part, Number(size)]);

function drawTiers(tiers) {
  const used = tiers.filter((tier) => Number(tier.capacity_bytes) > 0 || Number(tier.used_bytes) > 0);
  each($('tiers'), used, (tier) => tier.tier, (tier) => element('div', {'data-tier': tier.tier},
      element('h3', {}, element('span'), ': ', element('data', {class: 'used'}), ' of ', element('data', {class: 'capacity'}), ' ', element('span')),
      element('svg:svg', {class: 'bar', role: 'img'}), element('ul', {class: 'legend'})), (node, tier) => {
    const [title, bar, legend] = node.children;
    const [name, taken, capacity, share] = title.children;
    setText(name, tier.tier.toUpperCase());
    for (const [data, value] of [[taken, tier.used_bytes], [capacity, tier.capacity_bytes]]) {
      setAttribute(data, 'value', value);
      setText(data, bytes(Number(value)));
    }
    setText(share, `(${percent(Number(tier.used_bytes), Number(tier.capacity_bytes))})`);
    const parts = partsOf(tier).filter(([, size]) => size > 0);
    const whole = Math.max(Number(tier.capacity_bytes), Number(tier.used_bytes));
    setAttribute(bar, 'aria-label', `${tier.tier}: ${parts.map(([part, size]) => `${PARTS[part] ?? part} ${bytes(size)}`).join(', ')}`);
    let left = 0;
    each(bar, parts, ([part]) => part, ([part]) => element('svg:rect', {height: '100%', fill: fillOf(PARTS, part)}), (rect, [, size]) => {
      setAttribute(rect, 'x', `${(100 * left / whole).toFixed(3)}%`);
      setAttribute(rect, 'width', `${(100 * size / whole).toFixed(3)}%`);
      left += size;
    });
    drawLegend(legend, PARTS, parts.map(([part, size]) => [part, size, `${bytes(size)} (${percent(size, whole)})`]));
  });
}

// [{step, seconds, stages: {stage: seconds}, trainers: {what: seconds of the rank with the most}}] of an answer to /steps.json.
const stepsOf = (answer) => (answer.jobs[0]?.steps ?? []).map((step) => ({
  step: Number(step.step), seconds: step.decided_seconds - step.began_seconds,
  stages: Object.fromEntries(step.stages.map(({stage, seconds}) => [stage, seconds])),
  trainers: Object.fromEntries(step.trainers.map(({what, max_seconds: seconds}) => [what, seconds])),
}));

// The slowest rank's own seconds, a mean over the steps.
function trainersOf(steps) {
  const means = Object.entries(TRAINERS).map(([what, words]) => [words, steps.reduce((sum, step) => sum + (step.trainers[what] ?? 0), 0) / steps.length]);
  const told = means.filter(([, seconds]) => seconds >= 0.0005).map(([words, seconds]) => `${words} ${seconds.toFixed(3)} s`);
  return told.length ? `. Trainers a step, the most of any rank: ${told.join(', ')}` : '';
}

// `steps`: oldest first; none before the first answer for a job. `bound`: what binds them, as the server says.
function drawSteps(steps, bound) {
  const box = $('steps');
  if (!box.firstChild) box.append(element('svg:svg', {class: 'columns', role: 'img', preserveAspectRatio: 'none'}), element('p', {class: 'quiet'}), element('ul', {class: 'legend'}));
  const [chart, note, legend] = box.children;
  const shown = steps.slice(-STEPS_SHOWN);
  const longest = Math.max(0, ...shown.map((step) => step.seconds));
  const sums = Object.keys(STAGES).map((stage) => [stage, shown.reduce((sum, step) => sum + (step.stages[stage] ?? 0), 0)]);
  const total = sums.reduce((sum, [, seconds]) => sum + seconds, 0);
  setText($('bound'), bound && shown.length ? `bound by ${bound.words}: ${percent(bound.share, 1)}` : 'no step has been decided since the server started');
  setText(note, shown.length ? `${count(shown.length, 'step')}, ${shown[0].step} to ${shown.at(-1).step}; the longest took ${longest.toFixed(3)} s, the last ${shown.at(-1).seconds.toFixed(3)} s${trainersOf(shown)}` : '');
  setAttribute(chart, 'aria-label', $('bound').textContent);
  each(chart, shown, (step) => step.step, () => element('svg:g'), (column, step, index) => {
    let below = 0;
    each(column, Object.keys(STAGES).filter((stage) => step.stages[stage] > 0), (stage) => stage,
        (stage) => element('svg:rect', {fill: fillOf(STAGES, stage), width: `${(80 / STEPS_SHOWN).toFixed(3)}%`}), (rect, stage) => {
      const part = longest > 0 ? 100 * step.stages[stage] / longest : 0;
      below += part;
      setAttribute(rect, 'x', `${(100 * index / STEPS_SHOWN).toFixed(3)}%`);
      setAttribute(rect, 'y', `${(100 - below).toFixed(3)}%`);
      setAttribute(rect, 'height', `${part.toFixed(3)}%`);
    });
  });
  drawLegend(legend, STAGES, sums.filter(([, seconds]) => seconds > 0).map(([stage, seconds]) => [stage, seconds, percent(seconds, total)]));
}

// The last versions of each job with their times, for rate and sparkline.
const history = new Map();

function remember(jobs, now) {
  for (const name of history.keys()) if (!jobs.some((job) => job.name === name)) history.delete(name);
  for (const job of jobs) {
    const seen = history.get(job.name) ?? [];
    history.set(job.name, [...seen, {now, version: job.committed_max}].slice(-STEPS_SHOWN));
  }
}
// Steps per minute over the last 15 s; null until there are two answers.
function rateOf(seen) {
  const last = seen.at(-1);
  const from = seen.find((sample) => last.now - sample.now <= 15000);
  return last.now - from.now < 500 ? null : 60000 * Math.max(0, last.version - from.version) / (last.now - from.now);
}
function sparkOf(seen) {
  const rates = seen.slice(1).map((sample, i) => Math.max(0, sample.version - seen[i].version));
  const most = Math.max(1, ...rates);
  return rates.map((rate, i) => `${(100 * i / (STEPS_SHOWN - 2)).toFixed(1)},${(19 - 18 * rate / most).toFixed(1)}`).join(' ');
}

const versions = (job) => job.committed_min === job.committed_max ? `${job.committed_max}` : `${job.committed_min}..${job.committed_max}`;
const newest = (list) => list.length ? `${list.slice(-3).join(', ')}${list.length > 3 ? ` and ${list.length - 3} older` : ''}` : '-';
const COLUMNS = [
  ['Version', versions],
  ['Steps/min', (job) => job.rate === null ? '-' : job.rate.toFixed(1)],
  ['Rate, last minute', null],
  ['Ranks', (job) => `${job.world_size}`],
  ['Parameters', (job) => Number(job.parameters).toLocaleString('en')],
  ['Durability', (job) => job.durability],
  ['Skipped', (job) => `${job.skipped_steps}`],
  ['Moving', (job) => job.chunks_moving ? count(job.chunks_moving, 'chunk') : '-'],
  ['Fills', (job) => job.unfilled_chunks ? `${job.filled_chunks} of ${job.filled_chunks + job.unfilled_chunks} chunks` : '-'],
  ['Pins', (job) => newest(job.pinned_versions)],
  ['Kept on disk', (job) => newest(job.durable_versions)],
];

function makeJob(job) {
  const cells = COLUMNS.map(([name, show]) => {
    const cell = element('td', {'data-column': name});
    if (!show) cell.append(element('svg:svg', {class: 'spark', viewBox: '0 0 100 20', preserveAspectRatio: 'none', 'aria-hidden': 'true'}, element('svg:polyline')));
    return cell;
  });
  return element('tr', {}, element('th', {scope: 'row'}, job.name), ...cells);
}
function drawJob(row, job) {
  COLUMNS.forEach(([, show], i) => {
    const cell = row.children[i + 1];
    if (show) setText(cell, show(job));
    else setAttribute(cell.firstChild.firstChild, 'points', sparkOf(job.seen));
  });
}
function drawJobs(jobs) {
  const box = $('jobs');
  if (!box.firstChild) {
    box.append(element('p', {}, 'none'), element('table', {}, element('thead', {}, element('tr', {}, ...['Job', ...COLUMNS.map(([name]) => name)].map((name) => element('th', {scope: 'col'}, name)))), element('tbody')));
    box.classList.add('wide');
  }
  const [none, table] = box.children;
  none.hidden = jobs.length > 0;
  table.hidden = jobs.length === 0;
  each(table.lastChild, jobs.map((job) => ({...job, seen: history.get(job.name), rate: rateOf(history.get(job.name))})), (job) => job.name, makeJob, drawJob);
  each($('job'), jobs, (job) => job.name, (job) => element('option', {}, job.name), () => {});
}

function drawPeers(peers) {
  each($('peers'), peers, (peer) => `${peer.server_id} ${peer.page}`, (peer) => element('li', {},
      // The server has checked that this is host:port.
      peer.page ? element('a', {href: `${location.protocol}//${peer.page}/`}, peer.server_id) : `${peer.server_id} (its page's address is not known)`), () => {});
  if (!peers.length) setText($('peers'), 'no job here has another server');
  else if ($('peers').firstChild.nodeType === Node.TEXT_NODE) $('peers').firstChild.remove();
}

function drawVerdict(kind, sentence, problems) {
  $('verdict').className = kind;
  setText($('sentence'), `${{good: '✓', bad: '✗', gone: '…'}[kind]} ${sentence}`);
  sentences($('problems'), problems);
  document.title = `${{good: '✓', bad: '✗', gone: '…'}[kind]} ${$('server').textContent} Ballast`;
}

let answeredAt = null;  // of the newest answer, by performance.now() and by the wall
let answeredTime = '';

function draw(status, steps) {
  const own = status.servers[0];
  const server = own.status;
  setText($('server'), server.server_id || own.address);
  setText($('facts'), [own.address, `version ${server.version}`, server.io_backend, `up ${duration(server.uptime_seconds)}`].filter((fact) => fact && fact !== 'version ').join(' · '));
  const recovering = server.state === 'recovering';
  $('recovery').hidden = !recovering;
  $('recovery').max = Math.max(1, Number(server.recovery_total_bytes));
  $('recovery').value = Number(server.recovery_done_bytes);
  if (status.verdict === 'healthy') drawVerdict('good', `HEALTHY: ${count(status.jobs.length, 'job')} on this server`, []);
  else if (recovering) drawVerdict('bad', 'RECOVERING: trainers wait until the server has its jobs back', status.problems);
  else drawVerdict('bad', `DEGRADED: ${count(status.problems.length, 'problem')}`, status.problems);
  remember(status.jobs, answeredAt);
  const waits = status.jobs.flatMap((job) => job.waits.map((wait) => `${job.name}: ${wait}`));
  sentences($('waits'), waits.length ? waits : ['nobody waits']);
  const copies = status.jobs.filter((job) => job.copies).map((job) => `${job.name}: ${job.copies}`);
  $('copying').hidden = !copies.length;
  sentences($('copies'), copies);
  drawTiers(server.tiers);
  drawJobs(status.jobs);
  drawSteps(steps, status.jobs.find((job) => job.name === $('job').value)?.bound_by);
  drawPeers(status.peers);
}

// Every tenth of a second: how old the numbers are, and whether the server still answers.
function tick() {
  const silence = answeredAt === null ? null : performance.now() - answeredAt;
  const gone = document.body.classList.contains('stale');
  if (!gone && silence !== null && silence > SILENCE_MS) lost();
  setText($('age'), silence === null ? '' : `answered ${answeredTime}${gone ? `, ${duration(silence / 1000)} ago` : ''}`);
}
function lost() {
  document.body.classList.add('stale');
  drawVerdict('gone', answeredAt === null ? 'This server does not answer' : 'This server does not answer: the numbers below are old', []);
}

async function ask(path) {
  const answer = await fetch(path, {signal: AbortSignal.timeout(ASK_MS), cache: 'no-store'});
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
async function refresh() {
  const began = performance.now();
  const job = $('job').value;
  const answers = await Promise.all([ask('/status.json'), job ? ask(`/steps.json?job=${encodeURIComponent(job)}&last=${STEPS_SHOWN}`) : {jobs: []}]).catch(() => null);
  setTimeout(refresh, Math.max(0, PERIOD_MS - (performance.now() - began)));
  if (answers === null) return lost();
  answeredAt = performance.now();
  answeredTime = new Date().toLocaleTimeString();
  document.body.classList.remove('stale');
  draw(answers[0], stepsOf(answers[1]));
  $('age').dataset.drawMs = (performance.now() - answeredAt).toFixed(1);
}

makeFills();
$('job').addEventListener('change', () => drawSteps([], null));
setInterval(tick, 100);
refresh();
