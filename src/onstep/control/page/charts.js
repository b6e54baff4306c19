// Draws the curves with Plotly. Charts share their x axis: zooming one zooms all.

import { byId, element, setText } from "./dom.js";
import { colour, preferences } from "./preferences.js";
import { bytes, count, number } from "./format.js";
import { extent, isEvaluation, isLoss, isNoisy, lossUnit, smoothed, variant } from "./metrics.js";

const DRAW_MS = 400;
const FEW_POINTS = 40;
const DASHES = ["solid", "dot", "dashdot", "longdash", "dash"];

/** A grid of charts of the shown runs. */
export class Charts {
  /** `getRuns()` gives [{job, label, colourIndex}]; `onZoom(range)` is told the range in steps, or null. */
  constructor(node, getRuns, zoom, onZoom) {
    this.node = node;
    this.getRuns = getRuns;
    this.zoom = zoom; // {range}: shared by all grids
    this.onZoom = onZoom;
    this.charts = new Map();
    this.watcher = new IntersectionObserver((entries) => entries.forEach((entry) => this.seen(entry)), {
      rootMargin: "200px",
    });
  }

  /** Makes the charts those of a list of {id, title, names, unit}. */
  setCharts(wanted) {
    for (const [id, chart] of this.charts) {
      if (wanted.some((one) => one.id === id)) continue;
      this.watcher.unobserve(chart.figure);
      Plotly.purge(chart.plot);
      chart.figure.remove();
      this.charts.delete(id);
    }
    for (const one of wanted) {
      if (!this.charts.has(one.id)) this.charts.set(one.id, this.made(one));
      this.node.append(this.charts.get(one.id).figure);
    }
  }

  made({ id, title, names, unit }) {
    const plot = element("div", { class: "plot" });
    const latest = element("span", { class: "latest" });
    const legend = element("ul", { class: "legend" });
    const heading = element("h3", {}, title);
    const caption = element("figcaption", {}, heading, latest, legend);
    const figure = element("figure", { class: "chart panel", "data-chart": id, role: "group", "aria-label": title }, caption, plot);
    this.watcher.observe(figure);
    return { id, title, names, unit, figure, heading, plot, latest, legend, isVisible: false, isDirty: true };
  }

  seen(entry) {
    for (const chart of this.charts.values()) {
      if (chart.figure !== entry.target) continue;
      chart.isVisible = entry.isIntersecting;
      if (chart.isVisible && chart.isDirty) this.drawSoon(chart);
    }
  }

  /** Draws all charts again: those in view soon, the others when they come into view. */
  draw(isUrgent = false) {
    for (const chart of this.charts.values()) {
      chart.isDirty = true;
      if (chart.isVisible) this.drawSoon(chart, isUrgent);
    }
  }

  drawSoon(chart, isUrgent = false) {
    if (chart.timer && !isUrgent) return;
    clearTimeout(chart.timer);
    const wait = isUrgent ? 0 : Math.max(0, DRAW_MS - (performance.now() - (chart.drawnAt ?? -DRAW_MS)));
    chart.timer = setTimeout(() => {
      chart.timer = null;
      chart.drawnAt = performance.now();
      chart.isDirty = false;
      this.drawNow(chart);
    }, wait);
  }

  drawNow(chart) {
    const runs = this.getRuns();
    const unit = lossUnit(runs.map(({ job }) => job));
    const lines = this.lines(chart, runs, unit);
    setText(chart.heading, chart.title + this.per(lines, unit));
    chart.figure.classList.toggle("is-empty", lines.length === 0);
    this.describe(chart, lines);
    const traces = lines.flatMap((line) => tracesOf(line));
    const isFirst = !chart.plot.classList.contains("js-plotly-plot");
    const config = { responsive: true, displayModeBar: false, doubleClick: false, showTips: false };
    Plotly.react(chart.plot, traces, this.layout(chart, lines), config);
    chart.figure.dataset.points = String(lines.reduce((sum, line) => sum + line.y.length, 0));
    if (!isFirst) return;
    chart.plot.on("plotly_relayout", (change) => this.relayout(change));
    chart.plot.on("plotly_doubleclick", () => this.onZoom(null));
  }

  lines(chart, runs, unit) {
    return scaled(chart, runs.flatMap(({ job, label, colourIndex }) => {
      return chart.names(job.names).flatMap((name, index) => {
        const series = job.series.get(name);
        if (!series || series.step.length === 0) return [];
        const line = { name, label, colourIndex, index, unit: chart.unit, job };
        const ratio = isLoss(name) ? unit.ratios?.get(job) ?? 1 : 1;
        const y = ratio === 1 ? series.value : series.value.map((one) => (one === null ? null : one / ratio));
        return [{ ...line, x: across(series, job), y }];
      });
    }));
  }

  /** What a chart's values are per, where the shown runs have different tokenizers. */
  per(lines, unit) {
    if (unit.isCommon || !lines.some(({ name }) => isLoss(name) || name.endsWith("perplexity"))) return "";
    return unit.ratios && lines.every(({ name }) => isLoss(name)) ? " per byte" : " per token of different tokenizers: not comparable";
  }

  layout(chart, lines) {
    const style = getComputedStyle(document.documentElement);
    const token = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: token("--grid"), zeroline: false, linecolor: token("--border"), tickfont: { size: 11 } };
    const isTime = preferences.axis === "clock";
    const range = this.zoom.range;
    this.revision = (this.revision ?? 0) + 1;
    return {
      datarevision: this.revision, // the arrays are the same ones, with further points
      margin: { l: 52, r: 10, t: 6, b: 28 },
      font: { family: token("--font"), size: 12, color: token("--muted") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      hovermode: "x", hoverdistance: 40, dragmode: "zoom",
      hoverlabel: { bgcolor: token("--surface"), bordercolor: token("--border"), font: { color: token("--text"), size: 12 }, namelength: 40 },
      xaxis: {
        ...axis, type: isTime ? "date" : "linear", exponentformat: "SI", nticks: 7,
        ticksuffix: preferences.axis === "elapsed" ? " min" : "",
        ...(range ? { range: [...range], autorange: false } : { autorange: true }),
      },
      yaxis: {
        ...axis, type: preferences.logY ? "log" : "linear", fixedrange: true, nticks: 6,
        exponentformat: chart.id === "throughput" ? "SI" : "e", ticksuffix: lines[0]?.suffix ?? "",
        ...yRange(lines, range),
      },
    };
  }

  relayout(change) {
    const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
    if (from !== undefined && to !== undefined) this.onZoom([from, to]);
  }

  /** The latest values, as text, for those who cannot see or hover. */
  describe(chart, lines) {
    const shown = (line) => {
      const value = last(line.y);
      if (line.scale) return bytes(value === null ? null : value * line.scale);
      return chart.id === "throughput" ? count(value) : number(value);
    };
    setText(chart.latest, lines.length === 1 ? shown(lines[0]) : "");
    const several = lines.length > 1 ? lines.slice(0, 12) : [];
    chart.legend.replaceChildren(...several.map((line) => {
      const swatch = element("span", { class: `swatch run-${line.colourIndex} dash-${DASHES[dashOf(line)]}`, "aria-hidden": "true" });
      const isSeveral = this.getRuns().length > 1;
      const words = variant(line.name) || (isSeveral ? "" : "train");
      const label = element("span", { class: chart.id === "loss" ? "name" : "visually-hidden" }, line.label);
      const text = words ? element("span", {}, words) : null;
      return element("li", {}, swatch, isSeveral ? label : null, text, element("b", {}, shown(line)));
    }));
  }
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

/** The x values of a curve. */
function across(series, job) {
  if (preferences.axis === "step") return series.step;
  if (preferences.axis === "clock") return series.time.map((one) => one * 1000 - new Date(one * 1000).getTimezoneOffset() * 60_000);
  const start = job.status.started_at ?? series.time[0];
  const first = Math.min(start, series.time[0] ?? start);
  return series.time.map((one) => (one - first) / 60);
}

function dashOf(line) {
  if (isEvaluation(line.name)) return 1;
  return /\[\d+\]$/.test(line.name) ? line.index % DASHES.length : 0;
}

/** Plotly reads a few HTML tags in names: what a job sends is shown as it is. */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function tracesOf(line) {
  const isFew = isEvaluation(line.name) || line.y.length <= FEW_POINTS;
  const weight = isNoisy(line.name) ? preferences.smoothing : 0;
  const base = {
    type: "scatter", x: line.x, connectgaps: isEvaluation(line.name), marker: { size: 5 },
    mode: isFew ? "lines+markers" : "lines", name: escaped([line.label, variant(line.name)].filter(Boolean).join(" ")),
  };
  const stroke = { color: colour(line.colourIndex), width: 1.8, dash: DASHES[dashOf(line)] };
  if (weight === 0) return [{ ...base, y: line.y, line: stroke }];
  const faint = { ...base, y: line.y, opacity: 0.25, hoverinfo: "skip", mode: "lines", line: { ...stroke, width: 1 } };
  return [faint, { ...base, y: smoothed(line.y, weight), line: stroke }];
}

/** Bytes in MiB or GiB, the same for all curves of a chart. */
function scaled(chart, lines) {
  if (chart.unit !== "bytes") return lines;
  const most = extent(lines, [-Infinity, Infinity])?.[1] ?? 0;
  const [scale, suffix] = most >= 2 ** 30 ? [2 ** 30, " GiB"] : [2 ** 20, " MiB"];
  return lines.map((line) => ({ ...line, scale, suffix, y: line.y.map((one) => (one === null ? null : one / scale)) }));
}

/** While zoomed, the y axis shows what is in view; a constant is in the middle. */
function yRange(lines, range) {
  const whole = extent(lines, [-Infinity, Infinity]);
  const isConstant = whole !== null && whole[1] - whole[0] <= 1e-9 * Math.abs(whole[1]);
  if (!range && !isConstant) return { autorange: true };
  if (!range) return constantRange(whole[0]);
  const edges = range.map((one) => (typeof one === "string" ? Date.parse(`${one.replace(" ", "T")}Z`) : one));
  const found = extent(lines, edges);
  if (!found || (preferences.logY && found[0] <= 0)) return { autorange: true };
  const [low, high] = preferences.logY ? found.map(Math.log10) : found;
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return { range: [low - room, high + room], autorange: false };
}

function constantRange(value) {
  const room = Math.abs(value) * 0.5 || 1;
  if (!preferences.logY) return { range: [value - room, value + room], autorange: false };
  return value > 0 ? { range: [Math.log10(value) - 0.5, Math.log10(value) + 0.5], autorange: false } : { autorange: true };
}

/** The controls above the charts; `onChange` redraws them. */
export function setUpToolbar(remember, onChange, onReset) {
  const [axis, smoothing, logY] = ["axis", "smoothing", "log-y"].map(byId);
  axis.value = preferences.axis;
  smoothing.value = preferences.smoothing;
  logY.checked = preferences.logY;
  const showSmoothing = () => setText(byId("smoothing-value"), preferences.smoothing > 0 ? preferences.smoothing.toFixed(2) : "off");
  showSmoothing();
  axis.addEventListener("change", () => { remember({ axis: axis.value }); onReset(); });
  smoothing.addEventListener("input", () => { remember({ smoothing: Number(smoothing.value) }); showSmoothing(); onChange(); });
  logY.addEventListener("change", () => { remember({ logY: logY.checked }); onChange(); });
  byId("reset-zoom").addEventListener("click", onReset);
  byId("toolbar").addEventListener("submit", (event) => event.preventDefault());
}
