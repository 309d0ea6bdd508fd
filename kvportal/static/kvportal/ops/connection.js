// What every live page shows about its connection: the badge, and the banner while it is lost.

import { h, redraw, setHidden, setText } from "./dom.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";

/** Open the feed of the page `root`; `onState` gets each state, `onTick(now)` is called every second. */
export function openFeed(root, { onState, onTick }) {
  const badge = document.getElementById("ops-connection");
  const lost = document.getElementById("ops-lost");
  const retry = document.getElementById("ops-retry");
  const stale = document.getElementById("ops-stale");
  let drawn = false;
  let drawnAt = 0; // of the last state, by the server's clock
  let failures = 0;
  let signedOut = false;

  const lostText = () => [
    h("strong", {}, drawn ? "The connection to the portal is lost" : "The portal does not answer"),
    drawn ? `What you see is the last state received, at ${format.clock(drawnAt)} UTC.` : "There is no state to show yet.",
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
      redraw(lost.firstElementChild, "refused", refusedText);
      setHidden(retry, true);
    } catch {
      // The portal is away: the banner says so already.
    }
  }

  /** What is shown reads as what was last known, with its age, from the moment at which it may be wrong. */
  function showAge() {
    const old = drawn && !feed.status.connected;
    root.toggleAttribute("data-stale", old);
    setHidden(stale, !old);
    if (old) setText(stale, `Last known, at ${format.clock(drawnAt)} UTC, ${format.ago(drawnAt, feed.now())}:`);
  }

  function onStatus(status) {
    failures = status.connected ? 0 : failures + 1;
    signedOut = !status.connected && (signedOut || status.refused);
    root.dataset.connected = status.connected;
    redraw(badge, `${status.connected}`, () => (status.connected
      ? h("span", { class: "kv-badge kv-badge-good" }, "live")
      : h("span", { class: "kv-badge kv-badge-bad" }, "not connected")));
    setHidden(lost, status.connected);
    showAge();
    if (status.connected) return;
    redraw(lost.firstElementChild, signedOut ? "refused" : `lost ${drawnAt}`, signedOut ? refusedText : lostText);
    setHidden(retry, signedOut);
    if (failures >= 2) checkSession();
  }

  const feed = new Feed(root.dataset.socket, {
    onStatus,
    onState: (state) => {
      drawn = true;
      drawnAt = state.now;
      root.dataset.version = state.version;
      onState(state);
    },
  });

  retry.lastElementChild.addEventListener("click", () => feed.retry());
  setInterval(() => {
    if (feed.status.connected) {
      onTick(feed.now());
      return;
    }
    showAge();
    const left = Math.max(0, Math.ceil((feed.status.retryAt - Date.now()) / 1000));
    setText(retry.firstElementChild, left ? `Trying again in ${format.duration(left)}.` : "Trying again \u2026");
  }, 1000);
  return feed;
}
