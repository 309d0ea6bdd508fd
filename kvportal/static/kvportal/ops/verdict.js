// The sentence on top of the Operations page, and below it what is wrong, cause by cause.

import { causes, shared } from "./causes.js";
import { badge, h, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { messagesOf, severity, sinceText, toneOf } from "./streams.js";

const SHOWN_CAUSES = 5;
const SHOWN_NAMES = 3;

export class Verdict {
  #root;
  #title;
  #body;
  #signature = "";
  #times = [];

  constructor(root) {
    this.#root = root;
    this.#title = root.querySelector(".ops-verdict-title");
    this.#body = root.lastElementChild;
  }

  update(state) {
    const listed = state.streams.filter((stream) => stream.state !== "synchronized" || stream.warning);
    const troubled = (state.instances ?? []).filter(isTroubled);
    const signature = JSON.stringify([
      state.streams.length,
      troubled.map((one) => [one.name, one.state, one.reason, one.excluded, one.hint]),
      listed.map((one) => [one.instance, one.rank, one.state, one.since, one.error, one.warning, one.advice]),
    ]);
    if (signature !== this.#signature) {
      this.#signature = signature;
      this.#draw(state.streams.length, listed, troubled);
    }
    this.tick(state.now);
  }

  #draw(all, listed, troubled) {
    this.#times = [];
    const [failing, starting, warned] = [0, 1, 2].map((rank) => listed.filter((stream) => rankOf(stream) === rank));
    const tone = failing.length || troubled.length ? "bad" : all === 0 ? "off" : starting.length ? "busy" : "good";
    setAttribute(this.#root, "data-tone", tone);
    setText(this.#title, title(all, failing.length, starting.length, warned.length, troubled.length));
    this.#body.replaceChildren(
      ...list(causes(troubled, INSTANCES).map((group) => instanceCause(group)), troubled, "instance"),
      ...list(causes(listed, STREAMS).map((group) => this.#streamCause(group, all)), listed, "stream"),
    );
  }

  #streamCause(group, all) {
    const [first] = group;
    const since = h("span", { class: "ops-since" });
    this.#times.push([since, group]);
    const state = first.state === "synchronized"
      ? h("span", { class: "kv-badge kv-badge-warn" }, "warning")
      : badge(shared(group, (one) => one.state) ?? "not synchronized", toneOf(first));
    const why = (stream) => messagesOf(stream)[0]?.[2] ?? "";
    return cause(group, {
      state,
      what: group.length === all && all > 1 ? `All ${format.count(all)} streams` : format.plural(group.length, "stream"),
      nameOf: format.streamName,
      since,
      why,
      advice: (stream) => stream.advice,
    });
  }

  tick(now) {
    for (const [node, group] of this.#times) setText(node, groupSinceText(group, now));
  }
}

/** 0: out of sync, 1: coming up, 2: serves, with a warning. */
const rankOf = (stream) => (stream.state === "synchronized" ? 2 : severity(stream));

const STREAMS = {
  rankOf,
  keyOf: (stream) => `${rankOf(stream)} ${(stream.error ?? stream.warning)?.code ?? stream.state}`,
  sinceOf: (stream) => stream.since,
};

const INSTANCES = {
  rankOf: () => 0,
  keyOf: (instance) => (instance.state === "ACTIVE" ? instance.excluded.code : instance.state),
  sinceOf: (instance) => instance.since,
};

/** Instances that take no part although they should: roles and other backends are left out on purpose. */
function isTroubled(instance) {
  return instance.state !== "ACTIVE" || (instance.excluded && !["role", "backend"].includes(instance.excluded.code));
}

function instanceCause(group) {
  const state = group[0].state === "ACTIVE" ? h("span", { class: "kv-badge kv-badge-warn" }, "left out") : badge(group[0].state);
  return cause(group, {
    state,
    what: format.plural(group.length, "instance"),
    nameOf: (instance) => instance.name,
    since: null,
    why: (instance) => instance.excluded?.message ?? instance.reason ?? "",
    advice: (instance) => instance.hint,
  });
}

/** One line for everything that has the same cause. What differs between its members is shown of the first. */
function cause(group, { state, what, nameOf, since, why, advice }) {
  const alone = group.length === 1;
  const sentence = shared(group, why) ?? `For example ${nameOf(group[0])}: ${why(group[0])}`;
  const names = format.someOf(group.map(nameOf), SHOWN_NAMES);
  return {
    size: group.length,
    node: h("li", {}, state,
      h("span", {}, h("strong", {}, alone ? nameOf(group[0]) : what), since && !alone ? ", " : " ", since),
      h("span", { class: "ops-why" },
        alone ? null : h("span", { class: "ops-names" }, names),
        sentence,
        advice(group[0]) ? h("span", { class: "ops-sub" }, advice(group[0])) : null)),
  };
}

function list(found, items, noun) {
  if (!found.length) return [];
  const shown = found.slice(0, SHOWN_CAUSES);
  const more = items.length - shown.reduce((sum, one) => sum + one.size, 0);
  return [
    h("ul", { class: "ops-verdict-list" }, ...shown.map((one) => one.node)),
    ...(more > 0 ? [h("p", { class: "ops-verdict-more" }, `and ${format.plural(more, noun)} with other reasons, in the table below`)] : []),
  ];
}

function groupSinceText(group, now) {
  const lasting = sinceText(group[0], now);
  return group.length === 1 ? lasting : `the first ${lasting}`;
}

function title(all, failing, starting, warned, troubled) {
  const also = troubled ? `, but ${format.plural(troubled, "instance")} ${troubled === 1 ? "needs" : "need"} attention` : "";
  if (all === 0) return `No stream is followed${also}`;
  const missing = failing || starting;
  if (!missing) {
    const fine = (all === 1 ? "The stream is synchronized" : `All ${format.count(all)} streams are synchronized`) + also;
    return warned ? `${fine}, ${format.count(warned)} with a warning` : fine;
  }
  const rest = failing ? "not synchronized" : "still synchronizing";
  return `${format.count(missing)} of ${format.plural(all, "stream")} ${missing === 1 ? "is" : "are"} ${rest}`;
}
