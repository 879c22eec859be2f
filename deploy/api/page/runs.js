// The table of runs with search, sorting and the differences of their configs; a mark compares a run with the current one.

import { ask } from "/static/api.js";
import { MOST_RUNS, address, go } from "/static/choice.js";
import { chance, date, make, number, signed, span } from "/static/panels.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 300;
const KEYS_SHOWN = 3;

const OLD_S = 10;

let runs = [];
let age = 0;
let configs = null;
let asked = "";
let order = { column: "updated", isUp: false };

const phaseOf = (run) => (run.stale_since ? "silent" : run.phase);
const COLUMNS = [
  ["run", "Run", (run) => run.run],
  ["method", "Method", (run) => run.method],
  ["seed", "Seed", (run) => configs?.runs[run.run]?.seed ?? -Infinity],
  ["phase", "State", phaseOf],
  ["iteration", "Iteration", (run) => run.iteration],
  ["reward", "Reward", (run) => run.reward ?? -Infinity],
  ["heldout", "Held-out score", (run) => run.heldout ?? -Infinity],
  ["updated", "Last update", (run) => run.updated],
];
const NUMBERS = ["seed", "iteration", "reward", "heldout"];
const FIRST = ["group.max_lag", "cluster.layout"]; // keys that are columns before others
const KEYS_FIRST = 3;
const LEADING = 3; // run, method and seed stand before the columns of the config

let chosen = null; // the config keys that are columns; null for the first ones

const keysShown = () => (configs?.keys ?? []).filter((key) => (chosen ?? byDefault()).includes(key));
const byDefault = () => [...FIRST.filter((key) => configs.keys.includes(key)), ...configs.keys.filter((key) => !FIRST.includes(key))].slice(0, KEYS_FIRST);

export function keepRuns(found, seconds) {
  [runs, age] = [found, seconds];
  if (address().view === "runs") drawRuns();
}

export async function drawRuns() {
  draw();
  const key = runs.map((run) => `${run.run} ${run.session}`).join();
  if (!runs.length || asked === key) return;
  asked = key;
  try {
    configs = await ask("/configs");
  } catch {
    asked = "";
  }
  draw();
}

export function textOf(run) {
  const found = configs?.runs[run];
  if (!found) return [];
  return [...configs.keys.filter((key) => key in found.values).map((key) => `${key}=${found.values[key]}`), `seed=${found.seed}`];
}

function draw() {
  const { run: shown, others } = address();
  const words = $("run-words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => {
    const text = [run.run, phaseOf(run), run.health, ...textOf(run.run)].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const value = COLUMNS.find(([name]) => name === order.column)?.[2] ?? ((run) => configs?.runs[run.run]?.values[order.column] ?? "");
  const compared = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  found.sort((a, b) => (order.isUp ? 1 : -1) * compared(value(a), value(b)));
  const marked = others.length + 1;
  $("run-count").textContent = `${found.length} of ${runs.length} runs${found.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}; ${marked} ${marked === 1 ? "is" : "are"} shown in the curves, at most ${MOST_RUNS}.${age > OLD_S ? ` The board does not answer: this is the list of ${span(age)} ago.` : ""}`;
  drawHeads();
  $("run-rows").replaceChildren(...found.slice(0, SHOWN).map((run) => lineOf(run, shown, others)));
}

// Name, method and seed, then the config keys that are chosen, then the rest.
function drawHeads() {
  const keys = keysShown().map((key) => [key, key]);
  const columns = [...COLUMNS.slice(0, LEADING), ...keys, ...COLUMNS.slice(LEADING)];
  const head = ([name, label]) => {
    const [cell, button] = [make("th", "", NUMBERS.includes(name) ? "n" : ""), make("button", label)];
    cell.scope = "col";
    cell.setAttribute("aria-sort", name !== order.column ? "none" : order.isUp ? "ascending" : "descending");
    cell.dataset.column = name;
    button.type = "button";
    button.addEventListener("click", () => {
      order = { column: name, isUp: order.column === name ? !order.isUp : name === "run" };
      draw();
    });
    cell.append(button);
    return cell;
  };
  const plain = (text) => Object.assign(make("th", text), { scope: "col" });
  $("run-heads").replaceChildren(plain("Compare"), ...columns.map(head), plain("Config differences"));
  $("run-columns").replaceChildren(
    ...(configs?.keys ?? []).map((key) => {
      const [label, box] = [document.createElement("label"), Object.assign(document.createElement("input"), { type: "checkbox", checked: keysShown().includes(key) })];
      box.addEventListener("change", () => {
        chosen = box.checked ? [...keysShown(), key] : keysShown().filter((other) => other !== key);
        draw();
      });
      label.append(box, key);
      return label;
    }),
  );
}

function lineOf(run, shown, others) {
  const line = document.createElement("tr");
  const mark = Object.assign(document.createElement("input"), { type: "checkbox", checked: run.run === shown || others.includes(run.run), disabled: run.run === shown });
  if (!mark.checked && others.length >= MOST_RUNS - 1) mark.disabled = true;
  mark.setAttribute("aria-label", `Compare ${run.run}`);
  mark.addEventListener("change", () => {
    const now = address().others.filter((other) => other !== run.run);
    go({ others: mark.checked ? [...now, run.run] : now });
  });
  const open = make("button", run.run, "as-link");
  open.type = "button";
  open.addEventListener("click", () => go({ run: run.run, view: "overview", others: others.filter((other) => other !== run.run) }));
  const change = run.heldout == null || run.heldout_first == null ? "" : ` (${signed(run.heldout - run.heldout_first)}${chance(run)})`;
  const [first, name] = [document.createElement("td"), document.createElement("td")];
  first.append(mark);
  name.append(open);
  if (run.run === shown) line.setAttribute("aria-current", "true");
  const found = configs?.runs[run.run];
  const columns = keysShown();
  const texts = textOf(run.run).filter((text) => ![...columns, "seed"].includes(text.split("=")[0]));
  const differs = make("td", texts.slice(0, KEYS_SHOWN).join("  "), "text");
  if (texts.length > KEYS_SHOWN) differs.append(make("small", ` and ${texts.length - KEYS_SHOWN} more`));
  differs.title = textOf(run.run).join("\n");
  const state = make("td", phaseOf(run));
  state.title = run.health;
  line.append(
    first,
    name,
    make("td", run.method || "–"),
    make("td", found?.seed ?? "–", "n"),
    ...columns.map((key) => make("td", found?.values[key] ?? "–")),
    state,
    make("td", `${run.iteration} / ${run.iterations}`, "n"),
    make("td", number(run.reward), "n"),
    make("td", number(run.heldout) + change, "n"),
    make("td", date(run.updated)),
    differs,
  );
  return line;
}

$("run-words").addEventListener("input", draw);
$("run-alone").addEventListener("click", () => go({ others: [] }));
$("run-curves").addEventListener("click", () => go({ view: "curves" }));
