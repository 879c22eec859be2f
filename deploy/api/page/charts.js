// Charts: lines over iterations or seconds and stacked bars, drawn by uPlot, and the heat map of step rewards on a canvas.
/* global uPlot */

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ticks = (value) => (value === 0 ? "0" : Math.abs(value) < 0.001 || Math.abs(value) >= 1e5 ? value.toExponential(0) : String(+value.toPrecision(6)));
export const short = (value) => (value == null ? "–" : Math.abs(value) >= 0.001 || value === 0 ? value.toPrecision(4) : value.toExponential(2));

const newest = (values) => values.findLast((value) => value != null);

const COLORS = 6;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const FAINT = "55";
const BAND = "2e";

// The range of the values and a tenth more; equal values are in the middle of the axis.
function padded(_, low, high) {
  if (low == null || low === high) return [(low ?? 0) - (Math.abs(low ?? 0) / 10 || 1), (low ?? 0) + (Math.abs(low ?? 0) / 10 || 1)];
  const more = (high - low) / 10;
  return [low >= 0 && low < more ? 0 : low - more, high + more];
}

// The axis of a single point, for which uPlot would choose 0 to 100, or 0 to twice its position.
const around = (x) => [Math.max(0, x - 1), x + 1];

// The axis of bars begins at 0: otherwise the lowest part would look smaller than it is.
const fromZero = (_, low, high) => [0, (high || 1) * 1.1];

export class Lines {
  // Calls `onZoom(window)` with the part of the axis that the reader has marked, or null for the whole axis.
  constructor(holder, height, label, onZoom) {
    this.holder = holder;
    this.height = height;
    this.label = label;
    this.onZoom = onZoom;
    this.key = "";
    new ResizeObserver(() => holder.clientWidth && this.plot?.setSize({ width: holder.clientWidth, height })).observe(holder);
  }

  // parts: [{ name, color, dash, x, y, low, high, faint: [{ x, y }], dots }]; `low` and `high` make a band about `y`.
  show(parts, { by = "iteration", zoom = null, isStacked = false, summary = null } = {}) {
    const drawn = parts.filter((part) => part.x.length);
    if (!drawn.length) return this.clear("nothing yet");
    this.zoom = zoom;
    this.holder.setAttribute("role", "img");
    this.holder.setAttribute("aria-label", `${this.label}: ${summary ?? drawn.map((part) => `${part.name} now ${short(part.y.findLast((value) => value != null))}`).join(", ")}`);
    const { tables, series, bands } = isStacked ? stacked(drawn) : layered(drawn);
    const data = uPlot.join(tables);
    const key = JSON.stringify([by, isStacked, series.map((one) => [one.label, one.class, one.stroke, one.dash, one.points?.show]), bands.map((band) => band.series)]);
    if (this.plot && key === this.key) {
      this.own = drawn;
      this.plot.setData(data);
      return this.plot.setLegend({ idx: null });
    }
    this.clear();
    this.key = key;
    this.own = drawn;
    this.plot = new uPlot(this.options(series, bands, by, isStacked), data, this.holder);
    this.plot.setLegend({ idx: null }); // without the cursor, the legend shows the newest values
  }

  clear(text) {
    this.plot?.destroy();
    this.plot = null;
    this.key = "";
    this.holder.textContent = "";
    if (text) this.holder.append(Object.assign(document.createElement("p"), { className: "empty", textContent: text }));
  }

  options(series, bands, by, isStacked) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui" };
    const onSelect = (plot) => {
      const { left, width } = plot.select;
      if (width > 4) this.onZoom?.([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    };
    return {
      width: this.holder.clientWidth || 300,
      height: this.height,
      scales: { x: { time: false, range: (plot, low, high) => this.zoom ?? (plot.data[0].length === 1 ? around(plot.data[0][0]) : [low, high]) }, y: { range: isStacked ? fromZero : padded } },
      axes: [{ ...axis, values: (_, at) => at.map((v) => (Number.isInteger(v) ? v : "")) }, { ...axis, size: 64, values: (_, at) => at.map(ticks) }],
      series: [{ label: by === "seconds" ? "seconds" : "iteration", value: (plot, value) => Math.round(value ?? newest(plot.data[0])) }, ...series],
      bands,
      cursor: { y: false, sync: { key: by }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.onZoom?.(null) } },
      hooks: { setSelect: [onSelect] },
      legend: { live: true },
    };
  }
}

// Lines: bands and faint lines are drawn first, and only the line itself is in the legend.
function layered(parts) {
  const [tables, series, bands] = [[], [], []];
  const add = (x, y, options) => {
    tables.push([x, y]);
    series.push({ spanGaps: true, points: { show: false }, ...options });
    return series.length; // the axis is number 0
  };
  for (const part of parts) {
    const stroke = color(`--c${part.color % COLORS}`);
    const aid = { label: `${part.name} `, class: "aid", stroke: `${stroke}${FAINT}`, width: 1 };
    for (const line of part.faint ?? []) add(line.x, line.y, aid);
    if (part.low) {
      const high = add(part.x, part.high, { ...aid, width: 0 });
      const low = add(part.x, part.low, { ...aid, width: 0 });
      bands.push({ series: [high, low], fill: `${stroke}${BAND}` });
    }
    add(part.x, part.y, {
      label: part.name,
      stroke,
      dash: DASHES[(part.dash ?? 0) % DASHES.length],
      width: part.dots ? 2.5 : 1.6,
      points: { show: Boolean(part.dots) || part.x.length < 2, size: 7, fill: stroke },
      value: (plot, value, at, index) => short(index == null ? newest(plot.data[at]) : value),
    });
  }
  return { tables, series, bands };
}

// Stacked bars: the sum of all parts is drawn first, and the smaller sums over it.
function stacked(parts) {
  const x = parts[0].x;
  const sums = parts.reduce((held, part) => [...held, part.y.map((value, at) => (value ?? 0) + (held.at(-1)?.[at] ?? 0))], []);
  const order = parts.map((_, at) => at).reverse();
  const series = order.map((at) => ({
    label: parts[at].name,
    stroke: color(`--c${parts[at].color % COLORS}`),
    fill: color(`--c${parts[at].color % COLORS}`),
    width: 0,
    points: { show: false },
    paths: uPlot.paths.bars({ size: [0.92, 60] }),
    value: (_, __, ___, index) => short(index == null ? newest(parts[at].y) : parts[at].y[index]),
  }));
  return { tables: [[x, ...order.map((at) => sums[at])]], series, bands: [] };
}

const STOPS = [[45, 17, 96], [123, 31, 162], [208, 59, 109], [245, 138, 60], [251, 228, 113]];

function shade(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (STOPS.length - 1);
  const [low, high] = [STOPS[Math.floor(at)], STOPS[Math.floor(at) + 1]];
  return low.map((value, index) => Math.round(value + (high[index] - value) * (at % 1)));
}

export class Heat {
  constructor(holder) {
    this.holder = holder;
    this.key = "";
  }

  // iterations: [n]; steps: [s] names; values: [n][s]
  show(iterations, steps, values, unit = "iteration") {
    if (!iterations.length || !steps.length) {
      this.holder.textContent = "";
      this.key = "";
      this.holder.append(Object.assign(document.createElement("p"), { className: "empty", textContent: "no step rewards yet" }));
      return;
    }
    this.data = { iterations, steps, values, unit };
    if (steps.join() !== this.key) this.build(steps);
    this.key = steps.join();
    const top = values.flat().reduce((most, value) => Math.max(most, value ?? 0), 1e-12);
    // At most 600 columns: in a longer run a column is the mean of neighbouring iterations.
    const columns = Math.min(iterations.length, 600);
    this.canvas.width = columns;
    this.canvas.height = steps.length;
    const context = this.canvas.getContext("2d");
    const pixels = context.createImageData(columns, steps.length);
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((column * iterations.length) / columns);
      const to = Math.max(from + 1, Math.floor(((column + 1) * iterations.length) / columns));
      for (let row = 0; row < steps.length; row++) {
        const held = values.slice(from, to).map((line) => line[row]).filter((value) => value != null);
        const offset = 4 * (row * columns + column);
        if (!held.length) continue;
        const mean = held.reduce((sum, value) => sum + value, 0) / held.length;
        pixels.data.set([...shade(mean / top), 255], offset);
      }
    }
    context.putImageData(pixels, 0, 0);
    this.under.replaceChildren(...[iterations[0], iterations.at(-1)].map((at) => Object.assign(document.createElement("span"), { textContent: `${unit} ${Math.round(at)}` })));
    this.most.textContent = short(top);
    const newest = values.at(-1);
    this.canvas.setAttribute("aria-label", "Mean absolute step reward in the newest iteration: " + steps.map((step, row) => `step ${step} ${short(newest[row])}`).join(", ") + ". Use the arrow keys for other iterations.");
    if (document.activeElement === this.canvas) this.read(this.at ?? [iterations.length - 1, 0]);
  }

  build(steps) {
    this.holder.innerHTML = `<div class="row"><div class="steps" aria-hidden="true"></div><canvas tabindex="0" role="img"></canvas></div>
      <div class="under" aria-hidden="true"></div><output aria-live="polite"></output>
      <div class="scale" aria-hidden="true">0 <i></i> <span></span></div>`;
    this.canvas = this.holder.querySelector("canvas");
    const height = Math.max(120, Math.min(300, steps.length * 30));
    const every = Math.ceil((14 * steps.length) / height); // as many labels as fit, each next to its row
    this.canvas.style.height = `${height}px`;
    this.canvas.style.imageRendering = "pixelated";
    this.under = this.holder.querySelector(".under");
    this.most = this.holder.querySelector(".scale span");
    this.output = this.holder.querySelector("output");
    this.holder.querySelector(".steps").append(...steps.map((step, row) => Object.assign(document.createElement("span"), { textContent: row % every ? "" : `step ${step}` })));
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const share = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      this.read([Math.floor(share[0] * this.data.iterations.length), Math.floor(share[1] * this.data.steps.length)]);
    });
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      const [x, y] = this.at ?? [this.data.iterations.length - 1, 0];
      this.read([x + move[0], y + move[1]]);
    });
  }

  read([x, y]) {
    const { iterations, steps, values, unit } = this.data;
    this.at = [Math.max(0, Math.min(iterations.length - 1, x)), Math.max(0, Math.min(steps.length - 1, y))];
    const [column, row] = this.at;
    this.output.textContent = `${unit} ${Math.round(iterations[column])}, step ${steps[row]}: ${short(values[column][row])}`;
  }
}
