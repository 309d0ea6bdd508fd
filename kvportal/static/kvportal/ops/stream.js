// The page of one stream: what it is doing now and in the last ten minutes.

import { timeChart } from "./charts.js";
import { openFeed } from "./connection.js";
import { badge, h, redraw, setAttribute, setHidden, setText } from "./dom.js";
import * as format from "./format.js";
import { ChangeLog } from "./history.js";
import { Resync } from "./resync.js";
import { messagesOf, severity, toneOf } from "./streams.js";

const KEPT_SECONDS = 600;
const STEP_SECONDS = 5;
const COLUMNS = ["at", "device", "host", "events", "lag"];

const root = document.getElementById("ops");
const find = (id) => document.getElementById(`ops-${id}`);
const isOurs = (stream) => stream.instance === root.dataset.instance && stream.rank === Number(root.dataset.rank);

const charts = [
  { host: find("chart-blocks"), label: "Blocks", columns: ["device", "host"], unit: format.compact },
  { host: find("chart-events"), label: "Events per second", columns: ["events"], unit: format.compact },
  { host: find("chart-lag"), label: "Lag", columns: ["lag"], unit: format.lag },
].map((chart) => ({ ...chart, plot: timeChart(chart.host, chart.columns.map((label) => ({ label })), { unit: chart.unit }) }));

const resync = new Resync(
  { resync: root.dataset.resyncUrl, audit: root.dataset.auditUrl },
  find("toasts"),
  root.querySelector("[name=csrfmiddlewaretoken]").value,
);
const changes = new ChangeLog(root.dataset.changesUrl, {
  log: find("log"),
  body: find("log").querySelector("tbody"),
  empty: find("log-empty"),
  counters: find("counters").querySelector("dl"),
  countedAt: find("counters-at"),
});
let current = null;
let series = null;
find("resync")?.addEventListener("click", () => resync.ask([current]));

async function loadSeries() {
  try {
    const response = await fetch(root.dataset.seriesUrl);
    if (response.ok) series = (await response.json()).series;
  } catch {
    // The points that arrive from now on are drawn anyway.
  }
  series ??= Object.fromEntries(COLUMNS.map((name) => [name, []]));
  drawCharts();
}

function append(stream, now) {
  if (!series || now - (series.at.at(-1) ?? 0) < STEP_SECONDS) return;
  for (const name of COLUMNS) series[name].push(name === "at" ? now : stream[name] ?? null);
  while (series.at[0] < now - KEPT_SECONDS) for (const name of COLUMNS) series[name].shift();
  drawCharts();
}

function drawCharts() {
  for (const { host, label, columns, unit, plot } of charts) {
    const known = columns.flatMap((name) => series[name]).filter((value) => value !== null);
    if (series.at.length < 2 || !known.length) {
      if (!host.childElementCount) setText(host, "Collecting …");
      setAttribute(host, "aria-label", `${label}: no numbers yet`);
      continue;
    }
    plot.setData([series.at, ...columns.map((name) => series[name])]);
    setAttribute(host, "aria-label", `${label}, last ten minutes: from ${unit(Math.min(...known))} to ${unit(Math.max(...known))}`);
  }
}

function facts(stream, now) {
  const snapshot = stream.snapshot;
  return [
    [severity(stream) === 0 ? "Out of sync for" : "In this state for", format.duration(now - stream.since)],
    ["Sequence", format.count(stream.sequence)],
    ["Device blocks", format.count(stream.device)],
    ["Host blocks", format.count(stream.host)],
    ["Mapped blocks", format.count(stream.mapped)],
    ["Events per second", format.rate(stream.events)],
    ["Lag", format.lag(stream.lag)],
    ["Last event", format.ago(stream.last_event, now)],
    ["Gaps", format.count(stream.gaps)],
    ["Last snapshot", snapshot ? format.ago(snapshot.at, now) : format.EMPTY],
    ["Snapshot", snapshot ? `${format.bytes(snapshot.bytes)} in ${format.lag(snapshot.seconds)}, watermark ${format.count(snapshot.watermark)}` : format.EMPTY],
    ["Live events", stream.endpoint],
    ["Snapshots", stream.replay_endpoint],
  ];
}

function drawFacts(now) {
  const rows = facts(current, now);
  const root_ = find("facts");
  redraw(root_, JSON.stringify(rows.map(([name]) => name)), () => rows.map(([name]) =>
    h("div", { class: "ops-fact" }, h("span", { class: "ops-label-always" }, name), h("span", { class: "ops-fact-value" }))));
  rows.forEach(([, value], index) => setText(root_.children[index].lastElementChild, value));
}

function onState(state) {
  current = state.streams.find(isOurs) ?? null;
  setHidden(find("absent"), current !== null);
  setHidden(find("charts"), current === null && !series?.at.length);
  if (current) setHidden(find("counters"), false);
  const button = find("resync");
  if (button) {
    button.disabled = current === null;
    setHidden(button, current === null);
  }
  const [text, tone] = current ? [current.state, toneOf(current)] : ["no longer followed"];
  redraw(find("state"), `${text} ${tone}`, () => badge(text, tone));
  const messages = current ? messagesOf(current) : [];
  redraw(find("messages"), JSON.stringify(messages), () => messages.map(([kind, label, text]) =>
    h("p", { class: `ops-message ops-message-${kind}` }, h("b", {}, label), ` ${text}`)));
  resync.update(state);
  changes.update(current);
  if (!current) return;
  drawFacts(state.now);
  append(current, state.now);
}

openFeed(root, { onState, onTick: (now) => current && drawFacts(now) });
loadSeries();
