// Talking to the server: the API key, server-sent events over fetch, and the feed of live figures.
// EventSource cannot send an Authorization header, so /events is read with fetch as well.

const KEY = "blockdraft.key";
const FIRST_DELAY_MS = 1000;
const MAX_DELAY_MS = 10000;
const SILENCE_MS = 15000; // the feed sends an event every second: after this silence, the connection is dead

export class HttpError extends Error {
  constructor(status, message, { retryAfter = null, param = null } = {}) {
    super(message);
    this.status = status; // 0: the connection was lost
    this.retryAfter = retryAfter; // seconds, or null
    this.param = param; // the field of the request that was wrong, or null
  }
}

export function storeKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

function headers(extra) {
  const key = sessionStorage.getItem(KEY);
  return key === null ? extra : { ...extra, Authorization: `Bearer ${key}` };
}

async function failure(response) {
  let message = response.statusText;
  let param = null;
  try {
    const { error } = await response.json();
    message = (typeof error === "string" ? error : error?.message) || message;
    param = error?.param ?? null;
  } catch {
    // A proxy's error page: its status is enough.
  }
  const seconds = Number.parseInt(response.headers.get("retry-after"), 10);
  return new HttpError(response.status, message, { retryAfter: Number.isNaN(seconds) ? null : seconds, param });
}

async function request(path, options) {
  const response = await fetch(path, { cache: "no-store", ...options });
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson(path) {
  return (await request(path, { headers: headers({}) })).json();
}

// Returns the start's progress, which needs no key; null if the server cannot be reached or is not ours.
export async function getStartup() {
  try {
    const startup = await (await fetch("ready", { cache: "no-store" })).json(); // 503 until it is ready
    return Array.isArray(startup.phases) ? startup : null;
  } catch {
    return null;
  }
}

// The data of each event, as text.
async function* dataOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // left early: let the server stop, too
  }
}

// The chunks of one streamed answer. An answer that breaks off without [DONE] is an error, not a short answer.
export async function* streamChat(body, signal) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal };
  try {
    for await (const data of dataOf(await request("v1/chat/completions", options))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new HttpError(500, chunk.error.message ?? "The server ended the answer.");
      yield chunk;
    }
  } catch (error) {
    if (error instanceof HttpError || signal.aborted) throw error;
  }
  throw new HttpError(0, "The connection was lost.");
}

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Calls `onEvent(event, isFirst)` for each event, forever; `isFirst` is true once per connection.
// Calls `onLost(error)` when the feed ends, and awaits its promise, if any, before it tries again.
export async function watch(onEvent, onLost) {
  let delay = FIRST_DELAY_MS;
  for (;;) {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    let reason = new HttpError(0, "The feed ended.");
    try {
      const response = await request("events", { headers: headers({}), signal: abort.signal });
      let isFirst = true;
      for await (const data of dataOf(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        onEvent(JSON.parse(data), isFirst);
        isFirst = false;
        delay = FIRST_DELAY_MS;
      }
    } catch (error) {
      reason = error;
    }
    clearTimeout(timer);
    const handled = onLost(reason);
    if (handled) {
      await handled;
    } else {
      await pause(delay);
      delay = Math.min(delay * 2, MAX_DELAY_MS);
    }
  }
}
