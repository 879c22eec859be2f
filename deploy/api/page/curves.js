// The charts of a run and of the compared runs: requests as many points as can be drawn, and draws them.

import { ask } from "/static/api.js";
import { Heat, Lines } from "/static/charts.js";
import { charts as choice, keep, setZoom, zoomOf } from "/static/choice.js";
import { groupsOf, lineOf, partsOf } from "/static/compare.js";

const $ = (id) => document.getElementById(id);
const POINTS = 300;
const BARS = 60;
const LEAST_PAUSE_MS = 1000; // between two requests for the same curves
const last = (name) => name.split("/").at(-1).replaceAll("_", " ");
const klOf = (name) => (name === "train/approx_kl" ? "approximate KL" : "reference KL");
const actorOf = (name) => name.split("/").slice(1, -1).join("/");

// `metrics` are names or a pattern; `only` marks a chart of the run itself, without the compared runs.
const CHARTS = [
  { title: "Reward", hint: "Mean reward of the finished training images of an iteration.", metrics: ["reward/mean"] },
  { title: "Held-out score", hint: "The same prompts and the same noise at every evaluation: the fair measure of progress.", metrics: ["evaluation/score"], dots: true },
  { title: "Held-out score by kind of prompt", metrics: /^evaluation\/(?!score$|missing$|reward\/)/, dots: true },
  { title: "Held-out readings by scorer", hint: "Each scorer has a scale of its own.", metrics: /^evaluation\/reward\//, label: (name) => name.replace("evaluation/reward/", ""), dots: true },
  { title: "Reward by scorer", hint: "Each scorer has a scale of its own.", metrics: /^reward\/(?!mean$|group_std$|missing$)/, label: (name) => name.replace("reward/", "") },
  { title: "Reward spread within a group", hint: "Std of the rewards of one prompt's images. Near 0 there is nothing to learn.", metrics: ["reward/group_std"] },
  { title: "Groups without contrast", hint: "Share of groups in which every advantage is 0.", metrics: ["group/zero_variance"] },
  { title: "KL", hint: "Approximate: half the squared log ratio of an update. Reference: distance to the model without adapter (learner.kl.weight).", metrics: ["train/approx_kl", "train/reference_kl"], label: klOf },
  { title: "Distance to the adapter old", metrics: ["train/old_distance_mean"] },
  { title: "Ratio", hint: "Likelihood ratio of learner and rollout: near 1 when they agree.", metrics: ["train/ratio_mean"] },
  { title: "First ratio deviation", hint: "Largest deviation of the ratio from 1 before the first update; 0 when both sides compute the same.", metrics: ["train/first_ratio_deviation"] },
  { title: "Clip fraction", hint: "Share of pairs whose ratio left the clip range.", metrics: ["train/clip_fraction"] },
  { title: "Loss", hint: "Its sign and size mean little for this objective; watch for jumps.", metrics: ["train/loss"] },
  { title: "Gradient norm", hint: "Before clipping.", metrics: ["train/grad_norm"] },
  { title: "Missing scores", hint: "Images without a score.", metrics: ["reward/missing"] },
  { title: "Seconds per iteration", metrics: ["seconds/iteration"] },
  { title: "Seconds per evaluation", metrics: ["seconds/evaluation"], dots: true },
  { title: "Learner group: workers", metrics: ["update/workers"] },
  { title: "Learner group: share of time computing", metrics: ["update/busy_share", "update/busy_share_min"] },
  { title: "Learner group: seconds to add gradients", metrics: ["update/reduction_seconds"] },
];
const BAR_CHARTS = [
  { title: "Where the time of an iteration goes", hint: "Seconds that the loop waited for each stage.", metrics: /^seconds\/(?!iteration$|evaluation$)/ },
  { title: "Work of the actors", hint: "Seconds of each part, summed over all actors: work/… in docs/metrics.md.", metrics: /^work\/.*_seconds$/ },
  { title: "Rows through the transformer", hint: "Main trajectories, completions, gradients and references.", metrics: /^work\/.*_evaluations$/ },
  { title: "Memory of each actor, GiB", hint: "Of its process; at most eight actors of each kind.", metrics: /^usage\/.*\/memory_gib$/, label: actorOf },
  { title: "GPU memory of each actor, GiB", hint: "In use on its GPU, by all processes.", metrics: /^usage\/.*\/gpu_memory_gib$/, label: actorOf },
  { title: "GPU utilisation of each actor", hint: "Share of the last second in which its GPU computed, when the iteration ended.", metrics: /^usage\/.*\/gpu_share$/, label: actorOf },
];
const OF_OVERVIEW = "reward/*,evaluation/score,step_reward/step_*_abs_mean,train/approx_kl,train/reference_kl,train/old_distance_mean,train/clip_fraction,train/grad_norm";
const OF_CURVES = "reward/*,evaluation/*,group/zero_variance,train/*,seconds/iteration,seconds/evaluation,update/*";
const OF_BARS = "seconds/*,work/*,usage/*";
const isCharted = (name) => [...CHARTS, ...BAR_CHARTS].some(({ metrics }) => (metrics instanceof RegExp ? metrics.test(name) : metrics.includes(name)));

let shown = null; // { run, stamp, view, others: [{ run, stamp }], configs }
let isDrawing = false;
let isStale = false;
let drawnZoom = "";
const answers = new Map();

const overview = {
  reward: new Lines($("reward-chart"), 170, "Reward over iterations", zoom),
  heldout: new Lines($("heldout-chart"), 150, "Held-out score over iterations", zoom),
  kl: new Lines($("kl-chart"), 130, "KL over iterations", zoom),
  clip: new Lines($("clip-chart"), 130, "Clip fraction over iterations", zoom),
  grad: new Lines($("grad-chart"), 130, "Gradient norm over iterations", zoom),
  heat: new Heat($("heat")),
};
const grid = CHARTS.map((spec) => cardOf(spec, $("charts")));
const bars = BAR_CHARTS.map((spec) => cardOf(spec, $("bar-charts")));
const further = new Map(); // by name, the chart of each metric that no chart above shows

function cardOf(spec, parent) {
  const card = document.createElement("section");
  card.className = "card";
  card.append(Object.assign(document.createElement("h3"), { textContent: spec.title }));
  if (spec.hint) card.append(Object.assign(document.createElement("p"), { className: "hint", textContent: spec.hint }));
  const holder = Object.assign(document.createElement("div"), { className: "chart" });
  card.append(holder);
  parent.append(card);
  return { spec, card, lines: new Lines(holder, 200, spec.title, zoom) };
}

// Shows these runs; a changed `stamp` means that a run has new lines.
export function showCurves(wanted) {
  if (shown?.run !== wanted.run) for (const lines of everyChart()) lines.clear();
  shown = wanted;
  return draw();
}

export function redraw() {
  for (const lines of everyChart()) lines.clear();
  if (shown) draw();
}

const everyChart = () => [overview.reward, overview.heldout, overview.kl, overview.clip, overview.grad, ...[...grid, ...bars, ...further.values()].map((one) => one.lines)];

// Draws once at a time; requests during a drawing lead to one more drawing after it.
async function draw() {
  if (isDrawing) {
    isStale = true;
    return;
  }
  isDrawing = true;
  do {
    isStale = false;
    drawTools();
    try {
      if (shown.view === "overview") await drawOverview(shown);
      if (shown.view === "curves") await drawGrid(shown);
    } catch (error) {
      $("curves-notice").textContent = `The curves cannot be read: ${error.message}.`;
    }
    await new Promise((resolve) => setTimeout(resolve, isStale ? 50 : 0));
  } while (isStale);
  isDrawing = false;
}

// Requests the curves of a run, unless they are already there.
async function load(run, stamp, names, points) {
  const window = zoomOf(shown.run);
  const wanted = new URLSearchParams({ names, by: choice.by, points });
  if (window) for (const [at, name] of ["start", "end"].entries()) wanted.set(name, Math.max(0, window[at]));
  const key = `${run}?${wanted}`;
  const held = answers.get(key);
  if (held && (held.stamp === stamp || performance.now() - held.asked < LEAST_PAUSE_MS)) {
    if (held.stamp !== stamp) setTimeout(() => shown?.run && draw(), LEAST_PAUSE_MS);
    return held.curves;
  }
  const curves = await ask(`/runs/${encodeURIComponent(run)}/curves?${wanted}`);
  answers.delete(key);
  answers.set(key, { stamp, asked: performance.now(), curves });
  while (answers.size > 40) answers.delete(answers.keys().next().value);
  return curves;
}

async function drawOverview(of) {
  const curves = await load(of.run, of.stamp, OF_OVERVIEW, POINTS);
  if (of !== shown) return;
  const group = [{ name: of.run, number: 0, runs: [curves] }];
  const options = { by: choice.by, zoom: zoomOf(of.run) };
  const parts = (metrics, label = last, dots = false) => partsOf(group, metrics.filter((name) => curves.series[name]), { label, weight: choice.smoothing, dots });
  const scorers = Object.keys(curves.series).filter((name) => /^reward\/(?!mean$|group_std$|missing$)/.test(name)).filter((name) => !isSame(curves, name, "reward/mean"));
  const reward = [
    ...parts(["reward/mean"], () => "reward"),
    ...parts(scorers.slice(0, 4), (name) => name.replace("reward/", "")),
  ].map((part, number) => ({ ...part, color: number }));
  overview.reward.show(reward, options);
  overview.heldout.show(parts(["evaluation/score"], () => "held-out score", true).map((part) => ({ ...part, color: 1 })), options);
  const kl = parts(["train/approx_kl", "train/reference_kl"], klOf);
  const distance = parts(["train/old_distance_mean"], () => "distance to old adapter");
  overview.kl.show(kl.length ? kl : distance, options);
  $("clip-chart").hidden = !curves.series["train/clip_fraction"];
  if (curves.series["train/clip_fraction"]) overview.clip.show(parts(["train/clip_fraction"], () => "clip fraction"), options);
  overview.grad.show(parts(["train/grad_norm"], () => "gradient norm"), options);
  drawHeat(curves);
}

// The reading of a single scorer with weight 1 is the reward itself, up to rounding.
function isSame(curves, name, other) {
  const [a, b] = [lineOf(curves, name), lineOf(curves, other)];
  return b && a.y.length === b.y.length && a.y.every((value, at) => Math.abs(value - b.y[at]) <= 1e-5);
}

function drawHeat(curves) {
  const found = Object.keys(curves.series).map((name) => name.match(/^step_reward\/step_(\d+)_abs_mean$/)).filter(Boolean).sort((a, b) => a[1] - b[1]);
  const lines = found.map((match) => lineOf(curves, match[0]));
  const x = lines.reduce((most, line) => (line.x.length > most.length ? line.x : most), []);
  const rows = lines.map((line) => new Map(line.x.map((at, index) => [at, line.y[index]])));
  overview.heat.show(x, found.map((match) => match[1]), x.map((at) => rows.map((row) => row.get(at) ?? null)), choice.by === "seconds" ? "second" : "iteration");
}

async function drawGrid(of) {
  const wanted = [{ run: of.run, stamp: of.stamp }, ...of.others];
  const [worked, ...held] = await Promise.all([
    load(of.run, of.stamp, OF_BARS, BARS),
    ...wanted.map(({ run, stamp }) => load(run, stamp, OF_CURVES, POINTS).catch(() => null)),
  ]);
  if (of !== shown) return;
  const runs = wanted.map(({ run }, at) => ({ run, curves: held[at] })).filter((one) => one.curves);
  const groups = groupsOf(runs, of.configs);
  const options = { by: choice.by, zoom: zoomOf(of.run) };
  const gone = wanted.filter((_, at) => !held[at]).map((one) => one.run);
  $("curves-notice").textContent = gone.length ? `Cannot be read here: ${gone.join(", ")}.` : "";
  drawCompared(groups);
  const zeros = [];
  for (const { spec, card, lines } of grid) {
    const metrics = namesOf(spec.metrics, runs.map((one) => one.curves));
    const isZero = metrics.length > 0 && metrics.every((name) => runs.every(({ curves }) => lineOf(curves, name)?.y.every((value) => value === 0) ?? true));
    card.hidden = !metrics.length || isZero;
    if (isZero) zeros.push(spec.title.toLowerCase());
    else if (metrics.length) lines.show(partsOf(groups, metrics, { label: spec.label ?? (metrics.length > 1 ? last : () => spec.title.toLowerCase()), weight: spec.dots ? 0 : choice.smoothing, dots: spec.dots }), options);
  }
  $("zeros").textContent = zeros.length ? `Always 0, so not drawn: ${zeros.join("; ")}.` : "";
  for (const { spec, card, lines } of bars) {
    const metrics = namesOf(spec.metrics, [worked]);
    card.hidden = !metrics.length;
    if (spec.label) {
      lines.show(partsOf([{ name: of.run, number: 0, runs: [worked] }], metrics, { label: spec.label }), options);
      continue;
    }
    const parts = metrics.map((name, color) => ({ name: last(name).replace(/ (seconds|evaluations)$/, ""), color, ...lineOf(worked, name) }));
    const isWhole = parts.every((part) => part.x === parts[0].x);
    if (parts.length) lines.show(isWhole ? parts : aligned(parts), { ...options, isStacked: true });
  }
  if ($("further").open) await drawFurther(of, wanted, options);
}

async function drawFurther(of, wanted, options) {
  const held = await Promise.all(wanted.map(({ run, stamp }) => load(run, stamp, "*", POINTS).catch(() => null)));
  if (of !== shown) return;
  const runs = wanted.map(({ run }, at) => ({ run, curves: held[at] })).filter((one) => one.curves);
  const groups = groupsOf(runs, of.configs);
  const names = namesOf(/^(?!iteration$)/, runs.map((one) => one.curves)).filter((name) => !isCharted(name));
  for (const name of names) if (!further.has(name)) further.set(name, cardOf({ title: name }, $("further-charts")));
  for (const [name, { card, lines }] of further) {
    card.hidden = !names.includes(name);
    if (!card.hidden) lines.show(partsOf(groups, [name], { label: last, weight: choice.smoothing }), options);
  }
}

// Terms of a sum at the same points; a missing value adds nothing.
function aligned(parts) {
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((a, b) => a - b);
  return parts.map((part) => {
    const held = new Map(part.x.map((at, index) => [at, part.y[index]]));
    return { ...part, x, y: x.map((at) => held.get(at) ?? 0) };
  });
}

function namesOf(metrics, curves) {
  const names = [...new Set(curves.flatMap((one) => Object.keys(one.series)))];
  return metrics instanceof RegExp ? names.filter((name) => metrics.test(name)) : metrics.filter((name) => names.includes(name));
}

function drawCompared(groups) {
  $("compared").replaceChildren(
    ...(groups.flatMap((group) => group.members).length < 2 ? [] : groups).map((group) => {
      const item = document.createElement("li");
      const mark = Object.assign(document.createElement("i"), { className: "mark" });
      mark.style.background = `var(--c${group.number % 6})`;
      item.append(mark, group.members.length > 1 ? `${group.name}, ${group.members.length} seeds: ${group.members.join(", ")}` : group.name);
      return item;
    }),
  );
}

// Axis, smoothing and zoom

export function zoom(window) {
  if (!shown) return;
  const [least, most] = window ?? [];
  setZoom(shown.run, window && most > least ? [Math.max(0, least), most] : null);
  draw();
}

function drawTools() {
  const window = zoomOf(shown.run);
  const [from, to] = window ?? [null, null];
  const key = JSON.stringify([shown.run, choice.by, window]);
  if (drawnZoom !== key) for (const [id, value] of [["zoom-from", from], ["zoom-to", to]]) $(id).value = value == null ? "" : Math.round(value);
  drawnZoom = key; // so that a number is not lost while it is typed
  $("zoom-all").disabled = !window;
  $("zoomed").hidden = !window || shown.view !== "overview";
  if (window) $("zoomed-text").textContent = `The charts show ${choice.by === "seconds" ? "seconds" : "iterations"} ${Math.round(from)} to ${Math.round(to)}.`;
  $("by").value = choice.by;
  $("smoothing").value = choice.smoothing;
  $("smoothing-now").textContent = choice.smoothing ? Number(choice.smoothing).toFixed(2) : "off";
}

function readZoom() {
  const [from, to] = ["zoom-from", "zoom-to"].map((id) => $(id).value);
  if (from === "" && to === "") zoom(null);
  else if (from !== "" && to !== "") zoom([Number(from), Number(to)]);
}

$("by").addEventListener("change", (event) => {
  keep({ by: event.target.value });
  redraw();
});
$("smoothing").addEventListener("input", (event) => {
  keep({ smoothing: Number(event.target.value) });
  if (shown) draw();
});
$("further").addEventListener("toggle", () => shown && draw());
for (const id of ["zoom-from", "zoom-to"]) $(id).addEventListener("change", readZoom);
for (const id of ["zoom-all", "zoomed-all"]) $(id).addEventListener("click", () => zoom(null));
