// The list of events: newest first, with dates, filtered by kind and by words.

import { make } from "/static/panels.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 300;
const TONES = { error: "bad", warning: "warn" };

const DAY = new Intl.DateTimeFormat([], { dateStyle: "full" });
const CLOCK = new Intl.DateTimeFormat([], { timeStyle: "medium" });

let held = [];

export function drawEvents(events) {
  held = events;
  const kind = $("event-kind").value;
  const words = $("event-words").value.trim().toLowerCase();
  const isWanted = (event) => (kind === "all" || (kind === "trouble" ? event.kind !== "info" : event.kind === kind)) && event.message.toLowerCase().includes(words);
  const found = held.filter(isWanted).toReversed();
  $("event-count").textContent = `${found.length} of ${held.length} events${found.length > SHOWN ? `, the newest ${SHOWN} are shown` : ""}`;
  const items = [];
  let day = "";
  for (const event of found.slice(0, SHOWN)) {
    const at = new Date(event.time * 1000);
    const date = DAY.format(at);
    if (date !== day) items.push(make("li", date, "day"));
    day = date;
    const line = make("li");
    const time = make("time", CLOCK.format(at));
    time.dateTime = at.toISOString();
    line.append(time, make("span", event.kind, `kind ${TONES[event.kind] ?? ""}`), make("span", event.message));
    items.push(line);
  }
  $("events").replaceChildren(...items);
}

for (const id of ["event-kind", "event-words"]) $(id).addEventListener("input", () => drawEvents(held));
