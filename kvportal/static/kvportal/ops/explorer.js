// The prefix explorer: which blocks of a prompt each stream holds, and what CAR makes of that.

import { badge, h } from "./dom.js";
import * as format from "./format.js";
import { dress } from "../tables.js";

const TIERS = {
  D: { name: "device", kind: "device" },
  B: { name: "device and host", kind: "both" },
  H: { name: "host", kind: "host" },
  "-": { name: "missing", kind: "missing" },
};
const SHOWN_RUNS = 200; // as pieces of the strip and as text
const form = document.getElementById("explorer");
const text = document.getElementById("explorer-text");
const answer = document.getElementById("explorer-answer");
let asked = 0;

form.addEventListener("submit", (event) => {
  event.preventDefault();
  lookUp();
});
form.addEventListener("reset", () => {
  asked += 1;
  answer.replaceChildren();
  text.focus();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) lookUp();
});

/** The JSON of an answer; an Error with a sentence for people otherwise. */
async function ask(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new Error("The portal does not answer. Try again.");
  }
  const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
  if (response.redirected || !isJson) throw new Error("The portal did not answer as expected. Reload the page, sign in again if asked, and retry.");
  const found = await response.json();
  if (found.error) throw new Error(found.error);
  return found;
}

/** Show what `work` finds, unless something else was asked meanwhile; its failure as a banner. */
async function show(waiting, work) {
  const turn = (asked += 1);
  answer.replaceChildren(h("p", { class: "ops-empty" }, waiting));
  let shown;
  try {
    shown = await work();
  } catch (error) {
    shown = [h("div", { class: "kv-banner kv-banner-warning" }, h("strong", {}, "Not looked up"), error.message)];
  }
  if (turn !== asked) return;
  answer.replaceChildren(...shown);
  dress(answer);
}

async function found() {
  return result(await ask(form.dataset.url, {
    method: "POST",
    headers: { "Content-Type": "text/plain", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
    body: text.value,
  }));
}

const lookUp = () => show("Looking up …", found);

/** The recorded prompt of a decision whose page sent the reader here. */
function lookUpDecision(id) {
  show("Fetching the recorded prompt …", async () => {
    const { token_ids: tokens } = await ask(`${form.dataset.promptUrl}?id=${encodeURIComponent(id)}`);
    text.value = tokens.join(", ");
    return found();
  });
}

function result(found) {
  const best = Math.max(0, ...found.streams.map((stream) => stream.reusable_prefix_tokens));
  const parts = [
    h("div", { class: "ops-section-head" },
      h("h2", {}, `${format.plural(found.tokens, "token")} in ${format.plural(found.streams.length, "stream")}`),
      h("p", { class: "explorer-legend" }, ...Object.values(TIERS).map((tier) =>
        h("span", {}, h("i", { class: `explorer-run explorer-${tier.kind}` }), tier.name)))),
    found.streams.length
      ? h("ul", { class: "explorer-streams" }, ...found.streams.map((stream) => streamItem(stream, found.tokens, best)))
      : h("p", { class: "ops-empty" }, "No stream is followed, so nothing can be held anywhere."),
  ];
  if (found.routing) {
    const routing = h("section", { class: "ops-section explorer-routing kv-scroll", "aria-label": "What CAR would choose" });
    routing.innerHTML = found.routing; // our own template, every value escaped there
    parts.push(h("div", { class: "ops-section-head" }, h("h2", {}, "What CAR would choose now")), routing);
  }
  return parts;
}

function streamItem(stream, tokens, best) {
  const name = format.streamName(stream);
  const longest = best > 0 && stream.reusable_prefix_tokens === best;
  const head = h("p", { class: "explorer-head" },
    h("strong", { class: "ops-mono" }, name),
    longest ? h("span", { class: "kv-badge kv-badge-good" }, "longest prefix") : null,
    stream.synchronized ? null : badge("unsynchronized"));
  if (!stream.synchronized) return h("li", {}, head, h("p", { class: "ops-message ops-message-error" }, stream.error ?? "It holds nothing while it is not synchronized."));
  const numbers = h("p", { class: "explorer-numbers" },
    `Reusable prefix: ${format.count(stream.reusable_prefix_tokens)} of ${format.plural(tokens, "token")}`,
    h("span", { class: "ops-sub ops-inline" }, ` (${format.count(stream.device_hit_tokens)} device, ${format.count(stream.host_only_hit_tokens)} host only; blocks of ${format.count(stream.block_size)})`));
  if (!stream.runs.length) return h("li", {}, head, numbers, h("p", { class: "ops-message" }, "The prompt is shorter than one block, and only whole blocks are cached."));
  return h("li", {}, head, numbers, strip(stream), runList(stream));
}

function strip(stream) {
  const bar = h("div", { class: "explorer-strip", role: "img", "aria-label": `Blocks of ${format.streamName(stream)}: ${sentence(stream.runs.slice(0, 5))}` });
  let first = 0;
  for (const [tier, blocks] of stream.runs.slice(0, SHOWN_RUNS)) {
    const piece = h("span", { class: `explorer-run explorer-${TIERS[tier].kind}`, title: describe(tier, first, blocks) });
    piece.style.flexGrow = blocks;
    bar.append(piece);
    first += blocks;
  }
  const rest = stream.runs.slice(SHOWN_RUNS).reduce((sum, [, blocks]) => sum + blocks, 0);
  if (rest) {
    const piece = h("span", { class: "explorer-run explorer-mixed", title: `blocks ${format.count(first)} to ${format.count(first + rest - 1)}: mixed` });
    piece.style.flexGrow = rest;
    bar.append(piece);
  }
  return bar;
}

function runList(stream) {
  let first = 0;
  const items = stream.runs.slice(0, SHOWN_RUNS).map(([tier, blocks]) => {
    const item = h("li", {}, describe(tier, first, blocks));
    first += blocks;
    return item;
  });
  const more = stream.runs.length - items.length;
  if (more > 0) items.push(h("li", {}, `and ${format.plural(more, "more run")}`));
  return h("details", { class: "explorer-runs" }, h("summary", {}, "Blocks as text"), h("ol", {}, ...items));
}

function describe(tier, first, blocks) {
  const which = blocks === 1 ? `block ${format.count(first)}` : `blocks ${format.count(first)} to ${format.count(first + blocks - 1)}`;
  return `${which}: ${TIERS[tier].name}`;
}

function sentence(runs) {
  let first = 0;
  return runs.map(([tier, blocks]) => {
    const words = describe(tier, first, blocks);
    first += blocks;
    return words;
  }).join(", ");
}

const decision = new URLSearchParams(location.search).get("decision");
if (decision && form.dataset.promptUrl) lookUpDecision(decision);
