"use strict";
const at = (id) => document.getElementById(id);
const count = (value) => {
  let unit = 0;
  for (; Math.abs(value) >= 1000 && unit < 4; unit += 1) value /= 1000;
  return `${Number(value.toPrecision(3))}${["", "K", "M", "G", "T"][unit]}`;
};
const age = (seconds) => (seconds < 120 ? `${seconds.toFixed(0)} s` : `${(seconds / 60).toFixed(0)} min`);
const items = (pairs) => Object.entries(pairs).map(([name, value]) => `${value} ${name}`).join(", ");
const row = (cells) => {
  const made = document.createElement("tr");
  for (const cell of cells) made.appendChild(document.createElement("td")).textContent = cell;
  return made;
};
// What a header can have: characters that are pasted along would make the request fail.
const printable = (token) => token.replace(/[^\x21-\x7e]/g, "");

if (location.hash.length > 1) {
  sessionStorage.setItem("token", printable(location.hash.slice(1)));
  history.replaceState(null, "", location.pathname);
}
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", printable(at("token").value));
  show();
});

function draw(history) {
  const known = history.filter((one) => one.loss !== null);
  const losses = known.map((one) => one.loss), tokens = known.map((one) => one.tokens);
  const low = Math.min(...losses), high = Math.max(...losses), most = tokens.at(-1);
  const points = known.map((one, i) =>
    `${(1000 * (one.tokens - tokens[0])) / (most - tokens[0] || 1)},${190 - (180 * (one.loss - low)) / (high - low || 1)}`);
  at("chart").innerHTML = `<line x1="0" y1="199" x2="1000" y2="199"/><polyline points="${points.join(" ")}"/>`;
  at("high").textContent = known.length ? high.toFixed(3) : "";
  at("low").textContent = known.length ? low.toFixed(3) : "";
  at("first").textContent = known.length ? `${count(tokens[0])} tokens` : "No worker has said its loss.";
  at("range").textContent = known.length ? `loss ${losses[0].toFixed(4)} to ${losses.at(-1).toFixed(4)}` : "";
  at("last").textContent = known.length ? `${count(most)} tokens` : "";
}

function render(found) {
  at("summary").textContent =
    `Run ${found.run_id}: ${found.status}, ${found.mode}, a round every ${found.sync_every} steps, ${found.codec}; ` +
    (found.save_dir ? `saved in ${found.save_dir}` : "not saved");
  const due = found.seconds_to_next_round;
  const numbers = {
    "workers": `${found.num_registered} of ${found.num_workers}`, "quorum": found.min_workers,
    "round": found.sync_round, "step": found.step, "tokens": count(found.tokens),
    "tokens per second, all": found.tokens_per_second ? count(found.tokens_per_second) : "-",
    "next round": found.num_registered < found.min_workers ? `waits for ${found.min_workers} workers`
      : due === null ? "-" : due > 0 ? `in about ${due.toFixed(0)} s` : "due",
  };
  at("numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) => {
    const made = document.createElement("span");
    made.appendChild(document.createElement("b")).textContent = value;
    made.append(name);
    return made;
  }));
  draw(found.history);
  const arrived = new Set(found.rounds[0].arrived);
  at("workers").replaceChildren(...Object.entries(found.workers).map(([name, one]) => row([
    name, one.hostname, one.step, one.steps_per_second ? one.steps_per_second.toPrecision(3) : "",
    arrived.has(name) ? "submitted" : "training", `${one.silent_seconds.toFixed(0)} s ago`])));
  at("gone").replaceChildren(...Object.entries(found.gone).map(([name, one]) => {
    const made = document.createElement("li");
    made.textContent = `${name} ${one.why} (${age(one.seconds)} ago)`;
    return made;
  }));
  const lost = items(found.lost_steps);
  at("lost").textContent = lost && `Steps that no round has: ${lost}`;
  const first = found.history[0];
  at("since").textContent = first && first.version > 1 ? `, from round ${first.version} on` : "";
  at("rounds").replaceChildren(...found.history.slice(-12).reverse().map((one) => row([
    one.version, one.contributors.join(", "), one.loss === null ? "" : one.loss.toFixed(5), count(one.own_tokens),
    one.seconds.toFixed(1)])));
}

async function show() {
  try {
    const token = sessionStorage.getItem("token");
    const answer = await fetch("/status", token ? { headers: { Authorization: `Bearer ${token}` } } : {});
    at("login").hidden = answer.status !== 401;
    const found = await answer.json();
    at("problem").textContent = answer.ok || !token ? "" : found.error.split(";")[0];
    if (answer.ok) { render(found); at("data").hidden = false; }
    else if (!token) at("summary").textContent = "This page requires a token.";
  } catch {
    at("problem").textContent = "The server does not answer; what is shown is what it said last.";
  }
}

show();
setInterval(show, 2000);
