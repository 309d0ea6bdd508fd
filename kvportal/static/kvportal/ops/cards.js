// The cards on top of the page: a number each, and what it did in the last ten minutes.

import { sparkline } from "./charts.js";
import { h, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";

const KEPT_SECONDS = 600;
const COLUMNS = ["at", "synchronized", "device", "host", "events", "queries", "decisions", "hit_ratio"];

const CARDS = [
  { column: "synchronized", label: "Streams synchronized", show: format.count, of: (cards) => ` of ${format.count(cards.streams)}` },
  { column: "device", label: "Device blocks", show: format.compact },
  { column: "host", label: "Host blocks", show: format.compact },
  { column: "events", label: "Events per second", show: format.rate },
  { column: "queries", label: "Queries per second", show: format.rate },
  { column: "decisions", label: "Decisions per second", show: format.rate },
  { column: "hit_ratio", label: "Mean predicted hit ratio", show: format.percent, none: "Nothing predicted lately" },
];

export class Cards {
  #series = Object.fromEntries(COLUMNS.map((name) => [name, []]));
  #cards;

  constructor(root) {
    this.#cards = CARDS.map((card) => {
      const value = h("span");
      const of = h("small");
      const host = h("div", { class: "ops-chart", role: "img" });
      root.append(
        h("article", { class: "ops-card", "data-card": card.column },
          h("p", { class: "ops-card-label" }, card.label),
          h("p", { class: "ops-card-value" }, value, of),
          host),
      );
      return { ...card, value, host, ofNode: of, chart: null };
    });
  }

  update(state) {
    if (state.series) this.#series = state.series;
    else this.#append(state);
    for (const card of this.#cards) this.#draw(card, state.cards);
  }

  #append(state) {
    for (const name of COLUMNS) this.#series[name].push(name === "at" ? state.now : state.cards[name] ?? null);
    let old = 0;
    while (this.#series.at[old] < state.now - KEPT_SECONDS) old += 1;
    if (old) for (const name of COLUMNS) this.#series[name].splice(0, old);
  }

  #draw(card, cards) {
    setText(card.value, card.show(cards[card.column]));
    setText(card.ofNode, card.of ? card.of(cards) : "");
    const line = this.#series[card.column];
    const known = line.filter((value) => value !== null);
    if (known.length < 2) {
      if (!card.chart) setEmpty(card.host, card.none ?? (known.length ? "Collecting …" : "Not measured here"));
      return;
    }
    card.chart ??= sparkline(card.host);
    card.chart.setData([this.#series.at, line]);
    const range = `from ${card.show(Math.min(...known))} to ${card.show(Math.max(...known))}`;
    setAttribute(card.host, "aria-label", `${card.label}, last ten minutes: ${range}`);
  }
}

function setEmpty(host, text) {
  if (host.textContent === text) return;
  host.replaceChildren(h("span", { class: "ops-chart-empty" }, text));
  setAttribute(host, "aria-label", text);
}
