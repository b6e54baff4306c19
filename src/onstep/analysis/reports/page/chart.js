"use strict";
// Draws line charts as SVG: scales, ticks, lines with bands, a crosshair with values, and zooming by dragging.

const SVG = "http://www.w3.org/2000/svg";
const ROOM = { left: 56, right: 22, top: 8, bottom: 40 };
const HEIGHT = 280;
const UNITS = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]];
let clips = 0;

function element(tag, properties, parent) {
  const made = Object.assign(document.createElement(tag), properties || {});
  if (parent) parent.appendChild(made);
  return made;
}

function shape(tag, attributes, parent) {
  const made = document.createElementNS(SVG, tag);
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  if (parent) parent.appendChild(made);
  return made;
}

/** A number in at most `digits` digits: 1,234, 1.25M, 3e-4. */
function number(value, digits = 4) {
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-3 || size >= 1e21)) return String(Number(value.toPrecision(digits)).toExponential());
  const unit = size >= 1e5 ? UNITS.find(([least]) => size >= least) : null;
  const scaled = Number((unit ? value / unit[0] : value).toPrecision(digits));
  return scaled.toLocaleString("en", { maximumSignificantDigits: digits }) + (unit ? unit[1] : "");
}

/** Round places from `low` to `high`, about `count` of them. */
function linearTicks(low, high, count, whole) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) found.push(index * step);
  return found;
}

/** Places 1, 2 and 5 of each decade; of many decades, fewer; of less than one, round places. */
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, count);
  const every = Math.max(1, Math.ceil(decades / count)), parts = decades <= count / 3 ? [1, 2, 5] : [1], found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
    parts.forEach((part) => found.push(part * 10 ** power));
  }
  return found.filter((one) => one >= low * 0.999 && one <= high * 1.001);
}

/** Labels that tell neighbours apart. */
function tickLabels(ticks) {
  for (let digits = 3; digits < 9; digits += 1) {
    const labels = ticks.map((one) => number(one, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return ticks.map(String);
}

/** A map from [low, high] to pixels, and back. */
function makeScale(low, high, from, to, isLog) {
  const forth = isLog ? Math.log10 : (value) => value, back = isLog ? (value) => 10 ** value : (value) => value;
  const first = forth(low), span = forth(high) - first || 1;
  const scale = (value) => from + ((forth(value) - first) / span) * (to - from);
  scale.invert = (pixel) => back(first + ((pixel - from) / (to - from)) * span);
  return Object.assign(scale, { low, high, isLog });
}

/** The index of the x nearest to `wanted`; `xs` is ascending. */
function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - wanted) <= Math.abs(xs[high] - wanted) ? low : high;
}

/** The `d` of a line with gaps where y is null or cannot be shown. */
function pathOf(xs, ys, x, y) {
  let text = "", isOpen = false;
  ys.forEach((value, index) => {
    const isGap = value === null || (y.isLog && value <= 0) || xs[index] === null || (x.isLog && xs[index] <= 0);
    if (!isGap) text += `${isOpen ? "L" : "M"}${x(xs[index]).toFixed(1)},${y(value).toFixed(1)}`;
    isOpen = !isGap;
  });
  return text;
}

/** The outline of a band, one piece for each stretch without gaps. */
function bandOf(xs, band, x, y) {
  const floor = (value) => (y.isLog && value <= 0 ? y.low : value);
  let text = "", piece = [];
  const close = () => {
    if (piece.length > 1) {
      const there = piece.map((index) => `${x(xs[index]).toFixed(1)},${y(floor(band.high[index])).toFixed(1)}`);
      const back = piece.map((index) => `${x(xs[index]).toFixed(1)},${y(floor(band.low[index])).toFixed(1)}`).reverse();
      text += `M${there.join("L")}L${back.join("L")}Z`;
    }
    piece = [];
  };
  xs.forEach((value, index) => {
    if (band.low[index] === null || (x.isLog && value <= 0)) close(); else piece.push(index);
  });
  close();
  return text;
}

/** The lowest and highest finite value; null without any. */
function extent(values, isLog) {
  let low = Infinity, high = -Infinity;
  values.forEach((value) => {
    if (value === null || (isLog && value <= 0)) return;
    low = Math.min(low, value);
    high = Math.max(high, value);
  });
  return low <= high ? [low, high] : null;
}

class Chart {
  /** @param node where; `onZoom([from, to] or null)` is called when the user drags or double-clicks. */
  constructor(node, label, onZoom) {
    this.node = node;
    node.chart = this;
    this.onZoom = onZoom;
    this.clip = `clip-${clips += 1}`;
    this.svg = shape("svg", { class: "plot", role: "img", "aria-label": label }, node);
    this.tip = element("div", { className: "tip", hidden: true }, node);
    this.lines = [];
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.leave());
    this.svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.leave(); });
    document.addEventListener("pointerdown", (event) => { if (!this.node.contains(event.target)) this.leave(); });
    this.svg.addEventListener("dblclick", () => this.onZoom(null));
  }

  /**
   * Lines are {x, y, className, dash, label, faint, markers, band, gaps, commandOf}: `commandOf(index)` is the command
   * about a point, which a click copies. `view` is {x, y, logX, logY, xName, whole} and,
   * where they differ from those of numbers, {height, unit, ticksOf(low, high, count), textOf(x)}.
   */
  draw(lines, view) {
    this.lines = lines;
    this.view = view;
    this.height = view.height || HEIGHT;
    const width = Math.max(240, this.node.clientWidth);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.replaceChildren();
    const [xLow, xHigh] = view.x, [yLow, yHigh] = view.y;
    this.x = makeScale(xLow, xHigh, ROOM.left, width - ROOM.right, view.logX);
    this.y = makeScale(yLow, yHigh, this.height - ROOM.bottom, ROOM.top, view.logY);
    this.drawAxes(width, view);
    const clip = shape("clipPath", { id: this.clip }, shape("defs", {}, this.svg));
    const inside = { x: ROOM.left - 4, y: ROOM.top - 4, width: width - ROOM.left - ROOM.right + 8, height: this.height - ROOM.top - ROOM.bottom + 8 };
    shape("rect", inside, clip);
    const place = shape("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    lines.forEach((line) => this.drawLine(line, place));
    this.cross = shape("line", { class: "cross", y1: ROOM.top, y2: this.height - ROOM.bottom, visibility: "hidden" }, this.svg);
    this.brush = shape("rect", { class: "brush", y: ROOM.top, height: this.height - ROOM.top - ROOM.bottom, visibility: "hidden" }, this.svg);
    this.dots = shape("g", {}, this.svg);
  }

  drawAxes(width, view) {
    const axes = shape("g", { class: "axes" }, this.svg), bottom = this.height - ROOM.bottom;
    const room = (width - ROOM.left - ROOM.right) / 80;
    const ticksOf = view.ticksOf || (view.logX ? logTicks : linearTicks), across = ticksOf(this.x.low, this.x.high, room, view.whole);
    const upward = view.logY ? logTicks(this.y.low, this.y.high, 6) : linearTicks(this.y.low, this.y.high, 5);
    const names = view.textOf ? across.map(view.textOf) : tickLabels(across);
    const values = tickLabels(upward).map((text) => text + (view.unit || ""));
    upward.forEach((tick, index) => {
      const at = this.y(tick).toFixed(1);
      shape("line", { class: "grid", x1: ROOM.left, x2: width - ROOM.right, y1: at, y2: at }, axes);
      shape("text", { class: "y", x: ROOM.left - 8, y: at, dy: "0.32em" }, axes).textContent = values[index];
    });
    across.forEach((tick, index) => {
      const at = this.x(tick).toFixed(1);
      shape("line", { class: "grid", x1: at, x2: at, y1: ROOM.top, y2: bottom }, axes);
      shape("text", { class: "x", x: at, y: bottom + 17 }, axes).textContent = names[index];
    });
    shape("line", { class: "edge", x1: ROOM.left, x2: width - ROOM.right, y1: bottom, y2: bottom }, axes);
    shape("text", { class: "x name", x: (ROOM.left + width - ROOM.right) / 2, y: this.height - 6 }, axes).textContent = view.xName;
  }

  drawLine(line, place) {
    const kind = `${line.className}${line.faint ? " faint" : ""}`;
    if (line.band) shape("path", { class: `band ${line.className}`, d: bandOf(line.x, line.band, this.x, this.y) }, place);
    const attributes = { class: `line ${kind}`, d: pathOf(line.x, line.y, this.x, this.y) };
    shape("path", line.dash && !line.faint ? { ...attributes, "stroke-dasharray": line.dash } : attributes, place);
    if (line.markers) this.drawDots(line, place);
    (line.gaps || []).filter((at) => !this.x.isLog || at > 0).forEach((at) => {
      const left = this.x(at), bottom = this.height - ROOM.bottom;
      shape("path", { class: `gap ${line.className}`, d: `M${left - 3},${bottom - 3}l6,6m0,-6l-6,6` }, place);
    });
  }

  drawDots(line, place) {
    line.y.forEach((value, index) => {
      if (value === null || (this.y.isLog && value <= 0) || (this.x.isLog && line.x[index] <= 0)) return;
      shape("circle", { class: `dot ${line.className}`, cx: this.x(line.x[index]), cy: this.y(value), r: 3 }, place);
    });
  }

  /** The pixel of the picture that the pointer is at. */
  at(event) {
    const box = this.svg.getBoundingClientRect();
    return (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
  }

  press(event) {
    if (event.pointerType === "mouse" && event.button === 0) this.from = this.at(event);
    this.move(event);
  }

  move(event) {
    if (!this.x) return;
    const pixel = this.at(event);
    if (this.from !== undefined && Math.abs(pixel - this.from) > 4) {
      this.brush.setAttribute("x", Math.min(pixel, this.from));
      this.brush.setAttribute("width", Math.abs(pixel - this.from));
      this.brush.setAttribute("visibility", "visible");
    }
    this.point(pixel);
  }

  release(event) {
    const from = this.from, to = this.at(event);
    this.from = undefined;
    if (this.brush) this.brush.setAttribute("visibility", "hidden");
    if (from === undefined) return;
    if (Math.abs(to - from) < 8) {
      this.copy(event);
      return;
    }
    const clamp = (value) => Math.min(this.x.high, Math.max(this.x.low, value));
    this.onZoom([from, to].sort((one, other) => one - other).map((pixel) => clamp(this.x.invert(pixel))));
  }

  /** Copy the command about the point near a click, and show it. */
  copy(event) {
    if (!this.x || !this.lines.length) return;
    const box = this.svg.getBoundingClientRect(), wanted = this.x.invert(this.at(event));
    const height = (event.clientY - box.top) * (this.height / box.height);
    let best = null;
    this.lines.filter((line) => !line.faint && line.commandOf && line.x.length).forEach((line) => {
      const index = nearest(line.x, wanted), value = line.y[index];
      const far = value === null ? Infinity : Math.abs(this.y(value) - height);
      if (best === null || far < best.far) best = { far, text: line.commandOf(index) };
    });
    if (best === null) return;
    this.point(this.at(event));
    const row = element("div", { className: "command" }, this.tip);
    element("code", { textContent: best.text }, row);
    const note = element("span", { className: "quiet" }, row);
    navigator.clipboard?.writeText(best.text).then(() => { note.textContent = "copied"; }, () => {});
  }

  leave() {
    this.from = undefined;
    this.tip.hidden = true;
    [this.cross, this.brush].filter(Boolean).forEach((one) => one.setAttribute("visibility", "hidden"));
    if (this.dots) this.dots.replaceChildren();
  }

  /** Show the values of all lines near a pixel. */
  point(pixel) {
    const wanted = this.x.invert(pixel), shown = this.lines.filter((line) => !line.faint && line.x.length);
    if (!shown.length) return;
    const places = shown.map((line) => nearest(line.x, wanted));
    const xs = shown.map((line, index) => line.x[places[index]]);
    const at = xs[nearestOf(xs, wanted)], left = this.x(at);
    this.cross.setAttribute("x1", left);
    this.cross.setAttribute("x2", left);
    this.cross.setAttribute("visibility", "visible");
    this.dots.replaceChildren();
    this.tip.replaceChildren(element("div", { className: "quiet", textContent: this.view.textOf ? this.view.textOf(at) : number(at, 6) }));
    shown.forEach((line, index) => {
      const value = line.y[places[index]];
      if (value === null || Math.abs(this.x(xs[index]) - left) > 12) return;
      const row = element("div", {}, this.tip);
      element("span", { className: `swatch ${line.className}` }, row);
      element("span", { className: "name", textContent: line.label }, row);
      element("b", { textContent: number(value, 5) + (this.view.unit || "") }, row);
      if (!this.y.isLog || value > 0) shape("circle", { class: `dot ${line.className}`, cx: this.x(xs[index]), cy: this.y(value), r: 3.5 }, this.dots);
    });
    if (shown.some((line) => line.commandOf)) element("div", { className: "quiet hint", textContent: "click: command to look at it" }, this.tip);
    this.tip.hidden = false;
    const width = this.svg.viewBox.baseVal.width, scale = this.svg.getBoundingClientRect().width / width;
    const beside = left > width / 2 ? left * scale - this.tip.offsetWidth - 12 : left * scale + 12;
    this.tip.style.left = `${Math.max(0, beside)}px`;
  }
}

function nearestOf(values, wanted) {
  let best = 0;
  values.forEach((value, index) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = index; });
  return best;
}
