// Numbers, durations and times as people read them.

export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return value === null || value === undefined ? "–" : String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

export function count(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(value) >= size) {
      const scale = unit === "k" ? 1e3 : size;
      return `${(value / scale).toLocaleString("en", { maximumSignificantDigits: 3 })}${unit}`;
    }
  }
  return number(value);
}

export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, value > 0 ? Math.floor(Math.log2(value) / 10) : 0);
  return `${(value / 1024 ** power).toLocaleString("en", { maximumSignificantDigits: 3 })} ${units[power]}`;
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds) || seconds < 0) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function clock(timestamp) {
  if (typeof timestamp !== "number") return "";
  const date = new Date(timestamp * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString("en-GB");
  return isToday ? time : `${date.toLocaleDateString("en", { month: "short", day: "numeric" })} ${time}`;
}

/** A value of JSON on one line. */
export function value(one) {
  if (typeof one === "number") return number(one);
  if (typeof one === "string") return one;
  return one === undefined || one === null ? "–" : JSON.stringify(one);
}

/** `save_and_stop` as `Save and stop`. */
export function words(name) {
  const text = String(name).replaceAll("_", " ").trim();
  return text.charAt(0).toUpperCase() + text.slice(1);
}
