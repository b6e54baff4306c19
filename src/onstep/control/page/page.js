// The page: login, list of runs, and what is shown of the chosen ones.

import { ApiError, bus, request } from "./api.js";
import { showActivity } from "./activity.js";
import { showCards, showRuns } from "./cards.js";
import { Charts, setUpToolbar } from "./charts.js";
import { showSettings } from "./commands.js";
import { byId, setText } from "./dom.js";
import { Job } from "./job.js";
import { CHARTS, otherCharts } from "./metrics.js";
import { colourOf, preferences, remember } from "./preferences.js";

const JOBS_MS = 5000;
const MOST_OTHER_CHARTS = 60;

const jobs = new Map(); // id -> Job, in the order of the list
const zoom = { range: null };
let listed = [];
let elsewhere = [];
let chosen = [];
let isLoggedIn = false;
let isOffline = false;

const shownRuns = () => chosen.filter((id) => jobs.has(id)).map((id) => described(id));
const charts = new Charts(byId("charts"), shownRuns, zoom, setZoom);
const otherGrid = new Charts(byId("more-charts"), shownRuns, zoom, setZoom);

function described(id) {
  const job = jobs.get(id);
  const info = listed.find((one) => one.job_id === id) ?? {};
  job.label = job.status.run || info.run || info.name || id;
  const listedState = info.status ?? (info.alive === false ? "ended" : "running");
  const isKnown = job.status.status !== undefined && !job.isEnded && !job.isLoading;
  const state = isKnown ? job.status.status : job.isEnded && listedState === "running" ? "ended" : listedState;
  return { id, job, label: job.label, state, colourIndex: colourOf(id, [...jobs.keys()]) };
}

// --- the list of runs

async function readJobs() {
  const { jobs: all } = await request("/jobs");
  listed = all.filter((one) => one.is_served);
  elsewhere = all.filter((one) => !one.is_served && one.alive);
  for (const { job_id: id } of listed) if (!jobs.has(id)) add(id);
  const ids = new Set(listed.map((one) => one.job_id));
  for (const [id, job] of jobs) {
    if (ids.has(id)) continue;
    job.hide();
    jobs.delete(id);
  }
  chooseFirst();
  show();
}

function add(id) {
  const job = new Job(id);
  job.addEventListener("change", ({ detail }) => changed(detail));
  jobs.set(id, job);
}

/** At first: the runs that were shown last time, else the newest that is running. */
function chooseFirst() {
  const remaining = chosen.filter((id) => jobs.has(id));
  if (remaining.length > 0 || jobs.size === 0) return setChosen(remaining, false);
  const before = preferences.selected.filter((id) => jobs.has(id));
  const running = listed.find((one) => one.alive !== false && one.status !== "ended");
  return setChosen(before.length > 0 ? before : [(running ?? listed[0]).job_id], false);
}

function choose(id, isChosen, isOnly = false) {
  const others = isOnly ? [] : chosen.filter((one) => one !== id);
  setChosen([...jobs.keys()].filter((one) => others.includes(one) || (isChosen && one === id)));
  setZoom(null);
}

function setChosen(ids, isRemembered = true) {
  chosen = ids;
  if (isRemembered) remember({ selected: ids });
  for (const [id, job] of jobs) if (ids.includes(id)) job.show(); else job.hide();
  show();
}

// --- drawing

const waiting = new Set();

/** Draws soon, once for all changes of a moment. */
function changed(what) {
  if (waiting.size === 0) setTimeout(drawWaiting, 60);
  waiting.add(what);
}

function drawWaiting() {
  const what = new Set(waiting);
  waiting.clear();
  const runs = shownRuns();
  if (what.has("status")) {
    showBanner();
    showList();
    showCards(runs);
    showSettings(byId("settings"), runs);
  }
  if (what.has("events")) showActivity(runs);
  if (what.has("series") || what.has("status")) drawCharts(what.has("series"));
}

function showList() {
  const runs = [...jobs.keys()].map((id) => described(id));
  showRuns(runs, elsewhere, chosen, choose);
  byId("frame").classList.toggle("is-single", runs.length === 1 && elsewhere.length === 0);
  const only = shownRuns();
  document.title = only.length === 1 ? `${only[0].label} – Onstep` : "Onstep";
}

function show() {
  if (!isLoggedIn) return;
  const runs = shownRuns();
  showList();
  showCards(runs);
  showSettings(byId("settings"), runs);
  showActivity(runs);
  byId("nothing").hidden = runs.length > 0;
  setText(byId("nothing"), jobs.size === 0 ? "There is no run yet. New ones appear here by themselves."
    : "No run is selected. Choose one or more in the list of runs.");
  byId("curves").hidden = byId("panels").hidden = runs.length === 0;
  drawCharts(true);
}

function drawCharts(isNew, isUrgent = false) {
  if (byId("curves").hidden) return;
  charts.setCharts(CHARTS);
  charts.draw(isUrgent);
  const all = [...new Set(shownRuns().flatMap(({ job }) => job.names))];
  const others = otherCharts(all).slice(0, MOST_OTHER_CHARTS);
  byId("more").hidden = others.length === 0;
  setText(byId("more-count"), `(${others.length})`);
  if (!byId("more").open) return;
  otherGrid.setCharts(others);
  otherGrid.draw(isUrgent);
  if (isNew) for (const { job } of shownRuns()) job.want(others.flatMap((chart) => chart.names(job.names)));
}

function setZoom(range) {
  const isSame = JSON.stringify(range) === JSON.stringify(zoom.range);
  zoom.range = range;
  byId("reset-zoom").disabled = range === null;
  drawCharts(false, true);
  if (isSame) return;
  const steps = range && preferences.axis === "step" ? range : null;
  for (const { job } of shownRuns()) job.attempt(() => job.readSeries(steps));
}

// --- login and connection

function showLogin() {
  isLoggedIn = false;
  for (const job of jobs.values()) job.hide();
  if (!byId("login").hidden) return;
  byId("login").hidden = false;
  byId("logout").hidden = true;
  setConnection("", "Not logged in");
  if (window.location.pathname !== "/") {
    setText(byId("login-error"), "This link has expired or has been used; ask for another one.");
    window.history.replaceState(null, "", "/");
  }
  byId("frame").hidden = true;
  byId("token").focus();
}

async function logIn(event) {
  event.preventDefault();
  setText(byId("login-error"), "");
  try {
    await request("/login", { method: "POST", body: { token: byId("token").value.trim() } });
  } catch (error) {
    const isWrong = error instanceof ApiError && error.status === 401;
    setText(byId("login-error"), isWrong ? "This is not the token of this server." : error.message);
    byId("token").select();
    return;
  }
  byId("token").value = "";
  await start();
}

async function start() {
  clearTimeout(start.timer);
  try {
    isLoggedIn = true;
    await readJobs();
    byId("login").hidden = true;
    byId("frame").hidden = byId("logout").hidden = false;
    setConnection("online", "Live");
    setChosen(chosen, false);
  } catch (error) {
    if (error instanceof ApiError && error.status !== 401) setConnection("offline", error.message);
  }
  if (isLoggedIn) start.timer = setTimeout(start, JOBS_MS);
}

function setConnection(state, text) {
  byId("connection").className = `connection is-${state}`;
  setText(byId("connection").querySelector(".words"), text);
  isOffline = state === "offline";
  showBanner();
}

function showBanner() {
  byId("banner").hidden = !isOffline;
  const isOver = shownRuns().length > 0 && shownRuns().every(({ job }) => job.isEnded);
  setText(byId("banner"), !isOffline ? "" : isOver ? "The run has ended, and its server with it. What is shown is how it ended."
    : "The connection to the server is lost. Trying again by itself; what is shown may be old.");
}

function setTheme(theme) {
  remember({ theme });
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  drawCharts(false, true);
}

bus.addEventListener("unauthorized", showLogin);
bus.addEventListener("offline", () => setConnection("offline", "Reconnecting"));
bus.addEventListener("online", () => setConnection("online", "Live"));
byId("login-form").addEventListener("submit", logIn);
byId("logout").addEventListener("click", async () => {
  await request("/logout", { method: "POST", body: {} }).catch(() => undefined);
  showLogin();
});
byId("theme").value = preferences.theme;
byId("theme").addEventListener("change", (event) => setTheme(event.target.value));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(false, true));
byId("events-kind").addEventListener("change", () => showActivity(shownRuns()));
byId("runs-filter").addEventListener("input", showList);
byId("more").addEventListener("toggle", () => drawCharts(true));
document.addEventListener("visibilitychange", () => {
  for (const { job } of shownRuns()) if (document.hidden) job.closeStream(); else job.readStatusSoon();
});
setUpToolbar(remember, () => drawCharts(false, true), () => setZoom(null));
start();
