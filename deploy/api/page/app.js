// The page: it selects a run and a view, keeps what it has received of the run, and updates every panel from that.

import { Refused, ask, askWithAge, follow, order, token } from "/static/api.js";
import { address, go } from "/static/choice.js";
import { showConfig } from "/static/config.js";
import { redraw, showCurves } from "/static/curves.js";
import { drawEvents } from "/static/events.js";
import { showImages } from "/static/images.js";
import * as panels from "/static/panels.js";
import { drawRuns, keepRuns } from "/static/runs.js";
import { drawTrajectories, explanation } from "/static/trajectories.js";

const $ = (id) => document.getElementById(id);
const ASK_MS = 1000; // between two requests for the news of a run
const ASK_OVER_MS = 5000; // the same for a run that has ended or is silent
const RUNS_EVERY_MS = 5000;
const OUTCOMES_SHOWN = 5;
const EVENTS_KEPT = 1000;
const SECTIONS = { overview: "overview", curves: "curves", images: "images", runs: "runs-view", config: "config", events: "events-view" };

let view = null; // the current run and its received data
let listed = []; // all runs
let compared = { key: "", configs: null }; // the differences between the run and the compared runs

function show(run) {
  if (view?.run === run) return;
  view?.end();
  view = { run, status: null, session: null, events: [], record: null, followsNewest: true, end: () => {} };
  document.title = `${run} – flowcredit`;
  drawEvents([]);
  $("trajectories").replaceChildren();
  const mine = view;
  const position = () => ({
    session: mine.session ?? "",
    sinceEvent: mine.events.at(-1)?.number ?? 0,
    pause: mine.status && panels.isOver(mine.status) ? ASK_OVER_MS : ASK_MS,
  });
  view.end = follow(run, position, (name, data) => mine === view && receive(name, data), (isLive, error) => mine === view && link(isLive, error));
}

function receive(name, data) {
  if (name === "status") {
    if (view.session && view.session !== data.session) {
      Object.assign(view, { events: [], record: null });
      drawEventsSoon();
    }
    view.session = data.session;
    view.status = data;
    drawStatus();
    drawView();
  } else if (name === "event") {
    view.events.push(data);
    view.events.splice(0, view.events.length - EVENTS_KEPT);
    drawEventsSoon();
  }
}

let isEventsDue = false;

// Draws the events once a frame: an answer can bring a thousand of them.
function drawEventsSoon() {
  if (isEventsDue) return;
  isEventsDue = true;
  requestAnimationFrame(() => {
    isEventsDue = false;
    drawEvents(view?.events ?? []);
  });
}

// Views

function route() {
  const { run, view: wanted } = address();
  for (const [name, id] of Object.entries(SECTIONS)) $(id).hidden = name !== wanted;
  for (const button of document.querySelectorAll("[data-view]")) button.toggleAttribute("aria-current", button.dataset.view === wanted);
  for (const button of document.querySelectorAll("[data-view][aria-current]")) button.setAttribute("aria-current", "page");
  if (run && run !== view?.run) show(run);
  else if (view?.status) drawView();
  if (wanted === "runs") drawRuns();
}

// Draws the data of the view that is not in the newest status. A stamp changes when a run has new lines.
function drawView() {
  const { view: wanted, others } = address();
  const { run, status } = view;
  const known = others.filter((other) => listed.some((one) => one.run === other));
  const stampOf = (other) => JSON.stringify(listed.filter((one) => one.run === other).map((one) => [one.session, one.phase, one.iteration, one.heldout]));
  const stamp = `${status.session} ${status.lines} ${status.phase}`;
  if (wanted === "overview" || wanted === "curves") {
    showCurves({ run, stamp, view: wanted, others: known.map((other) => ({ run: other, stamp: stampOf(other) })), configs: compared.configs });
  }
  if (wanted === "images") showImages(run, status.session, status.rewards.heldout_iteration);
  if (wanted === "config") showConfig(run, status, known, compared.configs);
  compare([run, ...known]);
}

async function compare(runs) {
  const sessions = listed.filter((one) => runs.includes(one.run)).map((one) => one.session);
  const key = [...runs, view.session, ...sessions].join();
  if (compared.key === key) return;
  compared = { key, configs: null };
  if (runs.length < 2) return;
  try {
    const configs = await ask(`/configs?${new URLSearchParams(runs.map((run) => ["run", run]))}`);
    if (compared.key !== key) return;
    compared.configs = configs;
    drawView();
  } catch {
    compared.key = "";
  }
}

const AGAIN = "“flowcredit serve <run folder>” shows it again.";

function link(isLive, error) {
  const status = view.status;
  const hasEnded = status && panels.hasEnded(status);
  if (isLive) state("live", hasEnded ? "connected" : "live");
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
  $("health").textContent = status.health;
  panels.drawFacts($("facts"), status);
  $("progress").max = Math.max(1, status.iterations);
  $("progress").value = status.iteration;
  panels.drawAttention($("attention"), status);
  drawCredit(status);
  panels.drawUpdate($("update"), status);
  $("slow-side").textContent = status.bottleneck ? `Bottleneck: ${status.bottleneck.side}. ${status.bottleneck.message}.` : "No iteration has ended yet.";
  panels.drawStages($("stages"), status.metrics);
  panels.drawWork($("work"), status.pools);
  panels.drawQueues($("queues"), status);
  panels.drawLearners($("learners"), $("learners-words"), status);
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

function drawCredit({ credit, method }) {
  $("credit").hidden = !credit;
  if (!credit) return;
  $("credit-name").textContent = method ? `${method} (${credit.name}).` : `${credit.name}.`;
  $("credit-rule").textContent = credit.rule;
  $("credit-example").textContent = credit.example ? `Example. ${credit.example}` : "";
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
  if (!iterations.length) $("record-prompt").textContent = panels.isOver(view.status) ? "No trajectories were recorded." : "No trajectories are recorded yet.";
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
    $("record-prompt").textContent = `“${record.prompt}”. ${explanation(record, mine.status.credit)}`;
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
  let runs, age;
  try {
    ({ answer: runs, age } = await askWithAge("/runs"));
  } catch (error) {
    if (!view) {
      state("lost", "no connection");
      notice(error instanceof Refused ? `${error.message}.` : "The server does not answer; this page tries again.");
    }
    return;
  }
  const select = $("runs");
  const wanted = view?.run ?? address().run;
  listed = runs;
  keepRuns(runs, age);
  select.replaceChildren(...runs.map((run) => new Option(`${run.run} (${run.stale_since ? "silent" : run.phase})`, run.run)));
  if (!runs.length && !view) {
    state("over", "no runs yet");
    notice("No runs here yet. Start one with “flowcredit train”; it will appear here.");
    return;
  }
  if (!view) notice("");
  const isKnown = runs.some((run) => run.run === wanted);
  select.value = isKnown ? wanted : "";
  if (isKnown || !wanted) {
    if (!wanted) go({ run: runs[0].run }, { isQuiet: true });
    route();
    if (view) select.value = view.run;
  }
  else if (!view) {
    state("over", "no such run");
    notice(unknown(wanted));
  }
}

$("runs").addEventListener("change", (event) => go({ run: event.target.value }));
$("choose-runs").addEventListener("click", () => go({ view: "runs" }));
for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => go({ view: button.dataset.view }));
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
  route();
  if (view) $("runs").value = view.run;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setInterval(() => view?.status && panels.drawAges(view.status), 1000);
for (const button of document.querySelectorAll("dialog [value=cancel]")) button.addEventListener("click", () => button.closest("dialog").close("cancel"));
document.addEventListener("visibilitychange", listRuns);
setInterval(listRuns, RUNS_EVERY_MS);
listRuns();
