"use strict";
(function () {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const AXES = {
    step: "step", epoch: "epoch", time: "time (minutes)", tokens: "tokens", flops: "floating-point operations",
  };
  const WINDOWS = [1, 3, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000];
  const MARKERS_UP_TO = 50;
  const state = { axis: DATA.axes[0] || "step", window: 1, log: false, bulk: true, hidden: new Set() };
  const charts = [];

  function escaped(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function element(tag, properties, parent) {
    const made = Object.assign(document.createElement(tag), properties || {});
    if (parent) parent.appendChild(made);
    return made;
  }

  // Sums over `width` (odd) values around each place. They run within blocks, so that a value of 1e20 spoils no other.
  function windowSums(values, width) {
    const half = (width - 1) / 2, length = Math.ceil((values.length + width) / width) * width;
    const fromStart = new Float64Array(length), toEnd = new Float64Array(length);
    values.forEach(function (value, index) { fromStart[index + half] = toEnd[index + half] = value; });
    for (let at = 1; at < length; at += 1) if (at % width !== 0) fromStart[at] += fromStart[at - 1];
    for (let at = length - 2; at >= 0; at -= 1) if (at % width !== width - 1) toEnd[at] += toEnd[at + 1];
    return values.map(function (value, index) {
      return index % width === 0 ? toEnd[index] : toEnd[index] + fromStart[index + width - 1];
    });
  }

  function movingMean(values, width, leftOut) {
    const span = 2 * Math.floor(width / 2) + 1, left = new Set(leftOut || []);
    const counted = values.map(function (value, index) { return value !== null && !left.has(index); });
    const sums = windowSums(values.map(function (value, index) { return counted[index] ? value : 0; }), span);
    const counts = windowSums(counted.map(Number), span);
    return values.map(function (value, index) {
      return value === null || counts[index] === 0 ? value : sums[index] / counts[index];
    });
  }

  function smoothed(metric, series) {
    if (metric.evaluation || metric.key.startsWith("learning_rate")) return null;
    const window = Math.min(state.window, Math.floor(series.points / 10));
    if (window <= 1) return null;
    const source = series.means || series.raw;
    const perPoint = series.means ? series.points / series.means.y.length : 1;
    const width = Math.round(window / perPoint), y = (state.bulk && source.calm) || source.y;
    return { x: source[state.axis], y: width > 1 ? movingMean(y, width, state.bulk ? source.spikes : null) : y };
  }

  function line(run, x, y, faint, few) {
    return {
      type: "scatter", x: x, y: y, name: escaped(run.label), showlegend: false, connectgaps: false,
      mode: few ? "lines+markers" : "lines", opacity: faint ? 0.28 : 1, hoverinfo: faint ? "skip" : "all",
      line: { color: run.colour, width: faint ? 1 : 2, dash: faint ? "solid" : run.dash }, marker: { size: 6 },
    };
  }

  function traces(metric) {
    const found = [];
    metric.series.forEach(function (series) {
      const run = DATA.runs[series.run], x = series.raw[state.axis];
      if (state.hidden.has(series.run) || !x) return;
      const smooth = smoothed(metric, series);
      found.push(line(run, x, series.raw.y, smooth !== null, series.points <= MARKERS_UP_TO));
      if (smooth) found.push(line(run, smooth.x, smooth.y, false, false));
    });
    return found;
  }

  function visible(metric) {
    return metric.series.filter(function (series) { return !state.hidden.has(series.run); });
  }

  // The lowest and the highest of the limits of that name ("range" or "bulk") of all series; null where there are none.
  function limits(metric, name) {
    const found = visible(metric).map(function (series) { return series[name]; }).filter(Boolean);
    if (!found.length) return null;
    return [
      Math.min.apply(null, found.map(function (one) { return one[0]; })),
      Math.max.apply(null, found.map(function (one) { return one[1]; })),
    ];
  }

  // What the y axis shows; null leaves it to the data. A constant is drawn in the middle, and not as 0.
  function yRange(metric) {
    if (state.log) return null;
    const whole = limits(metric, "range");
    if (whole && whole[0] === whole[1]) {
      const room = 0.05 * Math.abs(whole[0]) || 1;
      return [whole[0] - room, whole[1] + room];
    }
    const bulk = state.bulk ? limits(metric, "bulk") : null;
    return bulk && bulk[1] > bulk[0] ? bulk : null;
  }

  function number(value) {
    const digits = Number(value.toPrecision(4)), size = Math.abs(value);
    if (size >= 1e7 || (size > 0 && size < 1e-3)) return digits.toExponential();
    return digits.toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  function remark(metric) {
    const range = yRange(metric), whole = limits(metric, "range"), notes = [];
    const missing = visible(metric).reduce(function (sum, series) { return sum + series.missing; }, 0);
    if (missing) notes.push(missing.toLocaleString("en") + " not finite");
    if (range && whole[1] > range[1]) notes.push("up to " + number(whole[1]) + " outside");
    if (range && whole[0] < range[0]) notes.push("down to " + number(whole[0]) + " outside");
    return notes.join(", ");
  }

  function layout(metric) {
    const range = yRange(metric);
    const yaxis = { type: state.log ? "log" : "linear", gridcolor: "#e8eaed", zeroline: false, exponentformat: "SI" };
    if (metric.key.startsWith("learning_rate")) yaxis.exponentformat = "e";
    if (range) yaxis.range = range;
    return {
      margin: { l: 58, r: 12, t: 30, b: 42 }, font: { size: 12, color: "#222" }, hovermode: "x unified",
      hoverlabel: { namelength: 40 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", yaxis: yaxis,
      xaxis: { title: { text: AXES[state.axis] }, gridcolor: "#e8eaed", zeroline: false, exponentformat: "SI" },
      uirevision: state.axis + state.log + state.bulk,
    };
  }

  function drawChart(chart) {
    chart.drawn = true;
    const buttons = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"]];
    const options = { responsive: true, displaylogo: false, modeBarButtons: buttons, plotlyServerURL: "" };
    options.displayModeBar = "hover";
    chart.remark.textContent = remark(chart.metric);
    Plotly.react(chart.node, traces(chart.metric), layout(chart.metric), options);
  }

  function redraw() {
    charts.forEach(function (chart) { if (chart.drawn) drawChart(chart); });
  }

  const watcher = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      const chart = charts.find(function (one) { return one.node === entry.target; });
      if (entry.isIntersecting && chart && !chart.drawn) drawChart(chart);
    });
  }, { rootMargin: "300px" });

  function addControls() {
    const place = document.getElementById("controls");
    const axis = element("select", { id: "axis" }, element("label", { textContent: "x axis " }, place));
    DATA.axes.forEach(function (name) { element("option", { value: name, textContent: AXES[name] }, axis); });
    axis.onchange = function () { state.axis = axis.value; redraw(); };
    addSmoothing(place);
    addSwitch(place, "logarithmic", "log");
    addSwitch(place, "hide outliers", "bulk");
    if (DATA.runs.length > 1) addRuns(element("div", { className: "runs" }, place));
  }

  function addSmoothing(place) {
    let longest = 1;
    charts.forEach(function (chart) {
      chart.metric.series.forEach(function (series) { longest = Math.max(longest, series.points); });
    });
    const choices = WINDOWS.filter(function (one) { return one === 1 || one <= longest / 3; });
    const wanted = longest < 40 ? 1 : longest / 25;
    let chosen = 0;
    choices.forEach(function (one, index) { if (one <= wanted) chosen = index; });
    const label = element("label", { textContent: "smoothing " }, place);
    const range = { type: "range", id: "window", min: 0, max: choices.length - 1, value: chosen };
    const slider = element("input", range, label);
    const shown = element("span", {}, label);
    function take() {
      state.window = choices[Number(slider.value)];
      shown.textContent = state.window > 1 ? state.window.toLocaleString("en") + " records" : "off";
    }
    slider.oninput = function () { take(); redraw(); };
    take();
  }

  function addSwitch(place, text, name) {
    const label = element("label", {}, place);
    const box = element("input", { type: "checkbox", id: name, checked: state[name] }, label);
    element("span", { textContent: text }, label);
    box.onchange = function () { state[name] = box.checked; redraw(); };
  }

  function addRuns(place) {
    DATA.runs.forEach(function (run, index) {
      const label = element("label", {}, place);
      const box = element("input", { type: "checkbox", checked: true }, label);
      const swatch = element("span", { className: "swatch" }, label);
      swatch.style.borderTopColor = run.colour;
      swatch.style.borderTopStyle = { solid: "solid", dash: "dashed", dot: "dotted" }[run.dash];
      element("span", { textContent: run.label }, label);
      box.onchange = function () {
        if (box.checked) state.hidden.delete(index); else state.hidden.add(index);
        redraw();
      };
    });
  }

  function addCharts() {
    const place = document.getElementById("charts");
    DATA.groups.forEach(function (group) {
      const box = element("details", { open: true }, place);
      element("h2", { textContent: group.name }, element("summary", {}, box));
      const grid = element("div", { className: "charts" }, box);
      group.metrics.forEach(function (metric) {
        const cell = element("div", {}, grid);
        element("h3", { textContent: metric.name, title: metric.key }, cell);
        const remark = element("p", { className: "quiet remark" }, cell);
        const node = element("div", { className: "chart" }, cell);
        charts.push({ node: node, remark: remark, metric: metric, drawn: false });
      });
    });
  }

  addCharts();
  addControls();
  charts.forEach(function (chart) { watcher.observe(chart.node); });
})();
