// Turns the curves of runs into the parts of a chart: smoothed, with one band for runs that differ only in the seed.

// The exponential mean of a curve with bias correction; `each` is the number of lines that a point stands for.
export function smoothed(line, weight) {
  if (!weight) return line;
  const kept = weight ** (line.each ?? 1);
  let [mean, total] = [0, 0];
  const y = line.y.map((value) => {
    mean = kept * mean + (1 - kept) * value;
    total = kept * total + (1 - kept);
    return mean / total;
  });
  return { ...line, y };
}

// The mean, the lowest and the highest of several lines, where all of them have values; between points, lines are straight.
export function banded(lines) {
  const begin = Math.max(...lines.map((line) => line.x[0]));
  const end = Math.min(...lines.map((line) => line.x.at(-1)));
  const all = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const x = begin <= end ? all.filter((at) => at >= begin && at <= end) : all;
  const rows = lines.map((line) => interpolated(line, x));
  const across = (reduce) => x.map((_, at) => reduce(rows.map((row) => row[at])));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return { x, y: across(mean), low: across((values) => Math.min(...values)), high: across((values) => Math.max(...values)) };
}

function interpolated({ x, y }, wanted) {
  let next = 0;
  return wanted.map((at) => {
    while (next < x.length - 1 && x[next] < at) next++;
    if (next === 0 || x[next] <= at) return y[next];
    return y[next - 1] + ((y[next] - y[next - 1]) * (at - x[next - 1])) / (x[next] - x[next - 1]);
  });
}

// One metric in an answer of the server; null if the run does not have it.
export function lineOf(curves, metric) {
  const found = curves?.series[metric];
  return found ? { x: curves.x[found.x], y: found.y, low: found.low, high: found.high, each: found.each } : null;
}

// groups: [{ name, runs: [curves] }]; metrics: the names to draw; label(metric): its name in the legend.
export function partsOf(groups, metrics, { label, weight = 0, dots = false }) {
  const drawn = groups.filter((group) => metrics.some((metric) => group.runs.some((curves) => lineOf(curves, metric))));
  const parts = [];
  for (const group of drawn) {
    for (const [number, metric] of metrics.entries()) {
      const lines = group.runs.map((curves) => lineOf(curves, metric)).filter(Boolean);
      if (!lines.length) continue;
      const name = drawn.length < 2 && groups.length < 2 ? label(metric) : metrics.length > 1 ? `${group.name}: ${label(metric)}` : group.name;
      const look = groups.length < 2 ? { color: number, dash: Math.floor(number / 6) } : { color: group.number, dash: metrics.length > 1 ? number : Math.floor(group.number / 6) };
      parts.push({ name, dots, ...look, ...(lines.length > 1 ? ofSeeds(lines, weight) : ofOne(lines[0], weight)) });
    }
  }
  return parts;
}

function ofOne(line, weight) {
  if (!weight) return line;
  return { ...smoothed(line, weight), low: null, high: null, faint: [line] };
}

function ofSeeds(lines, weight) {
  const smooth = lines.map((line) => smoothed(line, weight));
  return { ...banded(smooth), faint: smooth };
}

// Groups the runs that differ only in the seed; `configs` is the server's comparison, or null until it arrives.
export function groupsOf(runs, configs) {
  const found = new Map();
  for (const { run, curves } of runs) {
    const key = configs?.runs[run]?.group ?? run;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push({ run, curves });
  }
  return [...found.values()].map((members, number) => ({
    name: nameOf(members.map((member) => member.run)),
    number,
    members: members.map((member) => member.run),
    runs: members.map((member) => member.curves),
  }));
}

function nameOf(runs) {
  if (runs.length < 2) return runs[0];
  const stems = new Set(runs.map((run) => run.replace(/[_.\-0-9]+$/, "")));
  return stems.size === 1 && [...stems][0] ? [...stems][0] : runs[0];
}
