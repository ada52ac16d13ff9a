// The page of runs. Names come from whoever trained: they are only ever put in place as text.
"use strict";

const COLORS = ["#4269d0", "#f28e2b", "#3ca951", "#e15759", "#a463f2", "#17a2b8", "#d264a5", "#9c6b4e", "#b6992d", "#79706e"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const EVERY = 2000; // milliseconds between looks at a live project
const MARGIN = { left: 56, right: 10, top: 8, bottom: 22 };
const byId = (id) => document.getElementById(id);

// --- where the data comes from: this page's server, or the page itself ------------------------------------------

function liveSource() {
  const ask = async (path) => {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };
  return {
    live: true,
    overview: () => ask("overview.json"),
    curves(kind, name, axis, runs, zoom, most) {
      const query = new URLSearchParams({ kind, name, axis, runs: runs.join(","), most: String(most) });
      if (zoom) { query.set("low", zoom[0]); query.set("high", zoom[1]); }
      return ask("curves.json?" + query);
    },
  };
}

function ownSource(data) {
  return {
    live: false,
    overview: async () => data.overview,
    async curves(kind, name, axis, runs, zoom) {
      const found = data.curves.find((each) => each.kind === kind && each.name === name && each.axis === axis);
      return (found ? found.curves : []).filter((curve) => runs.includes(curve.run)).map((curve) => cut(curve, zoom));
    },
  };
}

function cut(curve, zoom) {
  if (!zoom) return curve;
  const inside = curve.x.map((x, i) => i).filter((i) => curve.x[i] >= zoom[0] && curve.x[i] <= zoom[1]);
  const only = (list) => inside.map((i) => list[i]);
  return { ...curve, x: only(curve.x), y: only(curve.y), least: only(curve.least), most: only(curve.most), count: only(curve.count),
    bad: curve.bad.filter((x) => x >= zoom[0] && x <= zoom[1]) };
}

const own = byId("data");
const source = own ? ownSource(JSON.parse(own.textContent)) : liveSource();

// --- what the person has chosen ---------------------------------------------------------------------------------

const state = { overview: null, shown: null, seen: new Set(), zoom: {}, charts: new Map(), drawn: "", listed: null, rows: new Map() };
const chosen = () => state.overview.runs.filter((run) => state.shown.has(run.number));
const axis = () => byId("axis").value;
const colorOf = (number) => COLORS[(number - 1) % COLORS.length];

// --- small things -----------------------------------------------------------------------------------------------

function make(tag, properties, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, properties);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function swatch(number) {
  const node = make("span", { className: "swatch" });
  node.style.background = colorOf(number);
  return node;
}

function span(seconds) {
  if (seconds < 60) return `${seconds === 0 ? 0 : seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const [large, small, names] = seconds < 3600 ? [60, 1, "ms"] : seconds < 86400 ? [3600, 60, "hm"] : [86400, 3600, "dh"];
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${names[0]}${rest ? ` ${rest} ${names[1]}` : ""}`;
}

function short(value) {
  if (value === null || value === undefined) return "nan";
  if (typeof value === "string") return value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

// --- the list of runs -------------------------------------------------------------------------------------------

function listRuns() {
  const wanted = byId("filter").value.toLowerCase();
  const runs = [...state.overview.runs].reverse().filter((run) => `${run.number} ${run.name}`.toLowerCase().includes(wanted));
  // Rows that are made anew lose the focus of the keyboard.
  const list = JSON.stringify(runs.map((run) => [run.number, run.name, run.state, run.reason, run.resumed]));
  if (list !== state.listed) {
    state.listed = list;
    state.rows = new Map(runs.map((run) => [run.number, rowOf(run)]));
    const items = [...state.rows.values()].map((row) => row.item);
    byId("runs").replaceChildren(...(items.length ? items : [make("li", { className: "nothing" }, "No runs.")]));
  }
  for (const run of runs) {
    const { box, about } = state.rows.get(run.number);
    const from = run.resumed === null ? "" : ` · from run ${run.resumed}`;
    box.checked = state.shown.has(run.number);
    about.textContent = `${span(run.seconds)} · ${clock(run.created)}${from}`;
  }
}

function rowOf(run) {
  const box = make("input", { type: "checkbox" });
  box.addEventListener("change", () => {
    if (box.checked) state.shown.add(run.number); else state.shown.delete(run.number);
    show();
  });
  const name = make("span", { className: "name", title: run.name }, `${run.number} · ${run.name}`);
  const pill = make("span", { className: `pill ${run.state}` }, run.state);
  const about = make("span", { className: "about" });
  const wrong = run.reason === null ? null : make("span", { className: "about wrong" }, run.reason);
  return { item: make("li", {}, make("label", {}, box, swatch(run.number), name, pill, about, wrong)), box, about };
}

// --- charts -----------------------------------------------------------------------------------------------------

class Chart {
  constructor(place, kind, name, title, unit) {
    this.kind = kind;
    this.name = name;
    this.unit = unit;
    this.curves = [];
    this.hover = null;
    this.drag = null;
    this.visible = this.loaded = false;
    this.stale = true;
    this.canvas = make("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    this.canvas.dataset.kind = kind;
    this.canvas.dataset.name = name;
    this.figure = make("figure", {}, make("figcaption", { title }, title, unit ? make("small", {}, unit) : null), this.canvas);
    place.append(this.figure);
    watchSize.observe(this.canvas);
    watchView.observe(this.canvas);
    charts.set(this.canvas, this);
    this.listen();
  }

  // The machine is sampled by the clock, whatever the training does.
  axis() { return this.kind === "system" ? "time" : axis(); }

  zoom() { return state.zoom[this.axis()] || null; }

  onAxis(x) { return this.axis() === "time" ? span(Math.max(x, 0)) : short(x); }

  remove() {
    watchSize.unobserve(this.canvas);
    watchView.unobserve(this.canvas);
    charts.delete(this.canvas);
    this.figure.remove();
  }

  async load() {
    this.stale = true;
    if (!this.visible) return;
    this.stale = false;
    const asked = (this.asked = {});
    const runs = chosen().map((run) => run.number);
    const most = Math.max(150, Math.round(this.canvas.clientWidth * 0.7));
    try {
      const curves = runs.length ? await source.curves(this.kind, this.name, this.axis(), runs, this.zoom(), most) : [];
      if (this.asked !== asked) return; // another question was asked meanwhile
      this.curves = curves;
      this.loaded = true;
      this.draw();
    } catch (error) {
      this.stale = true;
      lost(error);
    }
  }

  // The smoothed values: what was drawn before counts for `weight`, and less so at the beginning. A curve of few points
  // would become one of its past: there less counts.
  static smooth(values, asked) {
    const weight = 1 - 1 / Math.min(1 / (1 - asked), Math.max(values.length / 8, 1));
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * weight + value * (1 - weight);
      total = total * weight + (1 - weight);
      return sum / total;
    });
  }

  range() {
    const log = byId("log").checked;
    const xs = this.curves.flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1], ...curve.bad]).filter((x) => x !== undefined && x !== null);
    let low = Infinity, high = -Infinity;
    for (const curve of this.curves) {
      for (let i = 0; i < curve.x.length; i++) {
        const least = curve.least[i], most = curve.most[i];
        if (least !== null && (!log || least > 0) && least < low) low = least;
        if (most !== null && (!log || most > 0) && most > high) high = most;
      }
    }
    if (low > high) { low = log ? 0.1 : 0; high = 1; }
    if (low === high) { const space = Math.abs(low) * 0.1 || 1; low = log ? low / 2 : low - space; high = log ? high * 2 : high + space; }
    if (log) { low = Math.log10(low); high = Math.log10(high); }
    const pad = (high - low) * 0.05;
    let [left, right] = this.zoom() || [Math.min(...xs), Math.max(...xs)];
    if (!xs.length && !this.zoom()) { left = 0; right = 1; }
    if (left === right) right = left + 1;
    return { log, low: low - pad, high: high + pad, left, right };
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !this.loaded) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const theme = getComputedStyle(document.documentElement);
    const color = (name) => theme.getPropertyValue(name).trim();
    const range = this.range();
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const toX = (x) => MARGIN.left + ((x - range.left) / (range.right - range.left)) * inner.width;
    const toY = (y) => MARGIN.top + (1 - ((range.log ? Math.log10(y) : y) - range.low) / (range.high - range.low)) * inner.height;
    this.place = { range, inner, toX, toY };

    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    pen.strokeStyle = color("--grid");
    pen.fillStyle = color("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of ticks(range.low, range.high, 5)) {
      const y = MARGIN.top + (1 - (tick - range.low) / (range.high - range.low)) * inner.height;
      line(pen, MARGIN.left, y, width - MARGIN.right, y);
      pen.fillText(short(range.log ? 10 ** tick : tick), MARGIN.left - 7, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const tick of ticks(range.left, range.right, Math.max(2, Math.floor(inner.width / 70)), this.axis() === "time")) {
      pen.fillText(this.onAxis(tick), toX(tick), height - MARGIN.bottom + 6);
    }

    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, 0, inner.width, height - MARGIN.bottom + 1);
    pen.clip();
    const weight = Number(byId("smoothing").value);
    const several = new Set(this.curves.map((curve) => curve.run)).size > 1;
    this.lines = this.curves.map((curve) => {
      const values = weight ? Chart.smooth(curve.y, weight) : curve.y;
      const own = several || this.kind === "metric" ? colorOf(curve.run) : COLORS[curve.rank % COLORS.length];
      const dash = several && this.kind !== "metric" ? DASHES[curve.rank % DASHES.length] : [];
      return { curve, values, color: own, dash };
    });
    for (const { curve, values, color: own, dash } of this.lines) {
      pen.strokeStyle = pen.fillStyle = own;
      if (curve.count.some((count) => count > 1)) {
        pen.globalAlpha = 0.16;
        band(pen, curve, toX, toY, range.log);
      }
      if (weight) {
        pen.globalAlpha = 0.28;
        pen.lineWidth = 1;
        path(pen, curve.x, curve.y, toX, toY, range.log);
      }
      pen.globalAlpha = 1;
      pen.lineWidth = 1.7;
      pen.setLineDash(dash);
      path(pen, curve.x, values, toX, toY, range.log);
      pen.setLineDash([]);
      pen.fillStyle = color("--died");
      for (const x of curve.bad) cross(pen, toX(x), height - MARGIN.bottom - 5);
    }
    if (this.drag) {
      pen.globalAlpha = 0.15;
      pen.fillStyle = color("--accent");
      pen.fillRect(Math.min(this.drag.from, this.drag.to), MARGIN.top, Math.abs(this.drag.to - this.drag.from), inner.height);
    } else if (this.hover !== null) {
      pen.globalAlpha = 0.6;
      pen.strokeStyle = color("--soft");
      pen.lineWidth = 1;
      line(pen, this.hover, MARGIN.top, this.hover, height - MARGIN.bottom);
    }
    pen.restore();
    this.describe(range);
  }

  // What is drawn, in words and numbers: a canvas says nothing by itself.
  describe(range) {
    const points = this.curves.reduce((sum, curve) => sum + curve.x.length, 0);
    const stands = this.curves.reduce((sum, curve) => sum + curve.count.reduce((a, b) => a + b, 0), 0);
    const last = this.lines.length ? this.lines[0].values[this.lines[0].values.length - 1] : null;
    Object.assign(this.canvas.dataset, { curves: this.curves.length, points, stands, left: range.left, right: range.right,
      bad: this.curves.reduce((sum, curve) => sum + curve.bad.length, 0), last: last === undefined ? "" : String(last) });
    this.canvas.setAttribute("aria-label", `${this.name || this.kind}: ${this.curves.length} curves of ${stands} points`);
  }

  listen() {
    const x = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.place) return;
      this.drag = { from: x(event), to: x(event) };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.place) return;
      if (this.drag) this.drag.to = x(event); else this.hover = x(event);
      this.tell(event);
      this.draw();
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (!drag) return;
      if (Math.abs(drag.to - drag.from) < 6) { this.draw(); return; }
      const { range, inner } = this.place;
      const back = (pixel) => range.left + ((Math.min(Math.max(pixel, MARGIN.left), MARGIN.left + inner.width) - MARGIN.left) / inner.width) * (range.right - range.left);
      zoomTo({ [this.axis()]: [back(Math.min(drag.from, drag.to)), back(Math.max(drag.from, drag.to))] });
    });
    this.canvas.addEventListener("pointercancel", () => { this.drag = null; });
    this.canvas.addEventListener("pointerleave", () => { this.hover = null; byId("tip").hidden = true; this.draw(); });
    this.canvas.addEventListener("dblclick", () => zoomTo({}));
  }

  tell(event) {
    const tip = byId("tip");
    const { range, inner } = this.place;
    const at = range.left + ((event.clientX - this.canvas.getBoundingClientRect().left - MARGIN.left) / inner.width) * (range.right - range.left);
    const rows = [];
    for (const { curve, values, color } of this.lines) {
      const i = nearest(curve.x, at);
      if (i < 0) continue;
      const mark = make("span", { className: "swatch" });
      mark.style.background = color;
      const rank = this.kind === "metric" ? "" : ` · rank ${curve.rank}`;
      const name = state.overview.runs.find((run) => run.number === curve.run).name;
      rows.push([values[i], make("div", {}, mark, make("span", { className: "name" }, `${curve.run} · ${name}${rank}`), make("b", {}, short(values[i]))), curve.x[i]]);
    }
    if (!rows.length) { tip.hidden = true; return; }
    rows.sort((a, b) => b[0] - a[0]);
    const label = this.axis() === "time" ? "" : "step ";
    tip.replaceChildren(make("div", {}, label + this.onAxis(this.axis() === "time" ? rows[0][2] : Math.round(rows[0][2]))), ...rows.slice(0, 12).map((row) => row[1]));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 16, window.innerWidth - box.width - 6))}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - box.height - 6)}px`;
  }
}

function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

function path(pen, xs, ys, toX, toY, log) {
  pen.beginPath();
  let begun = false, alone = null;
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || (log && ys[i] <= 0)) { begun = false; continue; }
    if (begun) pen.lineTo(toX(xs[i]), toY(ys[i])); else pen.moveTo(toX(xs[i]), toY(ys[i]));
    alone = alone === null && !begun ? i : -1;
    begun = true;
  }
  pen.stroke();
  if (alone !== null && alone >= 0) { // one point makes no line
    pen.beginPath();
    pen.arc(toX(xs[alone]), toY(ys[alone]), 3, 0, 7);
    pen.fill();
  }
}

function band(pen, curve, toX, toY, log) {
  const good = curve.x.map((x, i) => i).filter((i) => curve.least[i] !== null && (!log || curve.least[i] > 0));
  if (!good.length) return;
  pen.beginPath();
  for (const i of good) pen.lineTo(toX(curve.x[i]), toY(curve.most[i]));
  for (const i of good.reverse()) pen.lineTo(toX(curve.x[i]), toY(curve.least[i]));
  pen.fill();
}

function cross(pen, x, y) {
  pen.fillRect(x - 4, y - 1, 8, 2);
  pen.fillRect(x - 1, y - 4, 2, 8);
}

const OF_TIME = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

function ticks(low, high, about, ofTime) {
  const rough = (high - low) / about;
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const size = 10 ** Math.floor(Math.log10(rough));
  const round = [1, 2, 2.5, 5, 10].map((factor) => factor * size);
  const step = (ofTime && rough > 0.5 && OF_TIME.find((each) => each >= rough)) || round.find((each) => each >= rough) || rough;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9 && found.length < 50; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}

function nearest(xs, at) {
  if (!xs.length) return -1;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - at) <= Math.abs(xs[high] - at) ? low : high;
}

const charts = new Map();
const watchSize = new ResizeObserver((entries) => entries.forEach((entry) => charts.get(entry.target)?.draw()));
const watchView = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const chart = charts.get(entry.target);
  if (!chart) return;
  chart.visible = entry.isIntersecting;
  if (chart.visible && chart.stale) chart.load();
}), { rootMargin: "200px" });

function arrange(section, kind, names, title, unit) {
  const place = byId(section).querySelector(".charts");
  const wanted = new Set(names.map((name) => `${kind}\n${name}`));
  for (const [key, chart] of state.charts) {
    if (key.startsWith(`${kind}\n`) && !wanted.has(key)) { chart.remove(); state.charts.delete(key); }
  }
  for (const name of names) {
    const key = `${kind}\n${name}`;
    if (!state.charts.has(key)) state.charts.set(key, new Chart(place, kind, name, title(name), unit));
  }
  byId(section).hidden = names.length === 0;
}

// zoom: the range of each axis of which not all is shown.
function zoomTo(zoom) {
  state.zoom = zoom;
  byId("reset").disabled = Object.keys(zoom).length === 0;
  loadCharts();
}

const loadCharts = () => state.charts.forEach((chart) => chart.load());
const drawCharts = () => state.charts.forEach((chart) => chart.draw());

// --- tables -----------------------------------------------------------------------------------------------------

function fill(table, head, rows) {
  const header = make("tr", {}, ...head.map((cell) => make("th", {}, ...[cell].flat())));
  table.replaceChildren(make("thead", {}, header), make("tbody", {}, ...rows));
}

const cell = (text, className) => make("td", { className: className || "" }, ...[text].flat());
const named = (run) => [swatch(run.number), ` ${run.number} · ${run.name}`];
const namesOf = (kind) => [...new Set(chosen().flatMap((run) => run.series.filter((each) => each.kind === kind).map((each) => each.name)))];

function showResults() {
  const names = namesOf("metric");
  const rows = chosen().map((run) => make("tr", {}, cell(named(run)), cell(make("span", { className: run.state }, run.state), "number"), cell(span(run.seconds), "number"),
    ...names.map((name) => {
      const found = run.series.find((each) => each.kind === "metric" && each.name === name);
      if (!found) return cell("");
      const best = found.best ? make("small", {}, `best ${short(found.best[0])} at ${short(found.best[1])}`) : null;
      return cell([short(found.last), ...(best ? [best] : [])], "number");
    })));
  fill(byId("summary").querySelector("table"), ["run", "state", "duration", ...names], rows);
}

function showConfigs() {
  const runs = chosen();
  const rows = settings(runs.map((run) => run.config));
  const given = runs.some((run) => Object.keys(run.config).length);
  if (!rows.length) rows.push(make("tr", {}, cell(given ? "All settings are the same." : "No config was given to init_trackers.", "nothing")));
  fill(byId("configs").querySelector("table"), ["setting", ...runs.map((run) => named(run))], [...rows, ...settings(runs.map((run) => run.facts))]);
}

// A row for each name that any of them has.
function settings(each) {
  const of = (values, name) => (Object.hasOwn(values, name) ? String(values[name]) : "–");
  const names = [...new Set(each.flatMap((values) => Object.keys(values)))];
  const differs = (name) => new Set(each.map((values) => of(values, name))).size > 1;
  const only = byId("different").checked && each.length > 1;
  return names.filter((name) => !only || differs(name)).map((name) =>
    make("tr", { className: differs(name) ? "different" : "" }, make("th", {}, name), ...each.map((values) => cell(of(values, name)))));
}

// --- timeline ---------------------------------------------------------------------------------------------------

const MARKS = { saved: "◆", loaded: "◇", warning: "▲" };

function drawn(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function showTimeline() {
  const runs = chosen();
  const place = byId("lanes");
  const width = Math.max(place.clientWidth, 200), lane = 44, longest = Math.max(1, ...runs.map((run) => run.seconds));
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${runs.length * lane + 22}`, height: runs.length * lane + 22, role: "img" });
  const toX = (seconds) => 4 + (seconds / longest) * (width - 12);
  runs.forEach((run, index) => {
    const y = index * lane + 30;
    svg.append(drawn("text", { x: 4, y: y - 12 }, `${run.number} · ${run.name}`));
    for (const attempt of new Set(run.processes.map((process) => process.attempt))) {
      const those = run.processes.filter((process) => process.attempt === attempt);
      const from = Math.min(...those.map((process) => process.started)) - run.created;
      const going = run.state === "running" && those.some((process) => process.state === "running");
      const to = going ? run.seconds : Math.max(...those.map((process) => process.seen)) - run.created;
      const bar = drawn("rect", { x: toX(from), y: y - 6, width: Math.max(toX(to) - toX(from), 2), height: 12, rx: 3, fill: colorOf(run.number), opacity: 0.35 });
      bar.append(drawn("title", {}, `attempt ${attempt + 1}: ${span(to - from)}`));
      svg.append(bar);
      if (attempt > 0) {
        const why = run.processes.find((process) => process.attempt === attempt - 1 && process.reason !== null);
        mark(svg, toX(from), y, "↻", `restart ${attempt} after ${span(from)}${why ? `, rank ${why.rank}: ${why.reason}` : ""}`, "restart");
      }
    }
    for (const event of run.events) {
      if (!Object.hasOwn(MARKS, event.kind)) continue;
      mark(svg, toX(event.time - run.created), y, MARKS[event.kind], `${event.kind} after ${span(event.time - run.created)}, rank ${event.rank}: ${event.text}`, event.kind);
    }
    if (run.state === "died") mark(svg, toX(run.until - run.created), y, "✕", `died: ${run.reason}`, "died");
  });
  for (const tick of ticks(0, longest, Math.max(2, Math.floor(width / 110)), true)) {
    svg.append(drawn("text", { x: Math.min(toX(tick), width - 40), y: runs.length * lane + 18 }, span(tick)));
  }
  place.replaceChildren(svg);
  byId("timeline").hidden = runs.length === 0;

  const rows = runs.flatMap((run) => run.events.map((event) => [run, event])).sort((a, b) => b[1].time - a[1].time).slice(0, 300).map(([run, event]) =>
    make("tr", {}, cell(clock(event.time)), cell(named(run)), cell(String(event.rank), "number"), cell(event.kind), cell(event.text)));
  fill(byId("timeline").querySelector("table"), ["time", "run", "rank", "what", ""], rows);
}

function mark(svg, x, y, sign, title, kind) {
  const node = drawn("text", { x, y: y + 4, "text-anchor": "middle", class: `mark ${kind}` }, sign);
  node.append(drawn("title", {}, title));
  svg.append(node);
}

// --- all of it --------------------------------------------------------------------------------------------------

function show() {
  const wanted = byId("names").value.toLowerCase();
  const found = (name) => name.toLowerCase().includes(wanted);
  listRuns();
  arrange("metrics", "metric", namesOf("metric").filter(found), (name) => name, "");
  arrange("steps", "steps", chosen().length ? [""] : [], () => "time of a step", "ms, median");
  arrange("system", "system", namesOf("system"), (name) => name, "");
  showResults();
  showConfigs();
  showTimeline();
  loadCharts();
}

function lost(error) {
  byId("live").className = "off";
  byId("live").textContent = "no connection";
  byId("live").title = String(error);
}

async function look() {
  let overview;
  try {
    overview = await source.overview();
  } catch (error) {
    lost(error);
    return;
  }
  const going = overview.runs.filter((run) => run.state === "running").length;
  byId("live").className = source.live ? "on" : "";
  byId("live").textContent = source.live ? (going ? `live · ${going} running` : "live") : `as of ${clock(overview.time)}`;
  state.overview = overview;
  byId("project").textContent = overview.project;
  byId("project").title = overview.project;
  // The latest runs are shown at first, and each new one when it comes.
  if (state.shown === null) state.shown = new Set(overview.runs.slice(-6).map((run) => run.number));
  else for (const run of overview.runs) if (!state.seen.has(run.number)) state.shown.add(run.number);
  for (const run of overview.runs) state.seen.add(run.number);
  const now = JSON.stringify(overview.runs.map((run) => [run.number, run.until, run.state, run.events.length, run.series.length]));
  if (now !== state.drawn) {
    state.drawn = now;
    show();
  } else {
    listRuns();
  }
}

for (const id of ["smoothing", "log"]) byId(id).addEventListener("input", () => { byId("smoothed").textContent = byId("smoothing").value; drawCharts(); });
byId("axis").addEventListener("change", () => zoomTo({}));
byId("reset").addEventListener("click", () => zoomTo({}));
byId("filter").addEventListener("input", listRuns);
byId("names").addEventListener("input", show);
byId("different").addEventListener("change", showConfigs);
byId("all").addEventListener("click", () => { state.shown = new Set(state.overview.runs.map((run) => run.number)); show(); });
byId("none").addEventListener("click", () => { state.shown = new Set(); show(); });
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  drawCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
window.addEventListener("resize", () => { if (state.overview) showTimeline(); });
for (const [name, sign] of Object.entries(MARKS)) byId("timeline").querySelector(".legend").append(make("span", {}, `${sign} ${name}`));
byId("timeline").querySelector(".legend").append(make("span", {}, "↻ restart"), make("span", {}, "✕ died"));

async function keepLooking() {
  try {
    if (!document.hidden || state.overview === null) await look();
  } finally {
    if (source.live) setTimeout(keepLooking, EVERY); // after the answer: a slow one is not asked for twice
  }
}

keepLooking();
