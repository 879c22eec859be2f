// The panels with texts and numbers.

export const make = (tag, text, className = "") => Object.assign(document.createElement(tag), { textContent: text ?? "", className });
export const number = (value, digits = 3) => (value == null ? "–" : value.toFixed(digits));
const small = (value) => (value == null ? "–" : value === 0 ? "0" : Math.abs(value) < 0.001 ? value.toExponential(1) : value.toPrecision(3));
const TONES = { running: "ok", finished: "ok", starting: "", paused: "warn", stopping: "warn", stopped: "warn", failed: "bad" };

export const hasEnded = (status) => ["finished", "stopped", "failed"].includes(status.phase);
export const isOver = (status) => hasEnded(status) || status.stale_since != null;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
export const date = (seconds) => new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
export const signed = (value, digits = 3) => (value == null ? "–" : `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(digits)}`);

export function span(seconds) {
  if (seconds == null) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const parts = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const named = parts.map((count, at) => (count ? `${count} ${"dhms"[at]}` : "")).filter(Boolean);
  return named.slice(0, 2).join(" ") || "0 s";
}

const ago = (seconds) => {
  const passed = Date.now() / 1000 - seconds;
  return passed < 2 ? "now" : `${span(passed)} ago`;
};

function fact(name, value, more, tone) {
  const box = make("div", "", "fact");
  const shown = make("b", value, tone ?? "");
  box.append(make("span", name), shown, make("small", more));
  return box;
}

// The interval of a held-out score's change, or that it may be chance.
export function chance({ heldout_change: interval }) {
  if (!interval) return "";
  const [low, high] = interval;
  return `${low > 0 || high < 0 ? "" : ", within chance"}, 95 %: ${signed(low)} to ${signed(high)}`;
}

export function drawFacts(holder, status) {
  const { rewards } = status;
  const phase = fact("Phase", "", "");
  const isStale = status.stale_since != null;
  phase.querySelector("b").append(make("span", isStale ? "silent" : status.phase, `badge ${isStale ? "bad" : TONES[status.phase]}`));
  const age = phase.querySelector("small");
  age.id = "age";
  const isChance = Math.abs(rewards.trend) <= 2 * (rewards.trend_error ?? 0);
  const trend = rewards.trend == null ? "" : `${signed(rewards.trend)} in 10 iterations${isChance ? ", within chance" : ""}`;
  const heldout = rewards.heldout_first == null ? "" : `from ${number(rewards.heldout_first)}, at iteration ${rewards.heldout_iteration}${chance(rewards)}`;
  holder.replaceChildren(
    phase,
    fact("Iteration", `${status.iteration} / ${status.iterations}`, status.eta_s ? `${span(status.eta_s)} left` : ""),
    fact("Reward", number(rewards.now), trend),
    fact("Held-out score", number(rewards.heldout), heldout),
    ...Object.entries(rewards.components).filter(([, value]) => Math.abs((value ?? 0) - (rewards.now ?? 0)) > 1e-6).slice(0, 4).map(([name, value]) => fact(name, number(value), "")),
    fact("Bottleneck", status.bottleneck?.side ?? "–", status.bottleneck ? `${Math.round(100 * status.bottleneck.share)} % of an iteration` : ""),
    fact("Adapter version", status.adapter_version ?? "–", status.checkpoint ? `checkpoint ${status.checkpoint}` : "no checkpoint yet"),
  );
  drawAges(status);
}

export function drawAges(status) {
  const age = document.getElementById("age");
  if (age) age.textContent = `${hasEnded(status) ? "ended" : "updated"} ${ago(status.updated)}`;
}

export function drawAttention(holder, status) {
  const items = status.conditions.filter((condition) => condition.status !== "True").map((condition) => make("li", `${condition.type}: ${condition.message}`));
  if (status.stale_since != null) items.unshift(make("li", `The run has been silent since ${clock(status.stale_since)}: no heartbeat, so the driver or its board is gone. The page shows its last state.`));
  if (status.phase === "failed") items.push(...status.errors.slice(-1).map((error) => make("li", error.message)));
  if (!items.length) items.push(make("li", status.conditions.length ? "No problems." : "No conditions are known.", "good"));
  holder.replaceChildren(...items);
}

const percent = (digits) => (value) => (value == null ? "–" : `${(100 * value).toFixed(digits)} %`);
const UPDATE = [
  ["Ratio, mean", "train/ratio_mean", (value) => number(value, 4)],
  ["First ratio deviation", "train/first_ratio_deviation", small, (value, status) => value && !status.staleness],
  ["Clip fraction", "train/clip_fraction", percent(1)],
  ["Approximate KL", "train/approx_kl", small],
  ["Gradient norm", "train/grad_norm", small],
  ["Groups without contrast", "group/zero_variance", percent(0)],
  ["Missing scores", "reward/missing", (value) => value ?? "–", (value) => value],
]; // label, name in docs/metrics.md, how it is written, when it is a warning

export function drawUpdate(holder, status) {
  const facts = UPDATE.map(([label, name, form, warns]) => {
    const value = status.metrics[name];
    return fact(label, form(value), "", warns?.(value, status) ? "warn" : "");
  });
  holder.replaceChildren(...facts, fact("Staleness", status.staleness ?? "–", "updates"));
}

function bar(name, share, value) {
  const line = make("div", "", "bar");
  const track = make("span", "", "track");
  const fill = make("span", "", "fill");
  fill.style.setProperty("--w", `${Math.min(100, 100 * share)}%`);
  track.append(fill);
  line.append(make("span", name), track, make("span", value, "value"));
  return line;
}

export function drawStages(holder, metrics) {
  const named = Object.entries(metrics).filter(([name, seconds]) => /^seconds\/(?!iteration$|evaluation$)/.test(name) && seconds != null);
  const stages = named.map(([name, seconds]) => [name.slice("seconds/".length), seconds]);
  const total = stages.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  holder.replaceChildren(...stages.map(([name, seconds]) => bar(name.replaceAll("_", " "), seconds / total, `${seconds.toFixed(1)} s`)));
}

export function drawWork(holder, pools) {
  const known = pools.filter((pool) => pool.busy_share != null);
  document.getElementById("h-work").hidden = !known.length;
  holder.replaceChildren(...known.map((pool) => bar(pool.ready ? `${pool.name} × ${pool.ready}` : pool.name, pool.busy_share, `${Math.round(100 * pool.busy_share)} %`)));
}

// The learner group: the work of each worker in the newest update, and whether all hold the same adapter.
export function drawLearners(holder, words, status) {
  const workers = status.actors.filter((actor) => actor.kind === "learner");
  const digests = new Set(workers.map((worker) => worker.adapter_digest).filter(Boolean));
  const same = digests.size > 1 ? "Their digests differ: see the conditions." : digests.size ? `All hold adapter ${[...digests][0]}.` : "";
  words.textContent = workers.length ? `${workers.length} learner ${workers.length === 1 ? "worker" : "workers"}. ${workers.length > 1 ? same : ""}` : "No learner worker is known yet.";
  holder.replaceChildren(
    ...workers.map((worker) => {
      const fetched = worker.fetched_bytes == null ? "" : `, ${(worker.fetched_bytes / 1e6).toFixed(1)} MB`;
      const share = worker.busy_share == null ? worker.state : `${Math.round(100 * worker.busy_share)} %`;
      return bar(`${worker.name}${fetched}`, worker.busy_share ?? 0, share);
    }),
  );
}

const QUEUES = { "groups/in_work": "Groups in rollout or scoring", "groups/scored": "Groups scored, not yet trained on" };

export function drawQueues(holder, status) {
  const queues = [
    ...Object.entries(status.queues).map(([name, count]) => [QUEUES[name] ?? `Images for ${name.replace("images/", "")}`, count]),
    ...status.pools.filter((pool) => pool.is_resizable).map((pool) => [`Calls for ${pool.name}`, pool.queue]),
  ];
  document.getElementById("h-queues").hidden = !queues.length;
  holder.replaceChildren(...queues.map(([name, count]) => fact(name, count, "")));
}

// The form of a pool is made once, so that a number is not lost while it is typed.
export function drawPools(holder, status, scale) {
  const names = status.pools.map((pool) => pool.name).join();
  if (holder.dataset.names !== names) {
    holder.dataset.names = names;
    holder.replaceChildren(...status.pools.map((pool) => poolForm(pool, scale)));
  }
  status.pools.forEach((pool, at) => {
    const form = holder.children[at];
    const queue = pool.queue ? `, ${pool.queue} calls wait` : "";
    const gap = pool.ready === pool.desired ? "" : ` of ${pool.desired} desired`;
    const text = hasEnded(status) ? "" : `${pool.ready} ready${gap}, ${pool.busy} busy${queue}${pool.restarts ? `, ${pool.restarts} restarts` : ""}`;
    const now = form.querySelector(".now");
    if (now.textContent !== text) now.textContent = text;
    const input = form.querySelector("input");
    if (form.dataset.desired !== String(pool.desired)) {
      form.dataset.desired = pool.desired;
      if (document.activeElement !== input) input.value = pool.desired;
    }
    for (const control of [input, form.querySelector("button")]) control.disabled = isOver(status) || !pool.is_resizable;
  });
}

function poolForm(pool, scale) {
  const form = make("form", "", "pool");
  const label = make("label");
  const input = Object.assign(document.createElement("input"), { type: "number", min: 1, max: 1024, required: true, value: pool.desired });
  input.setAttribute("aria-label", `Actors of ${pool.name}`);
  label.append(make("span", pool.name, "name"), input);
  form.append(label, Object.assign(make("button", "Scale"), { type: "submit" }), make("span", "", "now"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    scale(pool.name, Number(input.value));
  });
  return form;
}

export function row(cells) {
  const line = document.createElement("tr");
  line.append(...cells.map(([text, className, tag]) => make(tag ?? "td", text, className)));
  return line;
}

export function drawConditions(holder, conditions) {
  const tone = { True: "ok", False: "bad", Unknown: "warn" };
  const word = { True: "✓ good", False: "✗ not good", Unknown: "? unknown" };
  holder.replaceChildren(
    ...conditions.map((condition) => {
      const line = row([[condition.type], [`${word[condition.status]}: ${condition.reason}`, tone[condition.status]], [clock(condition.since)]]);
      line.title = condition.message;
      return line;
    }),
  );
}

const gib = (bytes) => (bytes == null ? "–" : (bytes / 2 ** 30).toFixed(1));

export function drawActors(holder, status) {
  holder.replaceChildren(
    ...status.actors.map((actor) => {
      const line = row([
        [actor.name],
        [actor.state, actor.state === "waiting" ? "warn" : ""],
        [actor.node || "not placed yet"],
        [actor.adapter_version ?? "–"],
        [actor.adapter_digest ?? "–"],
        [actor.calls, "n"],
        [actor.calls_per_minute || "–", "n"],
        [actor.last_seen ? clock(actor.last_seen) : "never"],
        [actor.restarts, actor.restarts ? "n warn" : "n"],
        [gib(actor.usage.memory_bytes), "n"],
        [gib(actor.usage.gpu_memory_bytes), "n"],
        [actor.usage.gpu_share == null ? "–" : `${Math.round(100 * actor.usage.gpu_share)} %`, "n"],
      ]);
      line.title = [
        actor.node_id && `Ray node ${actor.node_id}`,
        actor.busy_share != null && `worked in ${Math.round(100 * actor.busy_share)} % of the newest iteration`,
        actor.fetched_bytes != null && `fetched ${(actor.fetched_bytes / 1e6).toFixed(1)} MB for it`,
      ].filter(Boolean).join("; ");
      return line;
    }),
  );
}
