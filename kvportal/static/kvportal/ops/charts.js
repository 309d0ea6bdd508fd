// uPlot with the page's colours, redrawn when the theme changes.

import { clock } from "./format.js";
import uPlot from "../vendor/uplot-1.6.32.js";

const drawn = new Set();

function colour(name) {
  // light-dark() is resolved only in a computed property of an element.
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function tint(rgb, alpha) {
  return rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
}

/** A chart that builds itself when it is first seen with data, and again when the theme changes. */
class Chart {
  #host;
  #options;
  #plot = null;
  #data = null;

  constructor(host, options) {
    this.#host = host;
    this.#options = options;
    drawn.add(this);
    new ResizeObserver(() => this.#fit()).observe(host);
  }

  setData(data) {
    this.#data = data;
    if (this.#plot) this.#plot.setData(data);
    else if (this.#host.clientWidth > 0) this.#build();
  }

  #build() {
    this.#host.replaceChildren();
    const size = { width: this.#host.clientWidth, height: this.#host.clientHeight };
    this.#plot = new uPlot({ ...this.#options(), ...size }, this.#data, this.#host);
  }

  #fit() {
    if (this.#plot) this.#plot.setSize({ width: this.#host.clientWidth, height: this.#host.clientHeight });
    else if (this.#data) this.#build();
  }

  retheme() {
    if (!this.#plot) return;
    this.#plot.destroy();
    this.#build();
  }
}

function rethemeAll() {
  for (const chart of drawn) chart.retheme();
}
new MutationObserver(rethemeAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rethemeAll);

const SECONDS = 600;
const LEAST_SECONDS = 60;
/** The last ten minutes; a history that is shorter than a minute stays at the right edge. */
const lastMinutes = (u, min, max) => [Math.max(max - SECONDS, Math.min(min, max - LEAST_SECONDS)), max];
/** Pixels between two times on an axis: as wide as `00:00:00` and a gap. */
const LABEL_SPACE = 84;
/** The same clock as everywhere else on the page. */
const tzDate = (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC");

const flatSafe = (u, min, max) => {
  if (min === null) return [0, 1];
  const top = max > 0 ? max : 1;
  const room = (top - Math.min(min, 0)) * 0.08;
  return [Math.min(0, min), top + room];
};

/** A line without axes; `count` lines share the chart. Decoration: the numbers are beside it. */
export function sparkline(host, count = 1) {
  const names = ["--kv-chart", "--kv-chart-2"];
  return new Chart(host, () => ({
    cursor: { show: false },
    legend: { show: false },
    select: { show: false },
    axes: [{ show: false }, { show: false }],
    padding: [2, 0, 2, 0],
    scales: { x: { time: true, range: lastMinutes }, y: { range: flatSafe } },
    series: [
      {},
      ...names.slice(0, count).map((name) => {
        const stroke = colour(name);
        return { stroke, width: 1.5, fill: count === 1 ? tint(stroke, 0.14) : undefined, points: { show: false } };
      }),
    ],
  }));
}

/** A chart with axes, a cursor and a legend. `lines`: [{label, format}] in the order of the data. */
export function timeChart(host, lines, { unit = String } = {}) {
  const names = ["--kv-chart", "--kv-chart-2"];
  return new Chart(host, () => {
    const axis = { stroke: colour("--kv-quiet"), grid: { stroke: colour("--kv-line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    return {
      tzDate,
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      legend: { show: false },
      axes: [{ ...axis, size: 28, space: LABEL_SPACE, values: (u, ticks, axisIndex, space, step) => ticks.map((at) => clock(at).slice(0, step < 60 ? 8 : 5)) }, { ...axis, size: 64, values: (u, ticks) => ticks.map(unit) }],
      scales: { x: { time: true, range: lastMinutes }, y: { range: flatSafe } },
      series: [
        {},
        ...lines.map((line, index) => ({ label: line.label, stroke: colour(names[index]), width: 2, dash: index ? [6, 3] : undefined, points: { show: false } })),
      ],
    };
  });
}
