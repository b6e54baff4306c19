// What the browser remembers of the page: theme, chart options, chosen runs and their colours.

const KEY = "onstep";
const NUM_COLOURS = 8;
const MOST_COLOURED = 200;

const defaults = { theme: "auto", axis: "step", smoothing: 0, logY: false, selected: [], colours: {} };

export const preferences = { ...defaults, ...stored() };

function stored() {
  try {
    const content = JSON.parse(window.localStorage.getItem(KEY) ?? "{}");
    return content !== null && typeof content === "object" ? content : {};
  } catch {
    return {}; // storage is off, or holds something else
  }
}

export function remember(changes) {
  Object.assign(preferences, changes);
  try {
    window.localStorage.setItem(KEY, JSON.stringify(preferences));
  } catch {
    return; // storage is off or full: the page works without
  }
}

/** The index of a run's colour: the same at every visit, and distinct among the listed runs while there are enough. */
export function colourOf(jobId, listedIds) {
  const known = preferences.colours;
  if (!Object.hasOwn(known, jobId)) {
    const used = listedIds.filter((id) => Object.hasOwn(known, id)).map((id) => known[id]);
    const uses = Array.from({ length: NUM_COLOURS }, (_, index) => used.filter((one) => one === index).length);
    const kept = Object.entries(known).slice(-MOST_COLOURED);
    remember({ colours: { ...Object.fromEntries(kept), [jobId]: uses.indexOf(Math.min(...uses)) } });
  }
  return preferences.colours[jobId];
}
