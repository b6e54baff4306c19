// Requests to the server. `bus` tells the page about "unauthorized", "offline" and "online".

export const bus = new EventTarget();

const REQUEST_MS = 20_000;
let isOnline = true;

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error ?? body?.detail ?? `The server answered ${status}.`);
    this.status = status;
    this.body = body;
  }
}

/** The path of a route of a job. */
export function jobPath(jobId, route) {
  return `/jobs/${encodeURIComponent(jobId)}/${route}`;
}

/** The JSON of an answer; undefined if it has no body. Raises ApiError, or a TypeError while there is no connection. */
export async function request(path, { method = "GET", body, waitMs = 0 } = {}) {
  const options = { method, signal: AbortSignal.timeout(REQUEST_MS + waitMs), credentials: "same-origin" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    tell("offline");
    throw error;
  }
  tell("online");
  const content = await parsed(answer);
  if (answer.status === 401 && path !== "/login") bus.dispatchEvent(new Event("unauthorized"));
  if (!answer.ok) throw new ApiError(answer.status, content);
  return content;
}

async function parsed(answer) {
  const text = await answer.text();
  try {
    return text ? JSON.parse(text) : undefined;
  } catch {
    return { error: `The server answered ${answer.status} without JSON.` };
  }
}

function tell(kind) {
  if (isOnline === (kind === "online")) return;
  isOnline = kind === "online";
  bus.dispatchEvent(new Event(kind));
}
