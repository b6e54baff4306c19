// The page: its data as curves, the controls, and the theme.

const DATA = JSON.parse(document.getElementById("data").textContent);
const AXES = {
  step: "step", epoch: "epoch", time: "time (minutes)", tokens: "tokens", flops: "floating-point operations",
};
const WINDOWS = [1, 3, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000];
const MARKERS_UP_TO = 50;
const state = { axis: DATA.axes[0] || "step", window: 1, logX: false, logY: false, bulk: true, zoom: null, hidden: new Set() };
const charts = [];

/** Centered mean over `width` (odd) values, narrower on both sides at the start; as `smooth_values` in Python. */
function movingMean(values, width, leftOut) {
  const half = Math.floor(width / 2), left = new Set(leftOut || []);
  return values.map((value, index) => {
    if (value === null) return null;
    const reach = Math.min(half, index), end = Math.min(values.length, index + reach + 1);
    let sum = 0, count = 0;
    for (let at = index - reach; at < end; at += 1) {
      if (values[at] === null || left.has(at)) continue;
      sum += values[at];
      count += 1;
    }
    return count ? sum / count : value;
  });
}

/** The places of steps on the chosen axis. */
function across(run, steps) {
  if (state.axis === "step") return steps;
  const known = run.axes[state.axis];
  if (!known) return null;
  const [at, values] = known;
  let place = 0;
  return steps.map((step) => {
    while (place < at.length - 2 && at[place + 1] < step) place += 1;
    if (at.length === 1) return values[0];
    const share = (step - at[place]) / (at[place + 1] - at[place]);
    return values[place] + share * (values[place + 1] - values[place]);
  });
}

function smoothed(metric, series) {
  if (metric.evaluation || metric.key.startsWith("learning_rate")) return null;
  const window = Math.min(state.window, Math.floor(series.points / 10));
  if (window <= 1) return null;
  const y = (state.bulk && series.calm) || series.y, width = Math.round((window * y.length) / series.points);
  return width > 1 ? movingMean(y, width, state.bulk ? series.spikes : null) : y;
}

/** The step of a point; of a column of a long curve, that of its highest value, if it is a spike. */
function stepOf(series, run, index) {
  return (series.peaks || {})[index] ?? Math.max(1, run.steps[series.at][index]);
}

function linesOf(metric) {
  const found = [];
  visible(metric).forEach((series) => {
    const run = DATA.runs[series.run], x = across(run, run.steps[series.at]);
    if (!x || !series.y) return;
    const smooth = smoothed(metric, series), band = series.low ? { low: series.low, high: series.high } : null;
    const base = { x, className: `run-${run.colour}`, dash: run.dash, label: run.label };
    if (run.rewind && !metric.evaluation) base.commandOf = (index) => run.rewind.replace("{step}", stepOf(series, run, index));
    const gaps = across(run, series.gaps);
    if (smooth && !band) found.push({ ...base, y: series.y, faint: true, gaps });
    found.push({ ...base, y: smooth || series.y, band, gaps: smooth && !band ? [] : gaps, markers: series.points <= MARKERS_UP_TO });
  });
  return found;
}

function visible(metric) {
  return metric.series.filter((series) => !state.hidden.has(series.run));
}

/** The lowest and the highest of the limits of that name ("range" or "bulk") of all series; null where there are none. */
function limits(metric, name) {
  const found = visible(metric).map((series) => series[name]).filter(Boolean);
  return found.length ? [Math.min(...found.map((one) => one[0])), Math.max(...found.map((one) => one[1]))] : null;
}

/** What the y axis shows. A constant is drawn in the middle, and not as 0. */
function yRange(metric, lines, seen) {
  const inView = lines.flatMap((line) => {
    const values = line.band ? [...line.band.low, ...line.band.high] : line.y;
    return values.filter((_, index) => {
      const x = line.x[index % line.x.length];
      return x >= seen[0] && x <= seen[1];
    });
  });
  const whole = extent(inView, state.logY) || (state.logY ? [0.1, 1] : [0, 1]);
  const bulk = state.bulk && !state.logY && !metric.evaluation ? limits(metric, "bulk") : null;
  const low = bulk && bulk[1] > bulk[0] ? Math.max(whole[0], bulk[0]) : whole[0];
  const high = bulk && bulk[1] > bulk[0] ? Math.min(whole[1], bulk[1]) : whole[1];
  if (state.logY) return [low / Math.max((high / low) ** 0.05, 1.02), high * Math.max((high / low) ** 0.05, 1.02)];
  const room = high > low ? 0.05 * (high - low) : 0.05 * Math.abs(high) || 1;
  return [low - room, high + room];
}

function xRange(lines) {
  const whole = extent(lines.flatMap((line) => [line.x.find((x) => !state.logX || x > 0) ?? null, line.x[line.x.length - 1]]), state.logX);
  if (!whole) return [state.logX ? 0.1 : 0, 1];
  if (state.zoom) return [...state.zoom];
  return whole[1] > whole[0] ? whole : [whole[0] - 0.5, whole[1] + 0.5];
}

/** What is not drawn. A logarithmic x axis has no place for step 0, which is no outlier. */
function remark(metric, shown) {
  const whole = limits(metric, "range"), notes = [];
  const missing = visible(metric).reduce((sum, series) => sum + series.missing, 0);
  if (missing) notes.push(missing.toLocaleString("en") + " not finite");
  if (whole && !state.zoom && !state.logX && whole[1] > shown[1]) notes.push("up to " + number(whole[1]) + " outside");
  if (whole && !state.zoom && !state.logX && !state.logY && whole[0] < shown[0]) notes.push("down to " + number(whole[0]) + " outside");
  return notes.join(", ");
}

function drawChart(chart) {
  const lines = linesOf(chart.metric), x = xRange(lines), y = yRange(chart.metric, lines, x);
  const isLogX = state.logX && x[0] > 0;
  chart.chart ||= new Chart(chart.node, chart.metric.name, (range) => { state.zoom = range; redraw(); });
  chart.remark.textContent = lines.length ? remark(chart.metric, y) : "nothing to show";
  chart.chart.draw(lines, { x, y, logX: isLogX, logY: state.logY, xName: AXES[state.axis], whole: state.axis === "step" });
  chart.drawn = true;
}

function redraw() {
  document.getElementById("reset").hidden = state.zoom === null;
  charts.forEach((chart) => { if (chart.drawn) drawChart(chart); });
}

function addControls() {
  const place = document.getElementById("controls");
  const axis = element("select", { id: "axis" }, element("label", { textContent: "x axis " }, place));
  DATA.axes.forEach((name) => element("option", { value: name, textContent: AXES[name] }, axis));
  axis.onchange = () => { state.axis = axis.value; state.zoom = null; redraw(); };
  addSmoothing(place);
  addSwitch(place, "log x", "logX");
  addSwitch(place, "log y", "logY");
  addSwitch(place, "hide outliers", "bulk");
  const reset = element("button", { id: "reset", type: "button", textContent: "Reset zoom", hidden: true }, place);
  reset.onclick = () => { state.zoom = null; redraw(); };
  if (DATA.runs.length > 1) addRuns(element("div", { className: "runs" }, place));
}

function addSmoothing(place) {
  const longest = Math.max(1, ...charts.flatMap((chart) => chart.metric.series.map((series) => series.points)));
  const choices = WINDOWS.filter((one) => one === 1 || one <= longest / 3), wanted = longest < 40 ? 1 : longest / 25;
  const label = element("label", { textContent: "smoothing " }, place);
  const chosen = choices.filter((one) => one <= wanted).length - 1;
  const slider = element("input", { type: "range", id: "window", min: 0, max: choices.length - 1 }, label);
  slider.value = chosen; // after max, which would limit it
  const shown = element("span", { className: "window" }, label);
  const take = () => {
    state.window = choices[Number(slider.value)];
    shown.textContent = state.window > 1 ? state.window.toLocaleString("en") + " records" : "off";
  };
  slider.oninput = () => { take(); redraw(); };
  take();
}

function addSwitch(place, text, name) {
  const label = element("label", {}, place);
  const box = element("input", { type: "checkbox", id: name, checked: state[name] }, label);
  element("span", { textContent: text }, label);
  box.onchange = () => { state[name] = box.checked; redraw(); };
}

function addRuns(place) {
  DATA.runs.forEach((run, index) => {
    const label = element("label", {}, place);
    const box = element("input", { type: "checkbox", checked: true }, label);
    const swatch = shape("svg", { class: "swatch", viewBox: "0 0 22 4" }, label);
    shape("line", { class: `line run-${run.colour}`, x1: 0, x2: 22, y1: 2, y2: 2, "stroke-dasharray": run.dash || "none" }, swatch);
    element("span", { textContent: run.label }, label);
    box.onchange = () => {
      if (box.checked) state.hidden.delete(index); else state.hidden.add(index);
      redraw();
    };
  });
}

function addCharts() {
  const place = document.getElementById("charts");
  DATA.groups.forEach((group) => {
    const box = element("details", { open: true }, place);
    element("h2", { textContent: group.name }, element("summary", {}, box));
    const grid = element("div", { className: "charts" }, box);
    group.metrics.forEach((metric) => {
      const cell = element("div", {}, grid);
      element("h3", { textContent: metric.name, title: metric.key }, cell);
      const remark = element("p", { className: "quiet remark" }, cell);
      charts.push({ node: element("div", { className: "chart" }, cell), remark, metric, drawn: false });
    });
  });
}

/** Buttons for the theme: that of the system, light or dark. It is remembered where the browser allows it. */
function addThemes() {
  const place = document.getElementById("themes"), root = document.documentElement;
  const button = element("button", { id: "theme", type: "button" }, place);
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.onclick = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("onstep-report-theme", root.dataset.theme); } catch { /* storage is off */ }
    name();
  };
  try { root.dataset.theme = localStorage.getItem("onstep-report-theme") || ""; } catch { /* storage is off */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
}

addThemes();
addCharts();
addControls();
const watcher = new IntersectionObserver((entries) => {
  entries.forEach((entry) => {
    const chart = charts.find((one) => one.node === entry.target);
    if (entry.isIntersecting && chart && !chart.drawn) drawChart(chart);
  });
}, { rootMargin: "300px" });
charts.forEach((chart) => watcher.observe(chart.node));
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) { width = window.innerWidth; redraw(); }
});
window.addEventListener("beforeprint", () => charts.forEach(drawChart));
