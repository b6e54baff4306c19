// The list of runs, and a card for each chosen one: status, progress, time left, latest numbers, commands.

import { byId, element, keepChildren, setText } from "./dom.js";
import { bytes, count, duration, number, words } from "./format.js";
import { commandBar } from "./commands.js";

const TILES = [
  ["Loss", (status) => number(status.loss)],
  ["Eval loss", (status) => number(status.eval_loss)],
  ["Learning rate", (status) => number(status.learning_rate)],
  ["Gradient norm", (status) => number(status.grad_norm)],
  ["Throughput", throughput],
  ["Memory", memory],
];
const MANY_RUNS = 8;

/** The list of runs with their boxes; `onChoose(ids)` gets the chosen ones. */
export function showRuns(runs, elsewhere, chosen, onChoose) {
  setText(byId("runs-count"), runs.length ? `${chosen.length} of ${runs.length} shown` : "");
  byId("runs-filter").hidden = runs.length <= MANY_RUNS;
  const filter = byId("runs-filter").hidden ? "" : byId("runs-filter").value.trim().toLowerCase();
  const listed = runs.filter((run) => run.label.toLowerCase().includes(filter) || chosen.includes(run.id));
  const rows = keepChildren(byId("runs-list"), listed.map((run) => run.id), (id) => {
    const box = element("input", { type: "checkbox", onchange: () => onChoose(id, box.checked) });
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    const only = element("button", { type: "button", class: "only", onclick: () => onChoose(id, true, true) }, "only");
    const text = element("span", { class: "run-name" });
    return element("li", {}, element("label", {}, box, swatch, text, element("span", { class: "chip" })), only);
  });
  rows.forEach((row, index) => fillRow(row, listed[index], chosen));
  const names = elsewhere.map((one) => one.job_id);
  byId("runs-elsewhere").replaceChildren(...(names.length === 0 ? [] : [
    element("h3", {}, "Served elsewhere"),
    element("ul", {}, ...names.map((name) => element("li", { class: "muted" }, name))),
    element("p", { class: "muted small" }, "To see all runs on one page: ", element("code", {}, "onstep dashboard")),
  ]));
}

function fillRow(row, run, chosen) {
  row.querySelector("input").checked = chosen.includes(run.id);
  row.querySelector(".swatch").className = `swatch run-${run.colourIndex}`;
  setText(row.querySelector(".run-name"), run.label);
  row.querySelector(".run-name").title = run.id;
  row.querySelector(".only").setAttribute("aria-label", `Show only ${run.label}`);
  fillChip(row.querySelector(".chip"), run.state);
}

function fillChip(chip, state) {
  setText(chip, words(state || "unknown"));
  chip.className = `chip is-${String(state || "unknown").replace(/[^a-z]/g, "")}`;
}

/** A card for each shown run. */
export function showCards(runs) {
  const cards = keepChildren(byId("cards"), runs.map((run) => run.id), (id) => made(runs.find((run) => run.id === id)));
  byId("cards").classList.toggle("several", runs.length > 1);
  cards.forEach((card, index) => fill(card, runs[index]));
}

function made(run) {
  const tiles = TILES.map(([name]) => element("div", {}, element("dt", {}, name), element("dd", {}, "–")));
  return element("article", { class: "card panel" },
    element("header", {},
      element("span", { class: `swatch run-${run.colourIndex}`, "aria-hidden": "true" }),
      element("h2", { class: "name" }, run.label),
      element("span", { class: "chip" }),
      element("span", { class: "muted small where" })),
    element("div", { class: "progress-line" },
      element("progress", { max: 1, "aria-label": `Progress of ${run.label}` }),
      element("p", { class: "progress-words" })),
    element("p", { class: "note", role: "status" }),
    element("dl", { class: "tiles" }, ...tiles),
    element("ul", { class: "ranks", "aria-label": "Memory per rank" }),
    element("div", { class: "commands", role: "group", "aria-label": `Commands of ${run.label}` }));
}

function fill(card, { job, label, state }) {
  const status = job.status;
  setText(card.querySelector(".name"), label);
  fillChip(card.querySelector(".chip"), state);
  card.classList.toggle("is-over", job.isEnded);
  setText(card.querySelector(".where"), where(status));
  card.querySelector(".where").title = status.output_dir ?? "";
  fillProgress(card, status);
  setText(card.querySelector(".note"), (!job.isEnded && job.error) || note(job));
  card.querySelectorAll(".tiles dd").forEach((tile, index) => setText(tile, TILES[index][1](status)));
  fillRanks(card.querySelector(".ranks"), status.memory ?? []);
  commandBar(card.querySelector(".commands"), job);
}

function where(status) {
  const ranks = status.world_size > 1 ? `${status.world_size} ranks` : "";
  const place = String(status.output_dir ?? "").split("/").slice(-2).join("/");
  return [ranks, place].filter(Boolean).join(" · ");
}

function fillProgress(card, status) {
  const bar = card.querySelector("progress");
  const hasProgress = typeof status.progress === "number";
  if (hasProgress) bar.value = status.progress;
  else bar.removeAttribute("value");
  bar.hidden = !hasProgress && status.status === "ended";
  const total = status.max_steps > 0 ? ` of ${number(status.max_steps)}` : "";
  const speed = typeof status.steps_per_second === "number" ? `${number(status.steps_per_second)} steps/s` : "";
  const isOver = status.status === "ended";
  const left = !isOver && typeof status.eta_seconds === "number" ? `${duration(status.eta_seconds)} left` : "";
  const epoch = typeof status.epoch === "number" ? `epoch ${number(Number(status.epoch.toFixed(2)))}` : "";
  const share = hasProgress ? `${Math.floor(status.progress * 100)} %` : "";
  const step = status.global_step === undefined ? "" : `Step ${number(status.global_step)}${total}`;
  setText(card.querySelector(".progress-words"), [step, share, epoch, isOver ? "" : speed, left].filter(Boolean).join(" · "));
}

function note(job) {
  const status = job.status;
  if (job.isEnded) {
    const end = [...job.events].reverse().find((one) => one.kind === "end") ?? {};
    const why = [status.reason ?? end.reason, end.error].filter(Boolean).join(": ");
    return `This run has ended${why ? `: ${why}` : ""}.${status.read_only ? "" : " It accepts no commands."}`;
  }
  if (status.read_only) return words(status.read_only);
  if (status.status === "paused") return `Paused${status.paused_by ? ` by ${status.paused_by}` : ""}. Nothing is released.`;
  const overrides = Object.entries(status.overrides ?? {});
  if (overrides.length) return `Set by hand: ${overrides.map(([key, one]) => `${key} = ${number(one)}`).join(", ")}`;
  return "";
}

function throughput(status) {
  const names = [["tok_per_sec", "tok/s"], ["tokens_per_second", "tok/s"], ["tokens_per_sec", "tok/s"],
    ["samples_per_second", "samples/s"], ["steps_per_second", "steps/s"]];
  const found = names.find(([name]) => typeof status[name] === "number");
  return found ? `${count(status[found[0]])} ${found[1]}` : "–";
}

function memory(status) {
  const values = (status.memory ?? []).map((one) => one.peak_device_bytes ?? one.rss_bytes).filter(Number.isFinite);
  return values.length ? bytes(Math.max(...values)) : "–";
}

function fillRanks(list, ranks) {
  list.hidden = ranks.length < 2;
  if (list.hidden) return;
  const values = ranks.map((one) => one.peak_device_bytes ?? one.rss_bytes ?? 0);
  const most = Math.max(...values, 1);
  const rows = keepChildren(list, ranks.map((one) => String(one.rank)), (rank) =>
    element("li", {}, element("span", {}, `rank ${rank}`), element("meter", { min: 0, "aria-hidden": "true" }), element("b", {})));
  rows.forEach((row, index) => {
    row.querySelector("meter").max = most;
    row.querySelector("meter").value = values[index];
    setText(row.querySelector("b"), bytes(values[index]));
  });
}
