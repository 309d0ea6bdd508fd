// The table of streams: filter, sort, search, selection.

import { arrange, badge, h, redraw, setAttribute, setBadge, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

/** 0: out of sync, 1: coming up, 2: serves, with something to say about it, 3: all well. */
export function severity(stream) {
  if (stream.state !== "synchronized") return stream.starting ? 1 : 0;
  return stream.warning || stream.hints.length || stream.elsewhere.length ? 2 : 3;
}

const TONES = ["bad", null, "warn", null];

/** A stream that is out of sync stays red while it tries again; undefined: as its state says. */
export function toneOf(stream) {
  return severity(stream) === 0 ? "bad" : undefined;
}

const byName = (a, b) => a.instance.localeCompare(b.instance, "en", { numeric: true }) || a.rank - b.rank;

/** Worst first; of those in trouble the longest first. */
const byTrouble = (a, b) => severity(a) - severity(b) || (severity(a) < 2 ? a.since - b.since : 0);

const COLUMNS = [
  { key: "name", label: "Stream", first: "ascending", compare: byName },
  { key: "state", label: "State", first: "ascending", compare: byTrouble },
  { key: "sequence", label: "Sequence", numeric: true, value: (s) => s.sequence, show: format.count },
  { key: "device", label: "Device blocks", numeric: true, value: (s) => s.device, show: format.count },
  { key: "host", label: "Host blocks", numeric: true, value: (s) => s.host, show: format.count },
  { key: "events", label: "Events/s", numeric: true, value: (s) => s.events, show: format.rate },
  { key: "lag", label: "Lag", numeric: true, value: (s) => s.lag, show: format.lag },
  { key: "snapshot", label: "Last snapshot", numeric: true, value: (s) => s.snapshot?.at ?? null },
];

const NUMBERS = COLUMNS.filter((column) => column.numeric);

export class Streams {
  #root;
  #body = h("div", { role: "rowgroup" });
  #empty = h("p", { class: "ops-empty", hidden: true });
  #rows = new Map();
  #selected = new Set();
  #streams = [];
  #now = 0;
  #sort = { key: "state", order: "ascending" };
  #options;
  #head;
  #grid;
  #all;

  /** `options`: {mayResync, streamUrl, search, filter, sort, resyncSelected (elements), onResync(streams)} */
  constructor(root, options) {
    this.#root = root;
    this.#options = options;
    if (!options.mayResync) root.dataset.readonly = "";
    this.#head = this.#buildHead();
    this.#grid = h("div", { class: "ops-grid", role: "table", "aria-labelledby": "ops-streams-title" },
      h("div", { role: "rowgroup" }, this.#head), this.#body);
    root.append(this.#grid, this.#empty);
    options.search.addEventListener("input", () => this.#show());
    options.filter.addEventListener("change", () => this.#show());
    this.#buildSortSelect();
    options.resyncSelected?.addEventListener("click", () => options.onResync(this.#chosen()));
  }

  update(state) {
    this.#streams = state.streams;
    this.#now = state.now;
    const names = new Set(this.#streams.map(format.streamName));
    for (const name of this.#rows.keys()) if (!names.has(name)) this.#rows.delete(name);
    for (const name of this.#selected) if (!names.has(name)) this.#selected.delete(name);
    this.#show();
  }

  /** Times that run on by themselves. */
  tick(now) {
    this.#now = now;
    for (const row of this.#rows.values()) if (row.node.isConnected) row.updateTimes(now);
  }

  #chosen() {
    return this.#streams.filter((stream) => this.#selected.has(format.streamName(stream)));
  }

  // ---- filter, sort

  #matches(stream) {
    const filter = this.#options.filter.value;
    if (filter === "attention" && severity(stream) === 3) return false;
    if (filter !== "attention" && filter !== "all" && stream.state !== filter) return false;
    const words = this.#options.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return true;
    const text = [
      format.streamName(stream), stream.endpoint, stream.replay_endpoint, stream.state,
      stream.error?.code, stream.error?.sentence, stream.warning?.sentence, ...stream.hints,
    ].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  #compare() {
    const column = COLUMNS.find((candidate) => candidate.key === this.#sort.key);
    const sign = this.#sort.order === "ascending" ? 1 : -1;
    if (column.compare) return (a, b) => sign * column.compare(a, b) || byName(a, b);
    return (a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (x === y) return byName(a, b);
      if (x === null) return 1; // nothing known comes last either way
      if (y === null) return -1;
      return sign * (x - y) || byName(a, b);
    };
  }

  #setSort(key, order) {
    this.#sort = { key, order };
    this.#options.sort.value = `${key} ${order}`;
    this.#showSort();
    this.#show();
  }

  #showSort() {
    for (const cell of this.#head.querySelectorAll("[data-key]")) {
      const active = cell.dataset.key === this.#sort.key;
      setAttribute(cell, "aria-sort", active ? this.#sort.order : null);
    }
  }

  #buildSortSelect() {
    for (const column of COLUMNS) {
      const orders = column.numeric ? ["descending", "ascending"] : ["ascending"];
      const label = column.key === "state" ? "State, worst first" : column.label;
      for (const order of orders) {
        const text = column.numeric ? `${label}, ${order === "descending" ? "high first" : "low first"}` : label;
        this.#options.sort.append(h("option", { value: `${column.key} ${order}` }, text));
      }
    }
    this.#options.sort.addEventListener("change", () => this.#setSort(...this.#options.sort.value.split(" ")));
    this.#setSort("state", "ascending");
  }

  #buildHead() {
    const head = h("div", { class: "ops-row ops-row-head", role: "row" });
    if (this.#options.mayResync) {
      this.#all = h("input", { type: "checkbox", "aria-label": "Select all streams shown" });
      this.#all.addEventListener("change", () => this.#selectShown(this.#all.checked));
      head.append(h("div", { class: "ops-cell", role: "columnheader" }, this.#all));
    }
    for (const column of COLUMNS) {
      const sorter = h("button", { type: "button", class: "ops-sorter", onclick: () => this.#toggleSort(column) }, column.label);
      head.append(h("div", { class: `ops-cell${column.numeric ? " ops-num" : ""}`, role: "columnheader", "data-key": column.key }, sorter));
    }
    if (this.#options.mayResync) head.append(h("div", { class: "ops-cell", role: "columnheader", "aria-label": "Actions" }));
    return head;
  }

  #toggleSort(column) {
    const first = column.first ?? "descending";
    const other = first === "ascending" ? "descending" : "ascending";
    this.#setSort(column.key, this.#sort.key === column.key && this.#sort.order === first ? other : first);
  }

  // ---- show

  #shown() {
    return this.#streams.filter((stream) => this.#matches(stream)).sort(this.#compare());
  }

  #show() {
    const shown = this.#shown();
    const nodes = shown.map((stream) => {
      const name = format.streamName(stream);
      let row = this.#rows.get(name);
      if (!row) this.#rows.set(name, (row = this.#newRow(stream)));
      row.update(stream, this.#now, this.#selected.has(name));
      return row.node;
    });
    arrange(this.#body, nodes);
    setHidden(this.#grid, shown.length === 0);
    setHidden(this.#empty, shown.length > 0);
    setText(this.#empty, this.#emptyText());
    this.#showSelection(shown);
  }

  #emptyText() {
    if (!this.#streams.length) return "No stream is followed.";
    return `None of the ${format.plural(this.#streams.length, "stream")} matches. Change the search or the state shown.`;
  }

  #showSelection(shown) {
    const button = this.#options.resyncSelected;
    if (!button) return;
    const size = this.#selected.size;
    button.disabled = size === 0;
    setText(button, size ? `Force resync of ${format.plural(size, "stream")}` : "Force resync of selection");
    const visible = shown.filter((stream) => this.#selected.has(format.streamName(stream))).length;
    this.#all.checked = visible > 0 && visible === shown.length;
    this.#all.indeterminate = visible > 0 && visible < shown.length;
  }

  #selectShown(on) {
    for (const stream of this.#shown()) this.#select(format.streamName(stream), on);
    this.#show();
  }

  #select(name, on) {
    if (on) this.#selected.add(name);
    else this.#selected.delete(name);
  }

  #newRow(stream) {
    const name = format.streamName(stream);
    const query = new URLSearchParams({ instance: stream.instance, rank: stream.rank });
    return new Row(name, {
      href: `${this.#options.streamUrl}?${query}`,
      mayResync: this.#options.mayResync,
      onSelect: (on) => {
        this.#select(name, on);
        this.#showSelection(this.#shown());
      },
      onResync: () => this.#options.onResync(this.#streams.filter((candidate) => format.streamName(candidate) === name)),
    });
  }
}

class Row {
  #endpoint = h("span", { class: "ops-sub ops-mono" });
  #badge = badge("connecting");
  #since = h("span", { class: "ops-sub" });
  #numbers = new Map();
  #messages = h("div", { class: "ops-messages", role: "cell" });
  #check = null;
  #stream = null;

  constructor(name, { href, mayResync, onSelect, onResync }) {
    this.node = h("div", { class: "ops-row", role: "row", "data-stream": name });
    if (mayResync) {
      this.#check = h("input", { type: "checkbox", "aria-label": `Select ${name}` });
      this.#check.addEventListener("change", () => onSelect(this.#check.checked));
      const label = h("label", {}, this.#check, h("span", { class: "ops-label", "aria-hidden": "true" }, "Select"));
      this.node.append(h("div", { class: "ops-cell ops-select", role: "cell" }, label));
    }
    this.node.append(
      h("div", { class: "ops-cell ops-first", role: "rowheader" }, h("a", { href }, name), this.#endpoint),
      h("div", { class: "ops-cell ops-wide", role: "cell" }, this.#badge, this.#since),
    );
    for (const column of NUMBERS) {
      const value = h("span");
      this.#numbers.set(column.key, value);
      this.node.append(h("div", { class: "ops-cell ops-num", role: "cell", "data-column": column.key },
        h("span", { class: "ops-label", "aria-hidden": "true" }, column.label), value));
    }
    if (mayResync) {
      const button = h("button", { type: "button", class: "kv-button", "aria-label": `Force resync of ${name}`, onclick: onResync }, "Force resync");
      this.node.append(h("div", { class: "ops-cell ops-action", role: "cell" }, button));
    }
    this.node.append(this.#messages);
  }

  update(stream, now, selected) {
    this.#stream = stream;
    if (this.#check) this.#check.checked = selected;
    setText(this.#endpoint, stream.endpoint);
    setBadge(this.#badge, stream.state, toneOf(stream));
    setAttribute(this.node, "data-tone", TONES[severity(stream)]);
    for (const column of NUMBERS) if (column.show) setText(this.#numbers.get(column.key), column.show(column.value(stream)));
    setAttribute(this.#numbers.get("lag"), "title", stream.lag < 0 ? "Negative: the engine's clock is ahead of this machine's." : null);
    const messages = messagesOf(stream);
    redraw(this.#messages, JSON.stringify(messages), () => messages.map(([kind, label, text]) =>
      h("p", { class: `ops-message ops-message-${kind}` }, h("b", {}, label), ` ${text}`)));
    this.updateTimes(now);
  }

  updateTimes(now) {
    const { since, snapshot } = this.#stream;
    setText(this.#since, sinceText(this.#stream, now));
    setAttribute(this.#since, "title", `since ${format.exact(since)}`);
    const cell = this.#numbers.get("snapshot");
    setText(cell, format.ago(snapshot?.at, now));
    setAttribute(cell, "title", snapshot
      ? `${format.exact(snapshot.at)}: watermark ${format.count(snapshot.watermark)}, ${format.bytes(snapshot.bytes)} in ${format.lag(snapshot.seconds)}; ${format.plural(snapshot.count, "snapshot")} since the start`
      : null);
  }
}

/** A stream that fails changes between its states as it tries again; what counts is since when it fails. */
export function sinceText(stream, now) {
  const lasting = format.duration(now - stream.since);
  return severity(stream) === 0 ? `out of sync for ${lasting}` : `for ${lasting}`;
}

/** What is to be said about a stream, most important first: [kind, label, text]. */
export function messagesOf(stream) {
  const messages = [];
  if (stream.error) messages.push([stream.starting ? "hint" : "error", stream.starting ? "Starting:" : "Error:", `${stream.error.sentence} (${stream.error.code})`]);
  if (stream.warning) messages.push(["warning", "Warning:", `${stream.warning.sentence} (${stream.warning.code})`]);
  if (stream.advice) messages.push(["hint", "What to do:", stream.advice]);
  for (const view of stream.elsewhere) {
    const why = view.error ? ` \u2013 ${view.error}` : "";
    messages.push(["warning", `Replica ${view.replica}:`, `sees it ${view.state}${why}`]);
  }
  for (const hint of stream.hints) messages.push(["hint", "Hint:", hint]);
  return messages;
}
