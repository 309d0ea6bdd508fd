// Force resync: asks first, orders, tells what became of it.

import { h, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";

const SHOWN_NAMES = 5;
const GIVE_UP_SECONDS = 25;
const TOAST_MS = 8000;

export class Resync {
  #urls;
  #toasts;
  #token;
  #pending = [];
  #streams = [];

  /** `urls`: {resync, audit, login}; `token`: the CSRF token. */
  constructor(urls, toasts, token) {
    this.#urls = urls;
    this.#toasts = toasts;
    this.#token = token;
  }

  ask(streams) {
    if (!streams.length) return;
    const names = streams.map(format.streamName);
    const drop = h("input", { type: "checkbox", name: "drop" });
    const confirm = h("button", { type: "submit", class: "kv-button kv-primary" }, "Force resync");
    const title = streams.length === 1 ? "Force resync of this stream?" : `Force resync of ${format.plural(streams.length, "stream")}?`;
    const dialog = h("dialog", { class: "ops-dialog", "aria-labelledby": "ops-dialog-title" },
      h("form", { method: "dialog", onsubmit: () => this.#order(streams, drop.checked) },
        h("h2", { id: "ops-dialog-title" }, title),
        h("p", { class: "ops-mono" }, format.someOf(names, SHOWN_NAMES)),
        h("p", {}, "Every replica asks the engine for a fresh snapshot. Until it is there, the index answers from what it holds."),
        h("label", { class: "kv-choice" }, drop,
          h("span", {}, "Drop what the index holds first",
            h("small", {}, "Use this when the index is known to be wrong. The streams bring no hits until their snapshot is there."))),
        h("div", { class: "kv-actions" },
          h("button", { type: "button", class: "kv-button", onclick: () => dialog.close() }, "Cancel"),
          confirm)));
    drop.addEventListener("change", () => {
      setText(confirm, drop.checked ? "Drop and resync" : "Force resync");
      setAttribute(confirm, "class", `kv-button ${drop.checked ? "kv-danger" : "kv-primary"}`);
    });
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    confirm.focus();
  }

  async #order(streams, drop) {
    const targets = streams.map((stream) => ({ instance_name: stream.instance, dp_rank: stream.rank }));
    const toast = this.#toast("busy", `Ordering the resync of ${format.plural(streams.length, "stream")} …`);
    const before = new Map(streams.map((stream) => [format.streamName(stream), stream.snapshot?.at ?? 0]));
    let leftOut;
    try {
      const response = await fetch(this.#urls.resync, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-CSRFToken": this.#token },
        body: JSON.stringify({ targets, drop }),
      });
      if (response.redirected) throw new Error("Your session has ended. Reload the page to sign in again.");
      const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
      if (!isJson) throw new Error(refusal(response.status));
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      leftOut = answer.left_out;
    } catch (error) {
      const text = error instanceof TypeError ? "The portal does not answer. Nothing was ordered; try again." : error.message;
      this.#finish(toast, "bad", text);
      return;
    }
    for (const name of leftOut) before.delete(name);
    if (leftOut.length) this.#finish(this.#toast("bad", ""), "bad", `No longer followed, and left out: ${leftOut.join(", ")}.`);
    const pending = { toast, before, drop, deadline: performance.now() + GIVE_UP_SECONDS * 1000 };
    this.#pending.push(pending);
    this.#progress(pending);
  }

  update(state) {
    this.#streams = state.streams;
    for (const pending of [...this.#pending]) this.#progress(pending);
  }

  #progress(pending) {
    const { before, toast } = pending;
    const done = this.#streams.filter((stream) => {
      const at = before.get(format.streamName(stream));
      return at !== undefined && stream.state === "synchronized" && (stream.snapshot?.at ?? 0) > at;
    }).length;
    const told = `${format.count(done)} of ${format.plural(before.size, "stream")} ${done === 1 || before.size === 1 ? "has" : "have"} a new snapshot`;
    if (done === before.size) {
      this.#forget(pending);
      this.#finish(toast, "good", `Resync done: ${told}.`);
    } else if (performance.now() > pending.deadline) {
      this.#forget(pending);
      this.#finish(toast, "bad", `Resync ordered, but after ${GIVE_UP_SECONDS} s only ${told}. The table tells why.`);
    } else {
      setText(toast.firstChild, `Resync ordered: ${told} …`);
    }
  }

  #forget(pending) {
    this.#pending.splice(this.#pending.indexOf(pending), 1);
  }

  #toast(tone, text) {
    const toast = h("div", { class: "ops-toast", "data-tone": tone }, h("span", {}, text));
    this.#toasts.append(toast);
    return toast;
  }

  #finish(toast, tone, text) {
    setAttribute(toast, "data-tone", tone);
    setText(toast.firstChild, text);
    if (tone !== "bad") {
      setTimeout(() => toast.remove(), TOAST_MS);
      return;
    }
    toast.append(" ", h("a", { href: this.#urls.audit }, "Resyncs"), " ",
      h("button", { type: "button", class: "kv-button", onclick: () => toast.remove() }, "Dismiss"));
  }
}

function refusal(status) {
  if (status === 403) return "The portal refused the order. Reload the page and try again.";
  return `The portal failed (${status}). Its log tells why; try again.`;
}
