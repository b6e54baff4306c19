// Which metrics share a chart, and the arithmetic on curves.

const THROUGHPUT = [
  "tok_per_sec", "tokens_per_second", "tokens_per_sec", "train_tokens_per_second", "samples_per_second",
  "samples_per_sec", "steps_per_second", "train_samples_per_second", "train_steps_per_second",
];
const EVALUATION = /^(eval|test)_/;
const TIMES = /_(runtime|per_second)$/;
const MEMORY = ["peak_mem_allocated", "peak_mem", "rss_bytes"];

/** The charts that are always shown: id, title, unit, and which of a run's metrics they have. */
export const CHARTS = [
  { id: "loss", title: "Loss", names: (all) => ["loss", "eval_loss"].filter((name) => all.includes(name)) },
  { id: "learning_rate", title: "Learning rate", names: (all) => first(all, ["learning_rate", "lr"]) },
  { id: "grad_norm", title: "Gradient norm", names: (all) => first(all, ["grad_norm"]) },
  { id: "throughput", title: "Throughput", names: (all) => first(all, THROUGHPUT) },
  { id: "memory", title: "Memory per rank", unit: "bytes", names: memoryNames },
];

function first(all, candidates) {
  const found = candidates.find((name) => all.includes(name));
  return found ? [found] : [];
}

function memoryNames(all) {
  const groups = MEMORY.map((bare) => all.filter((name) => name.replace(/\[\d+\]$/, "") === bare));
  return groups.find((names) => names.length > 0) ?? [];
}

/** The metrics of the charts that are always shown. */
export function firstNames(all) {
  return CHARTS.flatMap((chart) => chart.names(all));
}

/** Charts of the other metrics: the values of all ranks share one. */
export function otherCharts(all) {
  const shown = new Set(firstNames(all));
  const groups = new Map();
  for (const name of all.filter((one) => !shown.has(one))) {
    const bare = name.replace(/\[\d+\]$/, "");
    groups.set(bare, [...(groups.get(bare) ?? []), name]);
  }
  return [...groups].sort(([a], [b]) => a.localeCompare(b)).map(([bare]) => ({
    id: `other ${bare}`,
    title: bare,
    names: (listed) => listed.filter((name) => name === bare || name.replace(/\[\d+\]$/, "") === bare),
  }));
}

/** Whether a metric belongs to evaluations: few points, drawn with markers and never smoothed. */
export function isEvaluation(name) {
  return EVALUATION.test(name) && !TIMES.test(name);
}

/** Whether a metric has noise to be smoothed away. */
export function isNoisy(name) {
  return !isEvaluation(name) && !/^(learning_rate|lr|epoch|(total|peak|rss)_.*)(\[\d+\])?$/.test(name);
}

/** What is said of a curve of a chart with more than one of a run: "eval", "rank 0"; "" for the main one. */
export function variant(name) {
  const rank = /\[(\d+)\]$/.exec(name);
  if (rank) return `rank ${rank[1]}`;
  const evaluation = EVALUATION.exec(name);
  return evaluation ? evaluation[1] : "";
}

/**
 * The unit in which losses of several jobs can be compared: {isCommon}, or {ratios}, the bytes per token of each job,
 * null if they are not known of all.
 */
export function lossUnit(jobs) {
  const found = jobs.map((job) => job.status.tokenizer ?? {});
  const isKnown = found.every((one) => one.fingerprint);
  const keys = new Set(found.map((one) => (isKnown ? one.fingerprint : one.configured ?? "")));
  if (keys.size < 2) return { isCommon: true, ratios: null };
  const areKnown = found.every((one) => one.bytes_per_token > 0);
  return { isCommon: false, ratios: areKnown ? new Map(jobs.map((job, index) => [job, found[index].bytes_per_token])) : null };
}

/** Whether a metric is a mean over tokens; the losses of experts, such as `z_loss`, are not. */
export function isLoss(name) {
  return name === "loss" || /^(eval|test)_.*loss$/.test(name);
}

/** Exponential moving average without the bias of its start; gaps stay gaps. */
export function smoothed(values, weight) {
  let mean = 0, sum = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}

/** Lowest and highest finite value where x is within a range; null if there is none. */
export function extent(lines, [from, to]) {
  let low = Infinity, high = -Infinity;
  for (const { x, y } of lines) {
    for (let index = 0; index < x.length; index += 1) {
      if (y[index] === null || x[index] < from || x[index] > to) continue;
      if (y[index] < low) low = y[index];
      if (y[index] > high) high = y[index];
    }
  }
  return low <= high ? [low, high] : null;
}
