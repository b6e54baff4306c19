// A run as this page knows it: status, curves, events, samples and results, kept current while it is shown.

import { jobPath, request } from "./api.js";
import { firstNames } from "./metrics.js";

const POINTS = 1500;
const MOST_POINTS = 10_000;
const STATUS_MS = 2000;
const MOST_STREAMS = 3; // a browser opens six connections to a server, for all of its tabs
const MOST_FAILURES = 3;
const MOST_EVENTS = 1000;
const MOST_SAMPLES = 200;
const WITHOUT_RESULT = new Set(["status", "set", "evaluate", "save_checkpoint", "save_and_stop", "rollback"]); // events tell
const OWN_KEYS = new Set(["step", "global_step", "epoch", "timestamp"]);
const LISTED = "decision,evaluation,save,sample,command,status,end";

let streams = 0;

export class Job extends EventTarget {
  constructor(id) {
    super();
    this.id = id;
    this.isShown = false;
    this.error = "";
    this.failures = 0;
    this.clear();
  }

  clear() {
    this.status = {};
    this.names = [];
    this.series = new Map(); // name -> {step, value, time}
    this.wanted = new Set();
    this.knowsNames = false;
    this.events = [];
    this.samples = [];
    this.results = [];
    this.lastEventId = 0;
    this.lastPoint = { step: -1, time: 0 };
  }

  /** Whether a dashboard still reads the run's files. */
  get isLoading() {
    return this.status.status === "loading";
  }

  get isEnded() {
    return this.status.status === "ended";
  }

  /** Loads the run and follows it until `hide`. */
  show() {
    if (this.isShown) return;
    this.isShown = true;
    this.run = this.follow();
  }

  hide() {
    this.isShown = false;
    this.closeStream();
    clearTimeout(this.timer);
  }

  async follow() {
    await this.attempt(async () => {
      await this.readStatus();
      if (this.isLoading) return;
      await this.readBacklog();
      await this.readSeries();
    });
    this.tick();
  }

  /** Once every two seconds: the status, and the events while there is no stream. */
  async tick() {
    if (!this.isShown) return;
    const succeeded = document.hidden || (await this.attempt(() => this.poll()));
    this.failures = succeeded ? 0 : this.failures + 1;
    if (this.failures >= MOST_FAILURES) this.closeStream(); // not at once: the end of the run may be on its way
    clearTimeout(this.timer);
    if (this.isShown) this.timer = setTimeout(() => this.tick(), this.isLoading ? STATUS_MS / 5 : STATUS_MS);
  }

  async poll() {
    const before = this.status;
    await this.readStatus();
    if (this.isLoading) return;
    const isResumed = before.status === "ended" && !this.isEnded;
    const isOther = before.started_at && this.status.started_at !== before.started_at;
    if (before.status === "loading" || isResumed || isOther) {
      this.clear();
      await this.readStatus();
      await this.readBacklog();
    }
    if (!this.knowsNames) await this.readSeries();
    if (!this.stream && !this.isEnded) this.openStream();
    if (!this.stream?.isOpen) await this.readEvents();
  }

  async attempt(work) {
    try {
      await work();
      this.error = "";
      return true;
    } catch (error) {
      this.error = error.status === 404 ? "This run is no longer listed." : error.message;
      this.changed("status");
      return false;
    }
  }

  changed(what) {
    this.dispatchEvent(new CustomEvent("change", { detail: what }));
  }

  async readStatus() {
    this.status = await request(jobPath(this.id, "status"));
    for (const { rank, rss_bytes: rss } of this.status.memory ?? []) this.takeMemory(`rss_bytes[${rank}]`, rss);
    this.changed("status");
  }

  /** Memory is in the status, and not in the records. */
  takeMemory(name, bytes) {
    if (!Number.isFinite(bytes) || !Number.isFinite(this.status.global_step)) return;
    this.addNames([name]);
    this.wanted.add(name);
    push(this.series, name, { step: this.status.global_step, time: this.status.timestamp }, bytes, true);
  }

  addNames(names) {
    for (const name of names) if (!this.names.includes(name)) this.names.push(name);
  }

  /** The events that were there before this page, without the metrics, which come as series. */
  async readBacklog() {
    while (this.isShown) {
      const path = `events?stream=0&after=${this.lastEventId}&kinds=${LISTED}`;
      const { events } = await request(jobPath(this.id, path));
      for (const event of events) this.take(event.kind, event.id, { timestamp: event.timestamp, ...event.data }, true);
      if (events.length === 0) break;
    }
    this.changed("events");
  }

  async readEvents() {
    const { events } = await request(jobPath(this.id, `events?stream=0&after=${this.lastEventId}`));
    for (const event of events) this.take(event.kind, event.id, { timestamp: event.timestamp, ...event.data });
  }

  /** Curves, decimated by the server; with `range` (steps), finer where one looks. */
  async readSeries(range = null) {
    if (!this.knowsNames) {
      const { names: all } = await request(jobPath(this.id, "metrics?points=10&names=loss"));
      this.knowsNames = all.length > 0;
      this.addNames(all);
      firstNames(this.names).forEach((name) => this.wanted.add(name));
    }
    const names = [...this.wanted];
    if (names.length === 0) return;
    const last = Math.max(this.lastPoint.step, this.status.global_step ?? 0, 1);
    const share = range ? Math.max(1e-6, (range[1] - range[0]) / Math.max(1, last - range[0])) : 1;
    const points = Math.round(Math.min(MOST_POINTS, POINTS / Math.min(1, share)));
    const since = range ? `&since_step=${Math.max(0, Math.floor(range[0]) - 1)}` : "";
    const query = `metrics?points=${points}${since}&names=${names.map(encodeURIComponent).join(",")}`;
    const answer = await request(jobPath(this.id, query));
    this.addNames(answer.names);
    for (const [name, series] of Object.entries(answer.series)) this.replace(name, series, range);
    this.changed("series");
  }

  replace(name, series, range) {
    const old = this.series.get(name);
    const made = range && old ? before(old, series.step[0] ?? Infinity) : { step: [], value: [], time: [] };
    for (const key of ["step", "value", "time"]) made[key] = made[key].concat(series[key]);
    made.loaded = made.step.length;
    this.series.set(name, made);
    const end = made.step.length - 1;
    if (end >= 0 && made.step[end] > this.lastPoint.step) {
      this.lastPoint = { step: made.step[end], time: made.time[end] };
    }
  }

  /** Loads curves that are not loaded yet. */
  async want(names) {
    const fresh = names.filter((name) => !this.wanted.has(name));
    if (fresh.length === 0) return;
    fresh.forEach((name) => this.wanted.add(name));
    await this.attempt(() => this.readSeries());
  }

  openStream() {
    if (streams >= MOST_STREAMS || document.hidden) return;
    const source = new EventSource(jobPath(this.id, `events?stream=1&after=${this.lastEventId}`));
    streams += 1;
    this.stream = { source, isOpen: false };
    source.onopen = () => { if (this.stream) this.stream.isOpen = true; };
    source.onerror = () => this.closeStream(); // the next tick polls, and opens another
    for (const kind of ["metrics", ...LISTED.split(",")]) {
      source.addEventListener(kind, (event) => {
        if (typeof event.data === "string") this.take(kind, Number(event.lastEventId), JSON.parse(event.data));
      });
    }
  }

  closeStream() {
    if (!this.stream) return;
    this.stream.source.close();
    this.stream = null;
    streams -= 1;
  }

  /** Takes one event, from a stream, a poll or the backlog. */
  take(kind, id, data, isOld = false) {
    if (Number.isFinite(id) && id > 0) {
      if (id <= this.lastEventId) return;
      this.lastEventId = id;
    }
    if (kind === "metrics" || kind === "evaluation") this.takeRecord(data, isOld);
    if (kind !== "metrics") this.takeListed(kind, id, data);
    if (kind === "end") this.end(data);
    if (data.flag === "rolled_back" && !isOld) this.goBack(data.step);
    if (!isOld && ["status", "end", "save", "command", "decision"].includes(kind)) this.readStatusSoon();
  }

  takeListed(kind, id, data) {
    const item = { kind, id, job: this, ...data };
    if (kind === "sample") keep(this.samples, item, MOST_SAMPLES);
    else if (data.flag !== "command") keep(this.events, item, MOST_EVENTS);
    if (kind === "command" && hasResult(data)) keep(this.results, item, MOST_SAMPLES);
    this.changed("events");
  }

  readStatusSoon() {
    clearTimeout(this.timer);
    if (this.isShown) this.timer = setTimeout(() => this.tick(), 150);
  }

  takeRecord(record, isOld) {
    const point = { step: record.global_step ?? record.step, time: record.timestamp };
    if (isOld || !Number.isFinite(point.step)) return;
    if (point.step < this.lastPoint.step && point.time > this.lastPoint.time) {
      this.readSeriesSoon(); // the run went back to a checkpoint
      this.lastPoint = point;
      return;
    }
    if (point.step >= this.lastPoint.step) this.lastPoint = point;
    const values = [...flat(record)];
    this.addNames(values.map(([name]) => name));
    for (const [name, value] of values) {
      if (!this.wanted.has(name) && firstNames(this.names).includes(name)) this.wanted.add(name);
      if (this.wanted.has(name)) push(this.series, name, point, value);
    }
    if (this.hasGrown()) this.readSeriesSoon();
    this.changed("series");
  }

  /** The server of a job ends with it, so that the status cannot be asked for. */
  end({ reason }) {
    this.closeStream();
    this.status = { ...this.status, status: "ended", reason: this.status.reason ?? reason };
    this.changed("status");
  }

  goBack(step) {
    this.lastPoint = { step, time: this.lastPoint.time };
    this.readSeriesSoon();
  }

  hasGrown() {
    return [...this.series.values()].some((one) => one.step.length > Math.max(one.loaded ?? 0, POINTS) * 1.5);
  }

  readSeriesSoon() {
    clearTimeout(this.seriesTimer);
    this.seriesTimer = setTimeout(() => this.attempt(() => this.readSeries()), 300);
  }
}

function hasResult(data) {
  return data.result !== null && data.result !== undefined && !WITHOUT_RESULT.has(data.command);
}

function keep(list, item, most) {
  list.push(item);
  if (list.length > most) list.splice(0, list.length - most);
}

function before(series, step) {
  const end = series.step.findIndex((one) => one >= step);
  const stop = end < 0 ? series.step.length : end;
  return { step: series.step.slice(0, stop), value: series.value.slice(0, stop), time: series.time.slice(0, stop) };
}

/** Adds a point after the last one; one that is there already is left out, or replaced by a newer value. */
function push(all, name, { step, time }, value, isReplaced = false) {
  const series = all.get(name) ?? { step: [], value: [], time: [] };
  all.set(name, series);
  const end = series.step.length - 1;
  if (end >= 0 && step <= series.step[end]) {
    if (isReplaced && step === series.step[end]) [series.value[end], series.time[end]] = [value, time];
    return;
  }
  series.step.push(step);
  series.value.push(Number.isFinite(value) ? value : null);
  series.time.push(time);
}

/** The numbers of a record by name; a list has one value for each rank. */
function* flat(record) {
  for (const [name, value] of Object.entries(record)) {
    if (OWN_KEYS.has(name)) continue;
    if (typeof value === "number") yield [name, value];
    if (!Array.isArray(value)) continue;
    for (const [rank, one] of value.entries()) if (typeof one === "number") yield [`${name}[${rank}]`, one];
  }
}
