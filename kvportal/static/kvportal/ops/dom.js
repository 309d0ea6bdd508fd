// Small helpers to build and update the page without touching what did not change.

/** Build an element: `h("p", {class: "x", hidden: true, onclick: f}, "text", child)`. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** Replace the children only when `signature` differs from the one of the last call. */
export function redraw(node, signature, build) {
  if (node.dataset.signature === signature) return;
  node.dataset.signature = signature;
  node.replaceChildren(...[build()].flat());
}

/** Make the children of `parent` be exactly `nodes`, in that order, moving as few as possible. */
export function arrange(parent, nodes) {
  let place = parent.firstChild;
  for (const node of nodes) {
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

const BADGES = {
  synchronized: "good", syncing: "busy", connecting: "busy", unsynchronized: "bad",
  running: "good", gone: "bad", absent: "off",
  ACTIVE: "good", LEASE_LOST: "warn", SUSPECT: "bad",
};

/** A state with its colour and mark; `tone` where the state alone does not tell how bad it is. */
export function badge(state, tone = BADGES[state] ?? "off") {
  return h("span", { class: `kv-badge kv-badge-${tone}` }, state);
}

export function setBadge(node, state, tone = BADGES[state] ?? "off") {
  setAttribute(node, "class", `kv-badge kv-badge-${tone}`);
  setText(node, state);
}
