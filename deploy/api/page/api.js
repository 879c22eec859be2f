// The client of the status API: JSON with the tab's token, and a run's event stream that reconnects by itself.

const KEY = "flowcredit-token";
export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => sessionStorage.setItem(KEY, text.trim()),
};

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

function headers(more = {}) {
  return token.get() ? { Authorization: `Bearer ${token.get()}`, ...more } : more;
}

async function checked(response) {
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Refused(response.status, problem.detail ?? response.statusText);
}

export async function ask(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function order(method, path, body) {
  const request = { method, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  return (await checked(await fetch(path, request))).json();
}

// Calls `onEvent(name, data)` for each event and `onLink(isLive, error)` when the connection changes. `position()` returns
// what the caller has already received, so that a new connection continues there. Returns a function that ends it.
export function follow(run, position, onEvent, onLink) {
  const ending = new AbortController();
  listen(run, position, onEvent, onLink, ending.signal);
  return () => ending.abort();
}

const SILENCE_MS = 25_000; // the server sends something at least every 15 seconds

async function listen(run, position, onEvent, onLink, signal) {
  let pause = 1000;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const end = () => attempt.abort();
    signal.addEventListener("abort", end);
    let watchdog = setTimeout(end, SILENCE_MS);
    try {
      const { since, sinceEvent } = position();
      const path = `/runs/${encodeURIComponent(run)}/events?since=${since}&since_event=${sinceEvent}`;
      const response = await checked(await fetch(path, { headers: headers(), signal: attempt.signal, cache: "no-store" }));
      onLink(true, null);
      pause = 1000;
      for await (const [name, data] of events(response.body)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(end, SILENCE_MS);
        if (name) onEvent(name, data);
      }
      throw new Error("the server ended the stream");
    } catch (error) {
      if (!signal.aborted) onLink(false, error);
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", end);
    }
    if (signal.aborted) return;
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 8000);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]);
      const data = fields.filter(([field]) => field === "data").map(([, text]) => text).join("\n");
      const name = fields.find(([field]) => field === "event")?.[1];
      yield data ? [name ?? "message", JSON.parse(data)] : [null, null];
    }
  }
}
