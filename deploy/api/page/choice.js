// The reader's choices. Run, view and compared runs are part of the address, so that a link shows the same; the browser
// stores axis, smoothing and zoom.

const KEY = "flowcredit-charts";
const ZOOMS_KEPT = 20;
export const MOST_RUNS = 12; // in one comparison, the same limit as the server's
export const VIEWS = ["overview", "curves", "images", "runs", "config", "events"];

export const charts = { by: "iteration", smoothing: 0, zooms: {}, ...kept() };

function kept() {
  try {
    const { by, smoothing, zooms } = JSON.parse(localStorage.getItem(KEY)) ?? {};
    return { by: by === "seconds" ? by : "iteration", smoothing: smoothing >= 0 && smoothing < 1 ? smoothing : 0, zooms: Object(zooms) };
  } catch {
    return {};
  }
}

export function keep(changes) {
  Object.assign(charts, changes);
  localStorage.setItem(KEY, JSON.stringify(charts));
}

const named = (run) => `${charts.by} ${run}`;
export const zoomOf = (run) => charts.zooms[named(run)] ?? null;

// `zoom` is [from, to] on the current axis, or null for the whole axis.
export function setZoom(run, zoom) {
  const { [named(run)]: _, ...others } = charts.zooms;
  const newest = Object.entries(others).slice(-ZOOMS_KEPT + 1);
  keep({ zooms: Object.fromEntries(zoom ? [...newest, [named(run), zoom]] : newest) });
}

export function address() {
  const held = new URLSearchParams(location.hash.slice(1));
  const view = held.get("view");
  const run = held.get("run");
  const others = [...new Set(held.getAll("with"))].filter((other) => other !== run).slice(0, MOST_RUNS - 1);
  return { run, view: VIEWS.includes(view) ? view : VIEWS[0], others };
}

// Changes a part of the address; the page updates at the browser's event for that change.
export function go(changes, { isQuiet = false } = {}) {
  const { run, view, others } = { ...address(), ...changes };
  const held = new URLSearchParams();
  if (run) held.set("run", run);
  if (view !== VIEWS[0]) held.set("view", view);
  for (const other of others) if (other !== run) held.append("with", other);
  if (isQuiet) history.replaceState(null, "", `#${held}`);
  else location.hash = held;
}
