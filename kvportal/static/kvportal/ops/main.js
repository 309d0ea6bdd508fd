// The Operations page: one state in, everything drawn from it.

import { Cards } from "./cards.js";
import { openFeed } from "./connection.js";
import { setHidden } from "./dom.js";
import { Resync } from "./resync.js";
import { Streams } from "./streams.js";
import { decisionTable, instanceTable, replicaTable, showBanners } from "./sections.js";
import { Verdict } from "./verdict.js";

const root = document.getElementById("ops");
const find = (id) => document.getElementById(`ops-${id}`);

const resync = new Resync(
  { resync: root.dataset.resyncUrl, audit: root.dataset.auditUrl },
  find("toasts"),
  root.querySelector("[name=csrfmiddlewaretoken]").value,
);
const streams = new Streams(find("table"), {
  mayResync: root.dataset.mayResync === "yes",
  streamUrl: root.dataset.streamUrl,
  search: find("search"),
  filter: find("filter"),
  sort: find("sort"),
  resyncSelected: find("resync-selected"),
  onResync: (chosen) => resync.ask(chosen),
});
const cards = new Cards(find("cards"));
const verdict = new Verdict(find("verdict"));
const instances = instanceTable(find("instances"));
const decisions = decisionTable(find("decisions"));
const pause = find("pause");
pause.addEventListener("click", () => {
  const paused = pause.getAttribute("aria-pressed") !== "true";
  pause.setAttribute("aria-pressed", paused);
  pause.textContent = paused ? "Go on" : "Pause";
});
const replicas = replicaTable(find("replicas"));

openFeed(root, {
  onState(state) {
    showBanners(find("banners"), state.banners);
    verdict.update(state);
    cards.update(state);
    setHidden(find("streams"), state.streams.length === 0);
    streams.update(state);
    instances.update(state.instances, state.now);
    if (pause.getAttribute("aria-pressed") !== "true") decisions.update(state.decisions, state.now);
    replicas.update(state.replicas, state.now);
    resync.update(state);
  },
  onTick(now) {
    verdict.tick(now);
    streams.tick(now);
  },
});
