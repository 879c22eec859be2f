// The config of a run, the differences from the compared runs, and the files to download.

import { ask, download } from "/static/api.js";
import { make } from "/static/panels.js";

const $ = (id) => document.getElementById(id);
const FILES = [["adapter", "Adapter of the newest checkpoint"], ["metrics", "metrics.jsonl"], ["config", "config.yaml"], ["events", "events.jsonl"]];

let shown = { run: null };

export async function showConfig(run, { session, method }, others, configs) {
  $("config-method").textContent = method ? `Method: ${method}.` : "";
  const key = JSON.stringify([run, session, others, configs]);
  if (shown.key === key) return;
  const isNew = shown.run !== run || shown.session !== session;
  shown = { run, session, key, fields: isNew ? null : shown.fields, sources: isNew ? {} : shown.sources, others, configs };
  drawFiles();
  drawDifferences();
  if (!isNew && shown.fields) return;
  const mine = shown;
  try {
    const { fields, sources } = await ask(`/runs/${encodeURIComponent(run)}/config`);
    if (mine.run === shown.run && mine.session === shown.session) Object.assign(shown, { fields, sources });
    $("config-notice").hidden = true;
  } catch (error) {
    if (mine.run !== shown.run || mine.session !== shown.session) return;
    shown.key = "";
    $("config-notice").textContent = `${error.message}.`;
    $("config-notice").hidden = false;
  }
  drawFields();
}

function drawFields() {
  const words = $("config-words").value.trim().toLowerCase();
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const source = (key) => shown.sources[key] ?? "default";
  const isShown = ([key, value]) => `${key}=${text(value)} ${source(key)}`.toLowerCase().includes(words) && !($("config-changed").checked && source(key) === "default");
  $("config-rows").replaceChildren(
    ...Object.entries(shown.fields ?? {}).filter(isShown).map(([key, value]) => {
      const line = document.createElement("tr");
      line.append(Object.assign(make("th", key), { scope: "row" }), make("td", text(value), "text"), make("td", source(key)));
      return line;
    }),
  );
}

function drawDifferences() {
  const { run, others, configs } = shown;
  const runs = [run, ...others].filter((each) => configs?.runs[each]);
  $("differences-card").hidden = others.length === 0;
  const words = runs.length < 2 ? "Their configs cannot be read here." : configs.keys.length ? "" : "They differ only in the seed.";
  $("differences-words").textContent = `${words}${configs?.left_out ? ` ${configs.left_out} further keys differ.` : ""}`;
  const head = document.createElement("tr");
  head.append(...["key", ...runs].map((text) => Object.assign(make("th", text), { scope: "col" })));
  $("differences-head").replaceChildren(head);
  const row = (key, values) => {
    const line = document.createElement("tr");
    line.append(Object.assign(make("th", key), { scope: "row" }), ...values.map((value) => make("td", value ?? "–", "text")));
    return line;
  };
  const rows = (configs?.keys ?? []).map((key) => row(key, runs.map((each) => configs.runs[each].values[key])));
  $("differences-rows").replaceChildren(...(runs.length < 2 ? [] : [...rows, row("seed", runs.map((each) => String(configs.runs[each].seed)))]));
}

function drawFiles() {
  const { run, others } = shown;
  const runs = [run, ...others];
  const report = `/report?${new URLSearchParams(runs.map((each) => ["run", each]))}`;
  const named = [...FILES.map(([name, text]) => [`/runs/${encodeURIComponent(run)}/files/${name}`, text]), [report, runs.length > 1 ? `Report of these ${runs.length} runs (HTML)` : "Report (HTML)"]];
  $("files").replaceChildren(
    ...named.map(([path, text]) => {
      const [item, button] = [document.createElement("li"), make("button", text)];
      button.type = "button";
      button.addEventListener("click", async () => {
        $("files-notice").textContent = `${text}: is being made ready`;
        button.disabled = true;
        try {
          await download(path);
          $("files-notice").textContent = `${text}: saved`;
        } catch (error) {
          $("files-notice").textContent = `${text}: ${error.message}`;
        }
        button.disabled = false;
      });
      item.append(button);
      return item;
    }),
  );
}

for (const id of ["config-words", "config-changed"]) $(id).addEventListener("input", drawFields);
