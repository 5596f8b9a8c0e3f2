
"use strict";
const { runs, charts, arrays } = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set(), view = { smoothing: 0.6, over: "x", log: false, at: null };
const root = document.documentElement, plots = new Map();
const LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 20;

const number = (v) => {
  if (v === null || v === undefined) return "not finite";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 1e15 || size < 1e-4) return Number(v.toPrecision(3)).toExponential();
  return size >= 1e4 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4)));
};
const scaled = (v, units, base) => {
  let i = 0;
  while (Math.abs(v) >= base && i < units.length - 1) { v /= base; i++; }
  return number(v) + units[i];
};
const time = (s) => (s < 120 ? `${number(s)} s` : s < 7200 ? `${number(s / 60)} min` : `${number(s / 3600)} h`);
const valued = (v, unit) => {
  if (v === null || v === undefined) return "not finite";
  if (unit === "B") return scaled(v, [" B", " kB", " MB", " GB", " TB"], 1000);
  if (unit === "/s") return scaled(v, ["/s", " k/s", " M/s", " G/s", " T/s", " P/s"], 1000);
  return unit === "%" ? `${number(100 * v)} %` : number(v) + (unit && ` ${unit}`);
};
const at = (chart, x) => (view.over === "t" ? time(x) : `${chart.axis} ${Number(x.toPrecision(9)).toLocaleString("en")}`);
const colored = (line) => line.color || `var(--run${line.run % 8})`;

/* Running means: of what is not finite nothing is kept; a mean of few values is theirs alone. */
function smooth(y, decay) {
  let total = 0, weight = 0;
  return y.map((v) => {
    if (v === null) return null;
    total = decay * total + v;
    weight = decay * weight + 1;
    return total / weight;
  });
}

/* The lines that are drawn now: x, what was logged, what is drawn thick, and the band of what one point stands for. */
function shown(chart) {
  const lines = chart.lines.filter((line) => !hidden.has(line.run) && line[view.over] !== undefined).map((line) => {
    const y = arrays[line.y];
    return { line, x: arrays[line[view.over]], raw: y, y: smooth(y, line.exact ? 0 : view.smoothing),
             low: line.lo === undefined ? null : arrays[line.lo], high: line.hi === undefined ? null : arrays[line.hi] };
  });
  if (chart.stacked) {
    let below = lines.length ? lines[0].y.map(() => 0) : [];
    for (const one of lines) {
      one.value = one.y;
      one.low = below;
      one.high = one.y = below = below.map((b, i) => b + (one.value[i] ?? 0));
    }
  }
  return lines;
}

function ticks(low, high, most) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough) ?? rough;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && found.length < 20; i++) found.push(i * step);
  return found;
}

function decades(low, high) {
  const found = [];
  for (let k = Math.floor(low); k <= high + 1e-9; k++) for (const m of [1, 2, 5]) {
    const v = k + Math.log10(m);
    if (v >= low - 1e-9 && v <= high + 1e-9) found.push([v, m]);
  }
  return found.length > 7 ? found.filter(([, m]) => m === 1).map(([v]) => v) : found.map(([v]) => v);
}

function range(lists, keep) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const v of list ?? []) if (v !== null && keep(v)) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return [low, high];
}

const svg = (name, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};

function path(xs, ys, X, Y) {
  let text = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    const y = ys[i] === null || xs[i] === null ? NaN : Y(ys[i]);
    if (!Number.isFinite(y)) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${X(xs[i]).toFixed(1)} ${y.toFixed(1)}`;
    if (!pen && (i + 1 === xs.length || ys[i + 1] === null)) text += "h.01";  // a point alone is a dot
    pen = true;
  }
  return text;
}

function dots(xs, ys, X, Y) {
  const known = xs.map((x, i) => i).filter((i) => xs[i] !== null && ys[i] !== null && Number.isFinite(Y(ys[i])));
  return known.map((i) => `M${X(xs[i]).toFixed(1)} ${Y(ys[i]).toFixed(1)}h.01`).join("");
}

function area(xs, low, high, X, Y) {
  let text = "", run = [];
  const close = () => {
    if (run.length > 1) {
      const up = run.map((i) => `${X(xs[i]).toFixed(1)} ${Y(high[i]).toFixed(1)}`);
      const down = run.reverse().map((i) => `${X(xs[i]).toFixed(1)} ${Y(low[i]).toFixed(1)}`);
      text += `M${up.join("L")}L${down.join("L")}Z`;
    }
    run = [];
  };
  for (let i = 0; i < xs.length; i++) {
    const known = xs[i] !== null && low[i] !== null && high[i] !== null;
    if (known && Number.isFinite(Y(low[i])) && Number.isFinite(Y(high[i]))) run.push(i); else close();
  }
  close();
  return text;
}

function draw(figure) {
  const chart = charts[figure.dataset.chart], plot = figure.querySelector(".plot");
  const width = plot.clientWidth, height = plot.clientHeight;
  if (!width) return;  // folded away
  const lines = shown(chart), logarithmic = view.log && !chart.stacked;
  const scale = logarithmic ? Math.log10 : (v) => v, keep = logarithmic ? (v) => v > 0 : () => true;
  const [first, last] = range(lines.map((one) => one.x), () => true);
  let [low, high] = range(lines.flatMap((one) => [one.raw, one.y, one.low, one.high]), keep);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  plots.delete(figure);
  if (!Number.isFinite(first) || !Number.isFinite(low)) {
    const why = lines.length ? (logarithmic ? "nothing above 0" : "no finite value")
      : view.over === "t" ? "times were not logged" : "no run is shown";
    picture.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, why));
    plot.replaceChildren(picture);
    read(figure);
    return;
  }
  [low, high] = [scale(low), scale(high)];
  if (chart.stacked) low = 0;
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.05 || 0.5), high + (Math.abs(high) * 0.05 || 0.5)];
  else if (!chart.stacked) [low, high] = [low - 0.03 * (high - low), high + 0.03 * (high - low)];
  const X = (x) => LEFT + ((x - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const Y = (y) => height - BOTTOM - ((scale(y) - low) / (high - low)) * (height - TOP - BOTTOM);
  const grid = svg("g", {}), drawn = svg("g", { fill: "none", "stroke-linejoin": "round", "stroke-linecap": "round" });
  for (const v of logarithmic ? decades(low, high) : ticks(low, high, height > 250 ? 9 : 5)) {
    const y = height - BOTTOM - ((v - low) / (high - low)) * (height - TOP - BOTTOM);
    grid.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    const word = valued(logarithmic ? 10 ** v : Math.abs(v) < 1e-12 * (high - low) ? 0 : v, chart.unit === "ms" ? "" : chart.unit);
    grid.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, word));
  }
  const across = view.over === "t" ? time : (x) => (x < 1e5 ? number(x) : scaled(x, ["", "k", "M", "G", "T"], 1000));
  for (const v of ticks(first, last, Math.max(2, width / 110)).filter((v) => view.over === "t" || last - first < 2 || Number.isInteger(v))) {
    const end = X(v) > width - 40;
    grid.append(svg("text", { x: end ? width - RIGHT : X(v), y: height - 5, "text-anchor": end ? "end" : "middle" }, across(v)));
  }
  for (const { line, x, raw, y, low: least, high: most } of lines) {
    const color = colored(line);
    if (least && most) drawn.append(svg("path", { d: area(x, least, most, X, Y), fill: color, "fill-opacity": chart.stacked ? 0.85 : 0.13 }));
    if (chart.stacked) continue;
    if (!line.exact && view.smoothing > 0)
      drawn.append(svg("path", { d: path(x, raw, X, Y), stroke: color, "stroke-width": 1, "stroke-opacity": 0.3 }));
    const dashed = line.label !== chart.title;
    drawn.append(svg("path", { d: path(x, y, X, Y), stroke: color, "stroke-width": dashed ? 2.2 : 1.8,
                               ...(dashed ? { "stroke-dasharray": "5 3" } : {}) }));
    if (line.exact && x.length < 60) drawn.append(svg("path", { d: dots(x, y, X, Y), stroke: color, "stroke-width": 5 }));
  }
  for (const [run, x, what] of view.over === "x" && !chart.stacked ? chart.marks : []) if (!hidden.has(run)) {
    const mark = svg("line", { class: "mark", x1: X(x), x2: X(x), y1: height - BOTTOM, y2: height - BOTTOM - 7 });
    mark.append(svg("title", {}, what));
    drawn.append(mark);
  }
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  picture.append(grid, drawn, cursor);
  plot.replaceChildren(picture);
  plots.set(figure, { chart, lines, X, first, last, cursor, width });
  read(figure);
}

/* The index of the point of a line that is nearest to x. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] === null || xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(xs[low - 1] - x) < Math.abs(xs[low] - x) ? low - 1 : low;
}

/* Write beside a chart what its lines are at the cursor, or at their end. */
function read(figure) {
  const plot = plots.get(figure), out = figure.querySelector(".readout");
  out.replaceChildren();
  if (!plot) return;
  const { chart, lines, X, first, last, cursor } = plot, inside = view.at !== null && view.at >= first && view.at <= last;
  const x = inside ? view.at : last;
  const say = (color, label, value) => {
    const span = document.createElement("span"), strong = document.createElement("b");
    if (color) {
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = color;
      span.append(swatch);
    }
    strong.textContent = value;
    span.append(label ? `${label} ` : "", strong);
    out.append(span);
  };
  let where = null, whole = 0;
  for (const { line, x: xs, raw, y, value, low, high } of lines) {
    const i = nearest(xs, x);
    where ??= xs[i];
    whole += value?.[i] ?? 0;
    const names = [runs.length > 1 && !chart.stacked ? runs[line.run] : "", line.label === chart.title ? "" : line.label];
    let text = valued(value ? value[i] : raw[i], chart.unit);
    if (!value && !line.exact && view.smoothing > 0 && y[i] !== null) text += `, smoothed ${valued(y[i], chart.unit)}`;
    if (!value && low && low[i] !== null && low[i] !== high[i]) text += ` (${valued(low[i], chart.unit)} to ${valued(high[i], chart.unit)})`;
    say(lines.length > 1 || line.color ? colored(line) : "", names.filter(Boolean).join(" "), text);
  }
  if (chart.stacked) say("", "together", valued(whole, chart.unit));
  if (where !== null) out.prepend(at(chart, where));
  cursor.setAttribute("visibility", inside ? "visible" : "hidden");
  if (inside && where !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, X(where));
}

const figures = [...document.querySelectorAll("figure[data-chart]")];
let asked = false;
function readAll() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; plots.forEach((_, figure) => read(figure)); });
}
const drawAll = () => figures.forEach(draw);
const move = (x) => { view.at = x; readAll(); };

for (const figure of figures) {
  const plot = figure.querySelector(".plot");
  plot.addEventListener("pointermove", (event) => {
    const known = plots.get(figure);
    if (!known) return;
    const share = (event.clientX - plot.getBoundingClientRect().left - LEFT) / (known.width - LEFT - RIGHT);
    move(known.first + Math.min(1, Math.max(0, share)) * (known.last - known.first));
  });
  plot.addEventListener("pointerleave", () => move(null));
  plot.addEventListener("blur", () => move(null));
  plot.addEventListener("keydown", (event) => {
    const known = plots.get(figure), xs = known?.lines[0]?.x;
    if (!xs) return;
    const i = view.at === null ? xs.length - 1 : nearest(xs, view.at);
    const next = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: xs.length - 1, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    move(next === null ? null : xs[Math.min(xs.length - 1, Math.max(0, next))]);
  });
  const widen = figure.querySelector(".widen");
  widen.addEventListener("click", () => widen.setAttribute("aria-pressed", figure.classList.toggle("is-wide")));
}
const observer = new ResizeObserver((entries) => entries.forEach((entry) => draw(entry.target.parentElement)));
figures.forEach((figure) => observer.observe(figure.querySelector(".plot")));

const smoothing = document.getElementById("smoothing"), smoothed = document.getElementById("smoothed");
smoothing.addEventListener("input", () => {
  view.smoothing = Number(smoothing.value);
  smoothed.value = view.smoothing.toFixed(2);
  drawAll();
});
document.getElementById("over").addEventListener("change", (event) => { view.over = event.target.value; view.at = null; drawAll(); });
document.getElementById("log").addEventListener("change", (event) => { view.log = event.target.checked; drawAll(); });
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("button.run")) button.addEventListener("click", () => {
  const run = Number(button.dataset.run), shows = hidden.has(run);
  if (shows) hidden.delete(run); else hidden.add(run);
  button.setAttribute("aria-pressed", shows);
  drawAll();
});

const theme = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "light" : "dark"; theme.title = `show it ${theme.textContent}`; };
theme.addEventListener("click", () => { root.style.colorScheme = isDark() ? "light" : "dark"; label(); });
dark.addEventListener("change", label);
label();
