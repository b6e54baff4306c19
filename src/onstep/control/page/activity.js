// What happened: events with decisions, text samples, and the results of commands.

import { byId, element, keepChildren, setText } from "./dom.js";
import { clock, number, value, words } from "./format.js";
import { labelOf } from "./commands.js";

const MOST_SHOWN = 200;
const OWN_DETAILS = new Set(["key", "old", "new", "value", "command_id", "path"]);

/** Fills the lists of events, samples and results of the shown runs, newest first. */
export function showActivity(runs) {
  const isNamed = runs.length > 1;
  const kind = byId("events-kind").value;
  const nameOf = new Map(runs.map((run) => [run.job, isNamed ? run.label : ""]));
  const collect = (of) => runs.flatMap((run) => of(run.job)).sort((a, b) => b.timestamp - a.timestamp).slice(0, MOST_SHOWN);
  const events = collect((job) => job.events.filter((one) => kind === "" || one.kind === kind));
  fill(byId("events"), events, (item) => eventRow(item, nameOf.get(item.job)), "Nothing has happened yet.");
  fill(byId("samples"), collect((job) => job.samples), (item) => sampleRow(item, nameOf.get(item.job)), "No text samples yet.");
  fill(byId("results"), collect((job) => job.results), (item) => resultRow(item, nameOf.get(item.job)),
    "What Stacks, Profile and Generate give appears here.");
}

function fill(list, items, make, nothing) {
  const byKey = new Map(items.map((item) => [`${item.job.id} ${item.id} ${item.kind} ${item.timestamp}`, item]));
  if (items.length === 0) {
    if (!list.querySelector(".none")) list.replaceChildren(element("li", { class: "none muted" }, nothing));
    return;
  }
  list.querySelector(".none")?.remove();
  keepChildren(list, [...byKey.keys()], (key) => make(byKey.get(key)));
}

const stepOf = (item) => item.step ?? item.global_step;

function head(item, name, kind) {
  const step = stepOf(item);
  return element("div", { class: "event-head" },
    element("span", { class: `tag is-${item.kind}` }, kind),
    name ? element("span", { class: "run-name" }, name) : null,
    step === undefined || step === null ? null : element("span", { class: "step" }, `step ${number(step)}`),
    element("time", { datetime: new Date(item.timestamp * 1000).toISOString() }, clock(item.timestamp)));
}

function eventRow(item, name) {
  const [kind, text, details] = DESCRIBED[item.kind]?.(item) ?? [words(item.kind), "", ""];
  return element("li", {}, head(item, name, kind), text ? element("p", {}, text) : null,
    details ? element("p", { class: "muted small" }, details) : null, command(item));
}

/** The command that shows the step of an anomaly, as text that one click selects. */
function command({ job, details }) {
  const { rewind } = job.status, step = details?.bad_step;
  return rewind && Number.isInteger(step) ? element("code", { class: "command" }, rewind.replace("{step}", step)) : null;
}

/** How each kind of event reads: [tag, text, details]. */
const DESCRIBED = {
  decision: (item) => [
    words(item.flag ?? item.decision ?? "decision"),
    [change(item), item.reason].filter(Boolean).join(": "),
    [item.author ? `by ${item.author}` : "", rest(item.details)].filter(Boolean).join(" · "),
  ],
  command: (item) => [
    labelOf(item.command ?? "command"),
    [words(item.status ?? ""), item.message].filter(Boolean).join(": "),
    [item.author ? `by ${item.author}` : "", rest(item.data)].filter(Boolean).join(" · "),
  ],
  save: (item) => ["Saved", item.details?.path ?? item.path ?? "", item.reason ?? ""],
  evaluation: (item) => ["Evaluation", numbers(item), ""],
  status: (item) => [words(item.status ?? "status"), item.reason ?? item.message ?? "", ""],
  end: (item) => ["End", item.reason ?? item.message ?? item.status ?? "The run has ended.", ""],
};

function change(item) {
  const { key, old, new: to, value: set } = { ...item, ...(item.details ?? {}) };
  return key === undefined || key === null ? "" : `${key} ${value(old)} → ${value(to ?? set)}`;
}

function rest(details) {
  if (details === null || typeof details !== "object") return "";
  const shown = Object.entries(details).filter(([key, one]) => one !== null && !OWN_DETAILS.has(key));
  return shown.map(([key, one]) => `${key} ${value(one)}`).join(", ");
}

function numbers(item) {
  const shown = Object.entries(item).filter(([key, one]) => /^(eval|test)_/.test(key) && typeof one === "number" && !/_(runtime|per_second)$/.test(key));
  return shown.map(([key, one]) => `${key} ${number(one)}`).join(", ");
}

function sampleRow(item, name) {
  return element("li", {}, head(item, name, "Sample"),
    element("pre", { tabindex: "0" }, element("b", {}, String(item.prompt ?? "")), String(item.text ?? "")));
}

function resultRow(item, name) {
  const result = typeof item.result === "string" ? item.result : JSON.stringify(item.result, null, 2);
  const text = element("pre", { tabindex: "0" });
  setText(text, readable(item.result) ?? result);
  return element("li", {}, head(item, name, labelOf(item.command)), text);
}

/** Lists of texts and mappings of texts (stacks by rank) as text, since JSON hides line ends. */
function readable(result) {
  if (Array.isArray(result) && result.every((one) => typeof one === "string")) return result.join("\n\n");
  if (Array.isArray(result) && result.every((one) => typeof one?.text === "string")) {
    return result.map((one) => `${one.prompt ?? ""}${one.text}`).join("\n\n");
  }
  if (result === null || typeof result !== "object" || Array.isArray(result)) return null;
  const parts = Object.entries(result).map(([key, one]) => {
    const inner = typeof one === "string" ? one : readable(one) ?? JSON.stringify(one);
    return inner.includes("\n") ? `── ${key}\n${inner}` : `${key}: ${inner}`;
  });
  return parts.join("\n");
}
