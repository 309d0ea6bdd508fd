// Banners and the plain tables of the Operations page.

import { arrange, badge, h, redraw, setHidden } from "./dom.js";
import * as format from "./format.js";

// ---- banners

const LEVELS = { error: "error", warning: "warning", info: "info" };

export function showBanners(root, banners) {
  redraw(root, JSON.stringify(banners), () => banners.map((banner) =>
    h("div", { class: `kv-banner kv-banner-${LEVELS[banner.level] ?? "info"}`, "data-code": banner.code },
      h("strong", {}, banner.title), banner.text)));
}

// ---- plain tables: replicas, instances, decisions

/** Rows by key into a grid with table roles; `columns`: [{label, numeric, first, cell(item, now) -> node or text}] */
export class Table {
  #section;
  #root;
  #columns;
  #key;
  #body = h("div", { role: "rowgroup" });
  #empty;
  #grid;
  #rows = new Map();

  constructor(section, { columns, key, widths, empty }) {
    this.#section = section;
    this.#root = section.lastElementChild;
    this.#columns = columns;
    this.#key = key;
    this.#empty = h("p", { class: "ops-empty", hidden: true }, empty);
    const head = h("div", { class: "ops-row ops-row-head", role: "row" }, ...columns.map((column) =>
      h("div", { class: `ops-cell${column.numeric ? " ops-num" : ""}`, role: "columnheader" }, column.label)));
    this.#grid = h("div", { class: "ops-grid", role: "table", "aria-labelledby": section.getAttribute("aria-labelledby") },
      h("div", { role: "rowgroup" }, head), this.#body);
    this.#grid.style.setProperty("--columns", widths);
    this.#root.append(this.#grid, this.#empty);
  }

  /** `items` undefined: this portal has no such thing, and the section stays away. */
  update(items, now) {
    setHidden(this.#section, items === undefined);
    if (items === undefined) return;
    setHidden(this.#grid, items.length === 0);
    setHidden(this.#empty, items.length > 0);
    const keys = new Set(items.map(this.#key));
    for (const key of this.#rows.keys()) if (!keys.has(key)) this.#rows.delete(key);
    arrange(this.#body, items.map((item) => this.#row(item, now)));
  }

  #row(item, now) {
    const key = this.#key(item);
    let cells = this.#rows.get(key);
    if (!cells) {
      cells = this.#columns.map((column, index) => h("div", {
        class: `ops-cell${column.numeric ? " ops-num" : ""}${index === 0 ? " ops-first" : ""}${column.wide ? " ops-wide" : ""}`,
        role: index === 0 ? "rowheader" : "cell",
      }));
      this.#rows.set(key, cells);
      h("div", { class: "ops-row", role: "row", "data-key": key }, ...cells);
    }
    this.#columns.forEach((column, index) => {
      const content = [column.cell(item, now)].flat();
      const signature = content.map((part) => (typeof part === "string" ? part : part?.outerHTML ?? "")).join("\u0000");
      cells[index].toggleAttribute("data-empty", signature === "");
      redraw(cells[index], signature, () => [
        index === 0 ? "" : h("span", { class: "ops-label", "aria-hidden": "true" }, column.label),
        ...content.filter((part) => part !== null && part !== undefined),
      ]);
    });
    return cells[0].parentElement;
  }
}

const sub = (text) => h("span", { class: "ops-sub" }, text);

export function replicaTable(section) {
  return new Table(section, {
    key: (replica) => replica.name,
    widths: "minmax(12rem, 2fr) minmax(9rem, 1fr) minmax(9rem, 1fr) minmax(8rem, 1fr)",
    empty: "No replica has written its state yet.",
    columns: [
      { label: "Replica", cell: (replica) => [replica.name, replica.own ? sub("this page comes from it") : null] },
      {
        label: "State",
        cell: (replica, now) => (replica.gone_since === null
          ? badge("running")
          : [badge("gone"), sub(`last heard of ${format.ago(replica.gone_since, now)}`)]),
      },
      { label: "Streams synchronized", numeric: true, cell: (replica) => `${format.count(replica.synchronized)} of ${format.count(replica.streams)}` },
      { label: "Running for", numeric: true, cell: (replica, now) => (replica.gone_since === null ? format.duration(now - replica.started) : format.EMPTY) },
    ],
  });
}

export function instanceTable(section) {
  return new Table(section, {
    key: (instance) => instance.name,
    widths: "minmax(11rem, 1.6fr) minmax(6rem, 0.8fr) minmax(8rem, 1fr) minmax(9rem, 1.2fr) minmax(6rem, 0.8fr) minmax(12rem, 2fr)",
    empty: "No instance is registered. Engines register by PUT /v1/internal/instances/<name>, or in etcd when the portal runs with --instance-source etcd.",
    columns: [
      { label: "Instance", cell: (instance) => [instance.name, instance.incarnation ? sub(`incarnation ${instance.incarnation}`) : null] },
      { label: "Role", cell: (instance) => [instance.role, instance.role === instance.current_role ? null : sub(`now ${instance.current_role}`)] },
      { label: "Health", cell: (instance, now) => [badge(instance.state), sub(`for ${format.duration(now - instance.since)}`)] },
      { label: "Load", cell: loadCell },
      { label: "Ranks with stream", cell: rankCell },
      { label: "Remarks", wide: true, cell: remarks },
    ],
  });
}

function loadCell({ load }, now) {
  if (!load) return "not reported";
  const numbers = load.valid ? `${format.count(load.waiting)} waiting, cache ${format.percent(load.usage)}` : "not valid";
  return [numbers, sub(`${load.source}, ${format.ago(load.at, now)}`)];
}

function rankCell(instance) {
  if (!instance.followed) return `none of ${format.count(instance.dp_size)}`;
  const behind = instance.followed - instance.synchronized;
  return [`${instance.followed} of ${format.count(instance.dp_size)}`, behind ? sub(`${behind} not synchronized`) : null];
}

function remarks(instance) {
  const parts = [];
  if (instance.excluded) parts.push(h("span", {}, h("b", {}, "Not followed: "), `${instance.excluded.message} (${instance.excluded.code})`));
  if (instance.state !== "ACTIVE" && instance.reason) parts.push(h("span", {}, instance.reason));
  if (instance.hint) parts.push(h("span", { class: "ops-sub" }, `Hint: ${instance.hint}`));
  return parts.length ? parts.flatMap((part, index) => (index ? [h("br"), part] : [part])) : "";
}

export function decisionTable(section) {
  const url = section.dataset.decisionUrl;
  return new Table(section, {
    key: (decision) => decision.id,
    widths: "minmax(6rem, 0.8fr) minmax(10rem, 1.4fr) minmax(10rem, 1.4fr) minmax(5rem, 0.6fr) minmax(9rem, 1.2fr) minmax(9rem, 1.2fr)",
    empty: "No routing decision yet. They appear here as gateways ask /v1/internal/routing/select.",
    columns: [
      { label: "At (UTC)", cell: (decision) => [
        url ? h("a", { href: `${url}?id=${encodeURIComponent(decision.id)}`, title: `Explanation of decision ${decision.id}` }, format.clock(decision.at)) : format.clock(decision.at),
        sub(decision.policy)] },
      { label: "Prefill", cell: (decision) => (decision.prefill ? decision.prefill : h("span", { class: "kv-badge kv-badge-bad" }, "no candidates")) },
      { label: "Decode", cell: (decision) => decision.decode ?? format.EMPTY },
      { label: "Score", numeric: true, cell: (decision) => (decision.score === null ? format.EMPTY : decision.score.toFixed(3)) },
      { label: "Cache part + queue part", numeric: true, cell: (decision) => (decision.cache_part === null ? format.EMPTY : `${decision.cache_part.toFixed(3)} + ${(decision.queue_part ?? 0).toFixed(3)}`) },
      { label: "Tokens hit", numeric: true, cell: (decision) => [
        `${format.count(decision.hit_tokens)} of ${format.count(decision.tokens)}`,
        decision.cached_tokens === null ? null : sub(`engine found ${format.count(decision.cached_tokens)}`)] },
    ],
  });
}
