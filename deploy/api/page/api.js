// The client of the status API: sends JSON with the tab's token, and polls the events of a run.

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
  return (await askWithAge(path)).answer;
}

// Also returns the seconds since the server read what it answers.
export async function askWithAge(path) {
  const response = await checked(await fetch(path, { headers: headers(), cache: "no-store" }));
  return { answer: await response.json(), age: Number(response.headers.get("Age") ?? 0) };
}

// Saves a file under the name that the server gives it.
export async function download(path) {
  const response = await checked(await fetch(path, { headers: headers(), cache: "no-store" }));
  const name = response.headers.get("Content-Disposition")?.match(/filename="([^"]+)"/)?.[1] ?? "file";
  const address = URL.createObjectURL(await response.blob());
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

export async function order(method, path, body) {
  const request = { method, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  return (await checked(await fetch(path, request))).json();
}

// Calls `onEvent(name, data)` for each event and `onLink(isLive, error)` after each answer. `position()` returns what the
// caller has already received and the time until the next request. Returns a function that stops the polling.
//
// It polls instead of keeping a connection open, because a browser opens at most six connections to a server for all its
// tabs. A hidden tab does not poll.
export function follow(run, position, onEvent, onLink) {
  const ending = new AbortController();
  listen(run, position, onEvent, onLink, ending.signal);
  return () => ending.abort();
}

const ANSWER_MS = 20_000;
const LONGEST_PAUSE_MS = 8000;

async function listen(run, position, onEvent, onLink, signal) {
  let failures = 0;
  while (!signal.aborted) {
    await shown(signal);
    if (signal.aborted) return;
    const attempt = new AbortController();
    const end = () => attempt.abort();
    signal.addEventListener("abort", end);
    const watchdog = setTimeout(end, ANSWER_MS);
    try {
      const { session, sinceEvent } = position();
      const held = new URLSearchParams({ once: true, has_metrics: false, session, since_event: sinceEvent });
      const path = `/runs/${encodeURIComponent(run)}/events?${held}`;
      const response = await checked(await fetch(path, { headers: headers(), signal: attempt.signal, cache: "no-store" }));
      for await (const [name, data] of events(response.body)) if (name && !signal.aborted) onEvent(name, data);
      if (!signal.aborted) onLink(true, null);
      failures = 0;
    } catch (error) {
      failures += 1;
      if (!signal.aborted) onLink(false, error);
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", end);
    }
    const pause = failures ? Math.min(1000 * 2 ** (failures - 1), LONGEST_PAUSE_MS) : position().pause;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

// Resolves when the tab is visible, or at the signal.
function shown(signal) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true, signal });
    signal?.addEventListener("abort", resolve, { once: true });
  });
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
