// What every live page shows about its connection: the badge, and the banner while it is lost.

import { h, redraw, setHidden } from "./dom.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";

/** Open the feed of the page `root`; `onState` gets each state, `onTick(now)` is called every second. */
export function openFeed(root, { onState, onTick }) {
  const badge = document.getElementById("ops-connection");
  const lost = document.getElementById("ops-lost");
  let drawn = false;
  let failures = 0;
  let signedOut = false;

  const lostText = () => [
    h("strong", {}, drawn ? "The connection to the portal is lost" : "The portal does not answer"),
    drawn ? "What you see is the last state received. " : "There is no state to show yet. ",
    h("span", { id: "ops-retry" }), " ",
    h("button", { type: "button", class: "kv-button", onclick: () => feed.retry() }, "Try now"),
  ];
  const refusedText = () => [
    h("strong", {}, "You are signed out, or may not view streams any more"),
    h("a", { href: `${root.dataset.loginUrl}?next=${encodeURIComponent(location.pathname)}` }, "Sign in"), " to go on.",
  ];

  /** A refused WebSocket says nothing about why; an ordinary request does. */
  async function checkSession() {
    try {
      const response = await fetch(location.href, { redirect: "manual" });
      if (response.type !== "opaqueredirect") return;
      signedOut = true;
      redraw(lost, "refused", refusedText);
    } catch {
      // The portal is away: the banner says so already.
    }
  }

  function onStatus(status) {
    failures = status.connected ? 0 : failures + 1;
    signedOut = !status.connected && (signedOut || status.refused);
    root.dataset.connected = status.connected;
    redraw(badge, `${status.connected}`, () => (status.connected
      ? h("span", { class: "kv-badge kv-badge-good" }, "live")
      : h("span", { class: "kv-badge kv-badge-bad" }, "not connected")));
    setHidden(lost, status.connected);
    if (status.connected) return;
    redraw(lost, signedOut ? "refused" : "lost", signedOut ? refusedText : lostText);
    if (failures >= 2) checkSession();
  }

  const feed = new Feed(root.dataset.socket, {
    onStatus,
    onState: (state) => {
      drawn = true;
      root.dataset.version = state.version;
      onState(state);
    },
  });

  setInterval(() => {
    if (feed.status.connected) onTick(feed.now());
    const retry = document.getElementById("ops-retry");
    if (!retry || !feed.status.retryAt) return;
    const left = Math.max(0, Math.ceil((feed.status.retryAt - Date.now()) / 1000));
    retry.textContent = left ? `Trying again in ${format.duration(left)}.` : "Trying again \u2026";
  }, 1000);
  return feed;
}
