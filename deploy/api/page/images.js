// The images of a run's evaluations with a slider over the iterations, and the held-out prompts with their scores.

import { ask } from "/static/api.js";
import { make, number, signed } from "/static/panels.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 300;
const KEPT = 30;

let held = null; // { run, session, stamp, reading, evaluations }
let galleries = new Map(); // answers by run, session and iteration
let drawn = "";
let order = { column: "change", isUp: false };

// Shows the evaluations of a run; a changed `stamp` means that there may be a new one, a changed `session` that it may be
// another run of the same name.
export async function showImages(run, session, stamp) {
  const isNew = held?.run !== run || held.session !== session;
  if (!isNew && held.stamp === stamp) return;
  const reading = held?.run === run ? held.reading : "score";
  held = { run, session, stamp, reading, evaluations: isNew ? null : held.evaluations };
  if (isNew) drawn = "";
  await load();
}

async function load() {
  const mine = held;
  try {
    const evaluations = await ask(`/runs/${encodeURIComponent(mine.run)}/evaluations?${new URLSearchParams({ reading: mine.reading })}`);
    if (mine !== held) return;
    held.evaluations = evaluations;
    say("");
  } catch (error) {
    if (mine !== held) return;
    held.evaluations = null;
    say(`${error.message}.`);
  }
  drawSlider();
  drawPrompts();
}

function say(text) {
  $("images-notice").textContent = text;
  $("images-notice").hidden = !text;
}

// Gallery

function drawSlider() {
  const iterations = held.evaluations?.galleries ?? [];
  const slider = $("gallery-at");
  const wasLast = slider.max === "" || Number(slider.value) === Number(slider.max);
  slider.max = Math.max(0, iterations.length - 1);
  if (!drawn || wasLast) slider.value = slider.max;
  slider.disabled = iterations.length < 2;
  drawGallery();
}

async function drawGallery() {
  const iterations = held?.evaluations?.galleries ?? [];
  const iteration = iterations[Number($("gallery-at").value)];
  const words = iteration == null ? "No images are kept." : `iteration ${iteration}, ${Number($("gallery-at").value) + 1} of ${iterations.length}`;
  $("gallery-now").textContent = words;
  $("gallery-at").setAttribute("aria-valuetext", words);
  const key = `${held?.run} ${held?.session} ${iteration}`;
  if (iteration == null) {
    drawn = "";
    $("gallery").replaceChildren();
    return;
  }
  if (drawn === key) return;
  drawn = key;
  try {
    const [now, first] = await Promise.all([gallery(iteration), gallery(iterations[0])]);
    if (drawn !== key) return;
    $("gallery-now").textContent = [`${words}; images of ${now.image_height} x ${now.image_width} pixels${now.beside}`, now.change && `since iteration ${iterations[0]}: ${now.change}`].filter(Boolean).join("; ");
    const before = new Map(first.prompts.map((prompt, at) => [prompt, first.scores[at]]));
    $("gallery").classList.toggle("wide", now.beside !== "");
    $("gallery").replaceChildren(...now.prompts.map((prompt, at) => cell(now, at, iteration === iterations[0] ? undefined : before.get(prompt))));
    const next = iterations[Number($("gallery-at").value) + 1];
    if (next != null) gallery(next).catch(() => null);
  } catch (error) {
    drawn = "";
    say(`The images of iteration ${iteration} cannot be shown: ${error.message}.`);
  }
}

async function gallery(iteration) {
  const key = `${held.run} ${held.session} ${iteration}`;
  if (!galleries.has(key)) {
    const answer = await ask(`/runs/${encodeURIComponent(held.run)}/gallery/${iteration}`);
    const sheet = new Image();
    sheet.src = `data:${answer.media};base64,${answer.image}`;
    await sheet.decode();
    galleries.set(key, { ...answer, sheet });
    while (galleries.size > KEPT) galleries.delete(galleries.keys().next().value);
  }
  return galleries.get(key);
}

function cell(answer, at, before) {
  const item = document.createElement("li");
  const canvas = Object.assign(document.createElement("canvas"), { width: answer.width, height: answer.height });
  canvas.getContext("2d").drawImage(answer.sheet, at * answer.width, 0, answer.width, answer.height, 0, 0, answer.width, answer.height);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `image of “${answer.prompts[at]}”`);
  if (answer.image_width <= 96) canvas.style.imageRendering = "pixelated";
  const score = answer.scores[at];
  const change = before == null || score == null ? "" : ` (${signed(score - before)})`;
  const tone = change && score !== before ? (score > before ? "up" : "down") : "";
  item.append(canvas, make("b", score == null ? "no score" : `${number(score)}${change}`, tone), make("span", answer.prompts[at]));
  return item;
}

// Prompts

function drawPrompts() {
  const found = held?.evaluations;
  $("prompt-reading").replaceChildren(...(found?.readings ?? []).map((reading) => new Option(reading === "score" ? "held-out score" : reading, reading)));
  $("prompt-reading").value = held?.reading ?? "";
  const kinds = [...new Set(found?.tags ?? [])];
  if ($("prompt-kind").dataset.key !== kinds.join()) {
    $("prompt-kind").dataset.key = kinds.join();
    $("prompt-kind").replaceChildren(new Option("all kinds", ""), ...kinds.map((kind) => new Option(kind, kind)));
  }
  listPrompts();
}

function listPrompts() {
  const found = held?.evaluations;
  const rows = (found?.prompts ?? []).map((prompt, at) => {
    const scores = found.scores.map((each) => each[at]);
    const [first, now] = [scores.find((score) => score != null), scores.findLast((score) => score != null)];
    return { prompt, kind: found.tags[at], scores, first, now, change: first == null ? null : now - first };
  });
  const words = $("prompt-words").value.trim().toLowerCase();
  const kind = $("prompt-kind").value;
  const shown = rows.filter((row) => (!kind || row.kind === kind) && row.prompt.toLowerCase().includes(words));
  const value = (row) => row[order.column] ?? -Infinity;
  shown.sort((a, b) => (order.isUp ? 1 : -1) * (typeof value(a) === "string" ? value(a).localeCompare(value(b)) : value(a) - value(b)));
  for (const head of document.querySelectorAll("#prompts-table th[data-column]")) {
    head.setAttribute("aria-sort", head.dataset.column !== order.column ? "none" : order.isUp ? "ascending" : "descending");
  }
  const span = found?.iterations.length ? `, iteration ${found.iterations[0]} to ${found.iterations.at(-1)}` : "";
  const more = found?.left_out ? `; ${found.left_out} further prompts are left out` : "";
  $("prompt-count").textContent = found?.iterations.length ? `${shown.length} of ${rows.length} prompts${span}${shown.length > SHOWN ? `; the first ${SHOWN} are shown` : ""}${more}` : "No evaluation has scores by prompt yet.";
  $("prompt-rows").replaceChildren(...shown.slice(0, SHOWN).map(promptLine));
}

function promptLine(row) {
  const line = document.createElement("tr");
  const course = document.createElement("td");
  course.append(sparkline(row.scores));
  const tone = row.change > 0 ? "n up" : row.change < 0 ? "n down" : "n";
  line.append(make("td", row.prompt, "text"), make("td", row.kind), make("td", number(row.first), "n"), make("td", number(row.now), "n"), make("td", signed(row.change), tone), course);
  return line;
}

// The scores of one prompt over the evaluations; the axis reaches from 0 (or the lowest) to 1 (or the highest).
function sparkline(scores) {
  const [width, height] = [90, 20];
  const known = scores.filter((score) => score != null);
  const [least, most] = [Math.min(0, ...known), Math.max(1, ...known)];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const at = (index) => (scores.length < 2 ? width / 2 : (index * width) / (scores.length - 1));
  line.setAttribute("points", scores.map((score, index) => (score == null ? "" : `${at(index).toFixed(1)},${(height - 1 - ((score - least) / (most - least)) * (height - 2)).toFixed(1)}`)).filter(Boolean).join(" "));
  svg.append(line);
  return svg;
}

$("gallery-at").addEventListener("input", drawGallery);
for (const id of ["prompt-words", "prompt-kind"]) $(id).addEventListener("input", listPrompts);
$("prompt-reading").addEventListener("change", (event) => {
  held = { ...held, reading: event.target.value };
  load();
});
for (const head of document.querySelectorAll("#prompts-table th[data-column] button")) {
  head.addEventListener("click", () => {
    const column = head.closest("th").dataset.column;
    order = { column, isUp: order.column === column ? !order.isUp : true };
    listPrompts();
  });
}
