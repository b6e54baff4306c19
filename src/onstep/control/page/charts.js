// Draws the curves, with the `Chart` of chart.js. They share their x axis: zooming one zooms all.

import { byId, element, setText } from "./dom.js";
import { preferences } from "./preferences.js";
import { bytes, count, number } from "./format.js";
import { extent, isEvaluation, isLoss, isNoisy, lossUnit, smoothed, variant } from "./metrics.js";

const DRAW_MS = 400;
const FEW_POINTS = 40;
const DASHES = ["", "2 4", "8 3 2 3", "10 4", "6 4"];
const AXES = { step: "step", elapsed: "minutes", clock: "time" };
const CLOCK_STEPS_MS = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10_800, 21_600, 43_200].map((one) => one * 1000);
const DAY_MS = 86_400_000;

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
    new ResizeObserver(() => this.draw()).observe(node);
  }

  /** Makes the charts those of a list of {id, title, names, unit}. */
  setCharts(wanted) {
    for (const [id, chart] of this.charts) {
      if (wanted.some((one) => one.id === id)) continue;
      this.watcher.unobserve(chart.figure);
      chart.figure.remove();
      this.charts.delete(id);
    }
    for (const one of wanted) {
      if (!this.charts.has(one.id)) this.charts.set(one.id, this.made(one));
      this.node.append(this.charts.get(one.id).figure);
    }
  }

  made({ id, title, names, unit }) {
    const place = element("div", { class: "place" });
    const latest = element("span", { class: "latest" });
    const legend = element("ul", { class: "legend" });
    const heading = element("h3", {}, title);
    const caption = element("figcaption", {}, heading, latest, legend);
    const figure = element("figure", { class: "chart panel", "data-chart": id, role: "group", "aria-label": title }, caption, place);
    this.watcher.observe(figure);
    return { id, title, names, unit, figure, heading, place, latest, legend, isVisible: false, isDirty: true };
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
    chart.drawing ??= new Chart(chart.place, chart.title, this.onZoom);
    chart.drawing.draw(lines.flatMap(drawnOf), this.view(chart, lines));
    chart.figure.dataset.points = String(lines.reduce((sum, line) => sum + line.y.length, 0));
  }

  lines(chart, runs, unit) {
    return scaled(chart, runs.flatMap(({ job, label, colourIndex }) => {
      return chart.names(job.names).flatMap((name, index) => {
        const series = job.series.get(name);
        if (!series || series.step.length === 0) return [];
        const line = { name, label, colourIndex, index, unit: chart.unit, job };
        const ratio = isLoss(name) ? unit.ratios?.get(job) ?? 1 : 1;
        const y = ratio === 1 ? series.value : series.value.map((one) => (one === null ? null : one / ratio));
        const { rewind } = job.status;
        const commandOf = rewind && !isEvaluation(name) ? (at) => rewind.replace("{step}", Math.max(1, series.step[at])) : undefined;
        return [{ ...line, x: across(series, job), y, commandOf }];
      });
    }));
  }

  /** What a chart's values are per, where the shown runs have different tokenizers. */
  per(lines, unit) {
    if (unit.isCommon || !lines.some(({ name }) => isLoss(name) || name.endsWith("perplexity"))) return "";
    return unit.ratios && lines.every(({ name }) => isLoss(name)) ? " per byte" : " per token of different tokenizers: not comparable";
  }

  view(chart, lines) {
    const x = this.zoom.range ?? xRange(lines), logY = preferences.logY, isStep = preferences.axis === "step";
    const clock = preferences.axis === "clock" ? { ticksOf: clockTicks, textOf: clockText(x) } : {};
    const height = chart.place.clientHeight, unit = lines[0]?.suffix ?? "";
    return { x, y: yRange(lines, x, logY), logX: false, logY, xName: AXES[preferences.axis], whole: isStep, height, unit, ...clock };
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
      const swatch = element("span", { class: `swatch run-${line.colourIndex} ${dashOf(line) ? "is-dashed" : ""}`, "aria-hidden": "true" });
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
  if (preferences.axis === "clock") return series.time.map((one) => one * 1000);
  const start = job.status.started_at ?? series.time[0];
  const first = Math.min(start, series.time[0] ?? start);
  return series.time.map((one) => (one - first) / 60);
}

function dashOf(line) {
  if (isEvaluation(line.name)) return 1;
  return /\[\d+\]$/.test(line.name) ? line.index % DASHES.length : 0;
}

/** A curve as lines of a `Chart`: smoothed, the values themselves are faint. */
function drawnOf(line) {
  const isSparse = isEvaluation(line.name), weight = isNoisy(line.name) ? preferences.smoothing : 0;
  const isThere = (_, index) => !isSparse || line.y[index] !== null;
  const x = line.x.filter(isThere), y = line.y.filter(isThere);
  const label = [line.label, variant(line.name)].filter(Boolean).join(" ");
  const base = { x, y, label, className: `run-${line.colourIndex}`, dash: DASHES[dashOf(line)], markers: isSparse || y.length <= FEW_POINTS, commandOf: line.commandOf };
  return weight === 0 ? [base] : [{ ...base, faint: true, markers: false }, { ...base, y: smoothed(y, weight) }];
}

/** Bytes in MiB or GiB, the same for all curves of a chart. */
function scaled(chart, lines) {
  if (chart.unit !== "bytes") return lines;
  const most = extent(lines, [-Infinity, Infinity])?.[1] ?? 0;
  const [scale, suffix] = most >= 2 ** 30 ? [2 ** 30, " GiB"] : [2 ** 20, " MiB"];
  return lines.map((line) => ({ ...line, scale, suffix, y: line.y.map((one) => (one === null ? null : one / scale)) }));
}

function xRange(lines) {
  const ends = lines.flatMap(({ x }) => [x[0], x[x.length - 1]]), low = Math.min(...ends), high = Math.max(...ends);
  if (ends.length === 0) return [0, 1];
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

/** What the y axis shows of the part in view; a constant is in the middle. */
function yRange(lines, range, isLog) {
  const shown = lines.map(({ x, y }) => ({ x, y: isLog ? y.map((one) => (one > 0 ? one : null)) : y }));
  const [low, high] = extent(shown, range) ?? (isLog ? [0.1, 1] : [0, 1]);
  if (isLog) {
    const factor = high > low ? Math.max((high / low) ** 0.05, 1.02) : 3;
    return [low / factor, high * factor];
  }
  const isConstant = high - low <= 1e-9 * Math.abs(high);
  const room = isConstant ? Math.abs(high) * 0.5 || 1 : (high - low) * 0.05;
  return [low - room, high + room];
}

/** Round times of the day, or days, in the time zone of the reader. */
function clockTicks(low, high, count) {
  const least = (high - low) / count;
  const step = CLOCK_STEPS_MS.find((one) => one >= least) ?? Math.ceil(least / DAY_MS) * DAY_MS;
  const zone = new Date(low).getTimezoneOffset() * 60_000, found = [];
  for (let at = Math.ceil((low - zone) / step) * step + zone; at <= high; at += step) found.push(at);
  return found;
}

function clockText([low, high]) {
  const day = { month: "short", day: "numeric" }, time = { hour: "2-digit", minute: "2-digit" };
  const isShort = high - low < DAY_MS / 48;
  const options = high - low > 3 * DAY_MS ? { ...day, ...time } : isShort ? { ...time, second: "2-digit" } : time;
  return (at) => new Date(at).toLocaleString([], options);
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
