// The buttons of a run's commands, their forms and confirmations, what became of each, and the settings.

import { ApiError, jobPath, request } from "./api.js";
import { byId, element, keepChildren, setText } from "./dom.js";
import { number, words } from "./format.js";

const WAIT_SECONDS = 10;
const TOAST_MS = 9000;
const LABELS = new Map();

/** A command's name on its button; a run that has not described it yet has its plain name. */
export const labelOf = (command) => LABELS.get(command) ?? words(command);

/** Fills a card's row of buttons from `status.commands`. */
export function commandBar(node, job) {
  const known = new Map((job.status.commands ?? []).map((command) => [command.name, command]));
  known.forEach((command, name) => LABELS.set(name, command.label ?? words(name)));
  const hidden = job.status.status === "paused" ? "pause" : "resume";
  const shown = [...known.keys()].filter((name) => name !== hidden);
  keepChildren(node, shown.length ? ["work", "end"] : [], () => element("div")).forEach((group, index) => {
    const members = shown.filter((name) => (known.get(name).warning !== "") === (index === 1));
    for (const one of keepChildren(group, members, (name) => button(job, name))) {
      one.disabled = job.isEnded;
      one.title = known.get(one.dataset.command).help;
    }
  });
}

function button(job, name) {
  const command = () => job.status.commands.find((one) => one.name === name);
  const look = name === "save_checkpoint" || name === "resume" ? "primary" : command().warning ? "danger" : "";
  const asks = () => command().warning !== "" || command().parameters.length > 0;
  const onclick = () => (asks() ? ask(job, command()) : send(job, name, {}));
  const dots = command().parameters.length > 0 ? "…" : "";
  return element("button", { type: "button", class: look, "data-command": name, onclick }, labelOf(name) + dots);
}

/** Opens the dialog with a command's parameters and, where something can be lost, a warning. */
export function ask(job, command) {
  const dialog = byId("dialog");
  setText(byId("dialog-title"), `${labelOf(command.name)}: ${job.label}`);
  setText(byId("dialog-help"), `${command.help}.`);
  setText(byId("dialog-warning"), command.warning);
  byId("dialog-warning").hidden = command.warning === "";
  setText(byId("dialog-error"), "");
  const fields = command.parameters.map((parameter) => field(job, command, parameter));
  byId("dialog-fields").replaceChildren(...fields.map((one) => one.node));
  const sendButton = byId("dialog-send");
  setText(sendButton, labelOf(command.name));
  sendButton.className = command.warning ? "danger-filled" : "primary";
  byId("dialog-cancel").onclick = () => dialog.close();
  byId("dialog-form").onsubmit = (event) => {
    event.preventDefault();
    const data = {};
    for (const one of fields) {
      const found = one.read();
      if (found !== undefined) data[one.name] = found;
    }
    dialog.close();
    send(job, command.name, data);
  };
  dialog.showModal();
}

/** The input of a parameter: {name, node, read()}; `read` gives undefined for "use the default". */
function field(job, command, parameter) {
  const id = `field-${parameter.name}`;
  const made = inputFor(job, command, parameter, id);
  if (command.name === "set" && parameter.name === "key") showCurrent(job, made.input);
  const hint = element("small", { class: "muted", id: `${id}-hint` }, parameter.help);
  made.input.setAttribute("aria-describedby", hint.id);
  if (parameter.required && !(command.name === "set" && parameter.name === "value")) made.input.required = true;
  const node = element("div", { class: "field" }, element("label", { for: id }, words(parameter.name)), made.input, hint);
  return { name: parameter.name, node, read: made.read };
}

function inputFor(job, command, parameter, id) {
  if (command.name === "set" && parameter.name === "key") {
    const keys = Object.keys(job.status.settable ?? {});
    const input = element("select", { id }, ...keys.map((key) => element("option", { value: key }, key)));
    return { input, read: () => input.value };
  }
  if (command.name === "rollback" && parameter.name === "step") return checkpointChoice(job, id);
  if (parameter.kind === "list of strings") {
    const input = element("textarea", { id, rows: 4, placeholder: "One per line" });
    return { input, read: () => input.value.split("\n").filter((line) => line !== "") };
  }
  if (parameter.kind === "string") {
    const input = element("input", { id, type: "text", value: parameter.default ?? "" });
    return { input, read: () => (input.value === "" && !parameter.required ? undefined : input.value) };
  }
  const input = element("input", {
    id, type: "number", step: parameter.kind === "integer" ? 1 : "any", min: parameter.minimum, max: parameter.maximum,
    value: parameter.default, placeholder: command.name === "set" ? "Empty: the configured value" : null,
  });
  const nothing = () => (parameter.required ? null : undefined);
  return { input, read: () => (input.value === "" ? nothing() : Number(input.value)) };
}

/** Shows the value of the chosen key where a new one is typed. */
function showCurrent(job, select) {
  const show = () => {
    const { value, configured } = job.status.settable?.[select.value] ?? {};
    byId("field-value")?.setAttribute("placeholder", `Now ${number(value)}; empty: ${number(configured)}, as configured`);
  };
  select.addEventListener("change", show);
  setTimeout(show);
}

function checkpointChoice(job, id) {
  const steps = [...(job.status.checkpoints ?? [])].sort((a, b) => b - a);
  const input = element("select", { id }, element("option", { value: "" }, "The newest before this step"),
    ...steps.map((step) => element("option", { value: step }, `Step ${number(step)}`)));
  return { input, read: () => (input.value === "" ? undefined : Number(input.value)) };
}

/** Sends a command and shows what becomes of it: queued, then applied at a step, or refused and why. */
export async function send(job, name, data) {
  const toast = toastFor(job, name);
  try {
    const answer = await request(jobPath(job.id, "control"), { method: "POST", body: { command: name, data } });
    toast.show("queued", "queued");
    await outcome(job, answer.id, toast);
  } catch (error) {
    toast.show("refused", error instanceof ApiError ? `refused: ${error.message}` : `not sent: ${error.message}`);
  }
  job.readStatusSoon();
}

async function outcome(job, ticketId, toast) {
  for (;;) {
    let ticket;
    try {
      ticket = await request(jobPath(job.id, `commands/${ticketId}?wait=${WAIT_SECONDS}`), { waitMs: WAIT_SECONDS * 1000 });
    } catch (error) {
      if (error instanceof ApiError) throw error;
      await new Promise((resolve) => setTimeout(resolve, 2000)); // no connection: ask again
      continue;
    }
    if (ticket.status === "queued") continue;
    const remark = ticket.message ? `: ${ticket.message}` : "";
    if (ticket.status === "applied") toast.show("applied", `applied${at(ticket)}${remark}`);
    else toast.show("refused", `refused${remark}`);
    return;
  }
}

const at = (ticket) => (ticket.step === null || ticket.step === undefined ? "" : ` at step ${number(ticket.step)}`);

function toastFor(job, name) {
  const text = element("span", {}, `${labelOf(name)}: sending`);
  const close = element("button", { type: "button", class: "close", "aria-label": "Dismiss", onclick: () => node.remove() }, "×");
  const node = element("div", { class: "toast is-queued", "data-command": name }, text, close);
  byId("toasts").append(node);
  return {
    show(state, words_) {
      node.className = `toast is-${state}`;
      const of = document.querySelectorAll(".card").length > 1 ? ` (${job.label})` : "";
      setText(text, `${labelOf(name)}${of}: ${words_}`);
      if (state !== "queued") setTimeout(() => node.remove(), state === "applied" ? TOAST_MS : 2 * TOAST_MS);
    },
  };
}

/** A table of each run's settable keys with their current and configured values, to be changed. */
export function showSettings(node, runs) {
  const tables = keepChildren(node, runs.map((run) => run.id), (id) => {
    const caption = element("caption", {});
    const heads = ["Key", "Value", "Configured"].map((one) => element("th", { scope: "col" }, one));
    const table = element("table", {}, caption, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}));
    return element("div", { class: "scroll" }, table, element("p", { class: "muted small none" }));
  });
  tables.forEach((table, index) => fillSettings(table, runs[index], runs.length > 1));
}

function fillSettings(node, { job, label }, isNamed) {
  const settable = job.status.settable ?? {};
  const keys = Object.keys(settable);
  setText(node.querySelector("caption"), isNamed ? label : "");
  node.querySelector("table").hidden = keys.length === 0;
  setText(node.querySelector(".none"), keys.length === 0 ? "This run has no settings that can be changed." : "");
  const rows = keepChildren(node.querySelector("tbody"), keys, (key) => settingRow(job, key));
  rows.forEach((row, index) => fillSetting(row, settable[keys[index]], job.isEnded));
}

function settingRow(job, key) {
  const input = element("input", { type: "number", step: "any", "aria-label": key });
  const apply = (value) => { input.dataset.edited = ""; send(job, "set", { key, value }); };
  const form = element("form", {
    onsubmit: (event) => {
      event.preventDefault();
      apply(input.value === "" ? null : Number(input.value));
    },
  }, input, element("button", { type: "submit" }, "Set"),
  element("button", { type: "button", class: "restore", onclick: () => apply(null) }, "Restore"));
  input.addEventListener("input", () => { input.dataset.edited = "yes"; });
  return element("tr", {}, element("th", { scope: "row" }, key, element("small", { class: "muted" })),
    element("td", {}, form), element("td", { class: "configured" }));
}

function fillSetting(row, setting, isEnded) {
  const input = row.querySelector("input");
  const isChanged = setting.value !== setting.configured;
  if (document.activeElement !== input && input.dataset.edited !== "yes") input.value = setting.value ?? "";
  if (setting.minimum !== null && setting.minimum !== undefined) input.min = setting.minimum;
  if (setting.maximum !== null && setting.maximum !== undefined) input.max = setting.maximum;
  setText(row.querySelector("small"), setting.help ?? "");
  setText(row.querySelector(".configured"), number(setting.configured));
  row.classList.toggle("is-changed", isChanged);
  row.querySelectorAll("input, button").forEach((one) => { one.disabled = isEnded; });
  row.querySelector(".restore").hidden = !isChanged;
}
