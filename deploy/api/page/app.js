// The page: it selects a run, keeps what it has received of it, and updates every panel from that.

import { Refused, ask, follow, order, token } from "/static/api.js";
import { Heat, Lines } from "/static/charts.js";
import * as panels from "/static/panels.js";
import { drawTrajectories, explanation } from "/static/trajectories.js";

const $ = (id) => document.getElementById(id);
const ASK_MS = 1000; // between two questions for the news of a run
const ASK_OVER_MS = 5000; // of a run that has ended or is silent
const RUNS_EVERY_MS = 5000;
const OUTCOMES_SHOWN = 5;

const charts = {
  reward: new Lines($("reward-chart"), 250, "Reward over iterations"),
  kl: new Lines($("kl-chart"), 130, "Clip fraction and KL over iterations"),
  grad: new Lines($("grad-chart"), 130, "Gradient norm over iterations"),
  heat: new Heat($("heat")),
};

let view = null; // the run that is shown and what was received of it

function show(run) {
  if (view?.run === run) return;
  view?.end();
  view = { run, status: null, session: null, lines: [], events: [], record: null, followsNewest: true, end: () => {} };
  location.hash = new URLSearchParams({ run });
  document.title = `${run} – flowcredit`;
  drawMetrics();
  panels.drawEvents($("events"), []);
  $("trajectories").replaceChildren();
  const mine = view;
  const position = () => ({
    session: mine.session ?? "",
    since: mine.lines.at(-1)?.seq ?? 0,
    sinceEvent: mine.events.at(-1)?.number ?? 0,
    pause: mine.status && panels.isOver(mine.status) ? ASK_OVER_MS : ASK_MS,
  });
  view.end = follow(run, position, (name, data) => mine === view && receive(name, data), (isLive, error) => mine === view && link(isLive, error));
}

function receive(name, data) {
  if (name === "status") {
    if (view.session && view.session !== data.session) Object.assign(view, { lines: [], events: [], record: null });
    view.session = data.session;
    view.status = data;
    drawStatus();
  } else if (name === "metrics") {
    const known = view.lines.at(-1)?.seq ?? 0;
    view.lines.push(...data.filter((line) => line.seq > known));
    drawMetrics();
  } else if (name === "event") {
    view.events.push(data);
    view.events.splice(0, view.events.length - 500);
    panels.drawEvents($("events"), view.events);
  }
}

const AGAIN = "“flowcredit serve <run folder>” shows it again.";

function link(isLive, error) {
  const status = view.status;
  const hasEnded = status && panels.hasEnded(status);
  if (isLive) state("live", "live");
  else if (error instanceof Refused) state("over", error.status === 401 ? "token needed" : "no answer");
  else if (hasEnded) state("over", "server ended");
  else state("lost", `connection lost${status ? `, showing ${panels.clock(status.updated)}` : ""}`);
  if (isLive) notice("");
  else if (error instanceof Refused && error.status === 401) notice("This server needs its token: press “Token”.");
  else if (error instanceof Refused && error.status === 404) notice(unknown(view.run));
  else if (error instanceof Refused) notice(`${error.message}.`);
  else if (hasEnded) notice(`The run has ${status.phase}, and the server of this page has ended. ${AGAIN}`);
  else notice(`The server does not answer; this page tries again. If the run has ended, ${AGAIN}`);
}

function state(name, text) {
  const element = $("link");
  element.dataset.state = name;
  if (element.textContent !== text) element.textContent = text;
}

const unknown = (run) => `There is no run “${run}” here: choose one from the list.`;

function notice(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
  $("notice").hidden = !text;
}

function drawStatus() {
  const status = view.status;
  panels.drawFacts($("facts"), status);
  $("progress").max = Math.max(1, status.iterations);
  $("progress").value = status.iteration;
  panels.drawAttention($("attention"), status);
  panels.drawDiagnostics($("diagnostics"), status.diagnostics);
  $("slow-side").textContent = status.bottleneck ? `Slow side: ${status.bottleneck.side}. ${status.bottleneck.message}.` : "No iteration has ended yet.";
  panels.drawStages($("stages"), status.stages);
  panels.drawWork($("work"), status.pools);
  panels.drawQueues($("queues"), status);
  panels.drawPools($("pools"), status, (pool, count) => command("PUT", `actors/${pool.split("/").map(encodeURIComponent).join("/")}`, { count }));
  panels.drawConditions($("conditions"), status.conditions);
  panels.drawActors($("actors"), status);
  const isOver = panels.isOver(status);
  for (const button of document.querySelectorAll("[data-command]")) {
    const isMoot = (button.dataset.command === "pause" && status.phase === "paused") || (button.dataset.command === "resume" && status.phase !== "paused");
    button.disabled = isOver || isMoot;
  }
  drawRecordList(status.trajectories);
}

function drawMetrics() {
  const iterations = view.lines.filter((line) => "reward/mean" in line.values);
  const evaluations = view.lines.filter((line) => "evaluation/score" in line.values);
  const x = [...new Set([...iterations, ...evaluations].map((line) => line.values.iteration))].sort((a, b) => a - b);
  const column = (lines, name) => {
    const held = new Map(lines.map((line) => [line.values.iteration, line.values[name]]));
    return x.map((iteration) => held.get(iteration) ?? null);
  };
  const names = [...new Set(iterations.flatMap((line) => Object.keys(line.values)))].filter((name) => /^reward\/(?!mean$|group_std$|missing$)/.test(name));
  const series = [{ name: "reward", values: column(iterations, "reward/mean") }];
  if (evaluations.length) series.push({ name: "held-out score", values: column(evaluations, "evaluation/score"), dots: true });
  for (const name of names) {
    const values = column(iterations, name);
    // A single scorer of weight 1 is the reward itself.
    if (values.some((value, at) => Math.abs((value ?? 0) - (series[0].values[at] ?? 0)) > 1e-6)) series.push({ name: name.replace("reward/", ""), values });
  }
  charts.reward.show(x, x.length ? series.slice(0, 6) : []);
  const at = iterations.map((line) => line.values.iteration);
  const of = (name) => iterations.map((line) => line.values[name] ?? null);
  const clipped = of("train/clip_fraction");
  const hasRatios = clipped.some((value) => value != null);
  charts.kl.show(at, [hasRatios ? { name: "clip fraction", values: clipped } : { name: "distance to old adapter", values: of("train/old_distance_mean") }]);
  charts.grad.show(at, [{ name: "gradient norm", values: of("train/grad_norm") }]);
  const gains = [...new Set(iterations.flatMap((line) => Object.keys(line.values)))].map((name) => name.match(/^gain\/step_(\d+)_abs_mean$/)).filter(Boolean).sort((a, b) => a[1] - b[1]);
  charts.heat.show(at, gains.map((found) => found[1]), iterations.map((line) => gains.map((found) => line.values[found[0]] ?? null)));
}

// Trajectory records

function drawRecordList(iterations) {
  const select = $("record-at");
  const key = iterations.join();
  if (select.dataset.key !== key) {
    select.dataset.key = key;
    const held = select.value;
    select.replaceChildren(...iterations.map((iteration) => new Option(iteration, iteration)));
    if (!view.followsNewest && iterations.includes(Number(held))) select.value = held;
    else if (iterations.length) select.value = iterations.at(-1);
  }
  select.disabled = !iterations.length;
  $("record-prev").disabled = select.selectedIndex <= 0;
  $("record-next").disabled = select.selectedIndex >= iterations.length - 1;
  if (!iterations.length) $("record-prompt").textContent = panels.isOver(view.status) ? "Nothing was recorded." : "Nothing is recorded yet.";
  loadRecord();
}

async function loadRecord() {
  const mine = view;
  const iteration = Number($("record-at").value);
  if (!iteration || (mine.record?.iteration === iteration && mine.record.session === mine.session)) return;
  mine.record = { iteration, session: mine.session };
  try {
    const record = await ask(`/runs/${encodeURIComponent(mine.run)}/trajectories/${iteration}/record`);
    if (mine !== view || mine.record.iteration !== iteration) return;
    $("record-prompt").textContent = `“${record.prompt}”. ${explanation(record)}`;
    await drawTrajectories($("trajectories"), record);
  } catch (error) {
    mine.record = null;
    $("record-prompt").textContent = `The record of iteration ${iteration} cannot be shown: ${error.message}`;
  }
}

function pageRecord(move) {
  const select = $("record-at");
  select.selectedIndex = Math.max(0, Math.min(select.options.length - 1, select.selectedIndex + move));
  pickRecord();
}

function pickRecord() {
  const select = $("record-at");
  view.followsNewest = select.selectedIndex === select.options.length - 1;
  drawRecordList(view.status.trajectories);
}

// Control

async function command(method, path, body) {
  if (!token.get() && !(await askToken())) return;
  const run = view.run;
  const line = document.createElement("li");
  const words = body.command ?? `${decodeURIComponent(path.replace("actors/", ""))} to ${body.count} actors`;
  line.textContent = `${words}: sending`;
  $("outcomes").prepend(line);
  while ($("outcomes").children.length > OUTCOMES_SHOWN) $("outcomes").lastChild.remove();
  try {
    const answer = await order(method, `/runs/${encodeURIComponent(run)}/${path}`, body);
    for (let look = 0; look < 600; look++) {
      const found = await ask(`/runs/${encodeURIComponent(run)}/commands/${answer.id}`);
      line.textContent = `${words}: ${found.state}${found.message ? `, ${found.message}` : ""}`;
      if (found.finished) return;
      await new Promise((resolve) => setTimeout(resolve, look < 10 ? 500 : 2000));
    }
  } catch (error) {
    line.textContent = `${words}: ${error.message}`;
    if (error instanceof Refused && error.status === 401) token.set("");
  }
}

function dialog(id) {
  const box = $(id);
  box.returnValue = "cancel";
  box.showModal();
  return new Promise((resolve) => box.addEventListener("close", () => resolve(box.returnValue === "ok"), { once: true }));
}

async function askToken() {
  $("token").value = token.get();
  if (!(await dialog("token-dialog"))) return false;
  token.set($("token").value);
  $("token").value = "";
  listRuns();
  return Boolean(token.get());
}

// Runs

async function listRuns() {
  if (document.hidden) return;
  let runs;
  try {
    runs = await ask("/runs");
  } catch (error) {
    if (!view) {
      state("lost", "no connection");
      notice(error instanceof Refused ? `${error.message}.` : "The server does not answer; this page tries again.");
    }
    return;
  }
  const select = $("runs");
  const wanted = view?.run ?? new URLSearchParams(location.hash.slice(1)).get("run");
  select.replaceChildren(...runs.map((run) => new Option(`${run.run} (${run.stale_since ? "silent" : run.phase})`, run.run)));
  if (!runs.length && !view) {
    state("over", "no runs yet");
    notice("No runs here yet. Start one with “flowcredit train”; it will appear here.");
    return;
  }
  if (!view) notice("");
  const isKnown = runs.some((run) => run.run === wanted);
  select.value = isKnown ? wanted : "";
  if (isKnown || !wanted) show(wanted || runs[0].run);
  else if (!view) {
    state("over", "no such run");
    notice(unknown(wanted));
  }
}

$("runs").addEventListener("change", (event) => show(event.target.value));
$("token-open").addEventListener("click", askToken);
$("record-at").addEventListener("change", pickRecord);
$("record-prev").addEventListener("click", () => pageRecord(-1));
$("record-next").addEventListener("click", () => pageRecord(1));
for (const button of document.querySelectorAll("[data-command]")) {
  button.addEventListener("click", async () => {
    const name = button.dataset.command;
    if (name !== "stop" || (await dialog("confirm-dialog"))) command("POST", "commands", { command: name });
  });
}
window.addEventListener("hashchange", () => {
  const run = new URLSearchParams(location.hash.slice(1)).get("run");
  if (run && run !== view?.run) show(run);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of [charts.reward, charts.kl, charts.grad]) chart.clear();
  if (view) drawMetrics();
});
setInterval(() => view?.status && panels.drawAges(view.status), 1000);
for (const button of document.querySelectorAll("dialog [value=cancel]")) button.addEventListener("click", () => button.closest("dialog").close("cancel"));
document.addEventListener("visibilitychange", listRuns);
setInterval(listRuns, RUNS_EVERY_MS);
listRuns();
