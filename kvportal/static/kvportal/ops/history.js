// The log of a stream's state changes: asks for the new ones when the live state tells that there are any.

import { setHidden, setText } from "./dom.js";
import * as format from "./format.js";

const SHOWN = 100;
const AGAIN_MS = [1000, 3000]; // what has just happened may not be in the database yet

/** What of the live state goes along with an entry in the history. */
function signature(stream) {
  const { state, changed, error, gaps, snapshot, elsewhere } = stream;
  return JSON.stringify([state, changed, error?.code, gaps, snapshot?.count, elsewhere]);
}

export class ChangeLog {
  #url;
  #parts;
  #seen = null;
  #timer = 0;
  #asking = false;
  #stale = false;

  /** `parts`: elements {log, body, empty, counters, countedAt}; the rows are those of the server. */
  constructor(url, parts) {
    this.#url = url;
    this.#parts = parts;
  }

  /** `stream`: its live state, null while it is not followed. */
  update(stream) {
    const now = stream && signature(stream);
    if (now === this.#seen) return;
    this.#seen = now;
    this.#stale = true;
    this.#fetch(0);
  }

  async #fetch(turn) {
    clearTimeout(this.#timer);
    if (this.#asking) return; // whoever asks now looks again afterwards
    this.#asking = true;
    this.#stale = false;
    const found = await this.#ask();
    this.#asking = false;
    if (found) this.#show(found);
    if (this.#stale) this.#fetch(0);
    else if (!found?.rows.trim() && turn < AGAIN_MS.length) this.#timer = setTimeout(() => this.#fetch(turn + 1), AGAIN_MS[turn]);
  }

  async #ask() {
    const newest = this.#parts.body.querySelector("[data-change]")?.dataset.change ?? "0";
    try {
      const response = await fetch(`${this.#url}?after=${newest}`);
      return response.ok && !response.redirected ? await response.json() : null;
    } catch {
      return null; // the banner tells when the portal is away
    }
  }

  #show({ rows, counters, at }) {
    const { log, body, empty, counters: list, countedAt } = this.#parts;
    const template = document.createElement("template");
    template.innerHTML = rows; // our own template, every value escaped there
    for (const row of template.content.querySelectorAll("tr")) row.classList.add("ops-new");
    body.prepend(template.content);
    while (body.rows.length > SHOWN) body.lastElementChild.remove();
    setHidden(log, body.rows.length === 0);
    setHidden(empty, body.rows.length > 0);
    list.innerHTML = counters;
    setText(countedAt, `at ${format.clock(at)} UTC`);
  }
}
