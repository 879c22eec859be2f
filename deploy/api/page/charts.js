// Lines over iterations, drawn by uPlot, and the heat map of gain by step on a canvas.
/* global uPlot */

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => (value == null ? "–" : Math.abs(value) >= 0.001 || value === 0 ? value.toPrecision(4) : value.toExponential(2));
const ticks = (value) => (value === 0 ? "0" : Math.abs(value) < 0.001 || Math.abs(value) >= 1e5 ? value.toExponential(0) : String(+value.toPrecision(6)));

export class Lines {
  constructor(holder, height, label) {
    this.holder = holder;
    this.height = height;
    this.label = label;
    this.names = "";
    new ResizeObserver(() => this.plot?.setSize({ width: holder.clientWidth, height })).observe(holder);
  }

  // series: [{ name, values, dots }], all over the same `x`.
  show(x, series) {
    const names = series.map((one) => one.name).join("|");
    if (!x.length || !series.length) return this.clear("nothing yet");
    const data = [x, ...series.map((one) => one.values)];
    this.holder.setAttribute("role", "img");
    this.holder.setAttribute("aria-label", `${this.label}: ` + series.map((one) => `${one.name} now ${short(last(one.values))}`).join(", "));
    if (this.plot && names === this.names) return this.plot.setData(data);
    this.clear();
    this.names = names;
    this.plot = new uPlot(this.options(series), data, this.holder);
  }

  clear(text) {
    this.plot?.destroy();
    this.plot = null;
    this.names = "";
    this.holder.textContent = "";
    if (text) this.holder.append(Object.assign(document.createElement("p"), { className: "empty", textContent: text }));
  }

  options(series) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui" };
    const lines = series.map((one, index) => ({
      label: one.name,
      stroke: color(`--c${index % 6}`),
      width: one.dots ? 2.5 : 1.5,
      spanGaps: true,
      points: { show: Boolean(one.dots), size: 8 },
      value: (_, value) => short(value),
    }));
    return {
      width: this.holder.clientWidth || 300,
      height: this.height,
      scales: { x: { time: false } },
      axes: [{ ...axis, values: (_, at) => at.map((v) => (Number.isInteger(v) ? v : "")) }, { ...axis, size: 54, values: (_, at) => at.map(ticks) }],
      series: [{ label: "iteration", value: (_, value) => value ?? "–" }, ...lines],
      cursor: { y: false },
      legend: { live: true },
    };
  }
}

const last = (values) => values.findLast((value) => value != null);

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
  show(iterations, steps, values) {
    if (!iterations.length || !steps.length) {
      this.holder.textContent = "";
      this.key = "";
      this.holder.append(Object.assign(document.createElement("p"), { className: "empty", textContent: "nothing yet: the credit rule in use may have no gains" }));
      return;
    }
    this.data = { iterations, steps, values };
    if (steps.join() !== this.key) this.build(steps);
    this.key = steps.join();
    const top = values.flat().reduce((most, value) => Math.max(most, value ?? 0), 1e-12);
    // At most 600 columns: neighbouring iterations share one, as their mean.
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
    this.under.replaceChildren(...[iterations[0], iterations.at(-1)].map((at) => Object.assign(document.createElement("span"), { textContent: `iteration ${at}` })));
    this.most.textContent = short(top);
    const newest = values.at(-1);
    this.canvas.setAttribute("aria-label", "Mean absolute gain in the newest iteration: " + steps.map((step, row) => `step ${step} ${short(newest[row])}`).join(", ") + ". Arrow keys read other iterations.");
    if (document.activeElement === this.canvas) this.read(this.at ?? [iterations.length - 1, 0]);
  }

  build(steps) {
    this.holder.innerHTML = `<div class="row"><div class="steps" aria-hidden="true"></div><canvas tabindex="0" role="img"></canvas></div>
      <div class="under" aria-hidden="true"></div><output aria-live="polite"></output>
      <div class="scale" aria-hidden="true">0 <i></i> <span></span></div>`;
    this.canvas = this.holder.querySelector("canvas");
    const height = Math.max(120, Math.min(300, steps.length * 30));
    const every = Math.ceil((14 * steps.length) / height); // as many labels as have room, each beside its own row
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
    const { iterations, steps, values } = this.data;
    this.at = [Math.max(0, Math.min(iterations.length - 1, x)), Math.max(0, Math.min(steps.length - 1, y))];
    const [column, row] = this.at;
    this.output.textContent = `iteration ${iterations[column]}, step ${steps[row]}: ${short(values[column][row])}`;
  }
}
