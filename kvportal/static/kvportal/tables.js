// Tables on a narrow screen: rows fold into cards whose cells carry their column's name. What still has to
// scroll sideways says so.

import { markOverflow } from "./overflow.js";

const FOLDING = "table.kv-fold, #result_list, .inline-related.tabular table";
const SCROLLING = ".kv-scroll, .ops-scroll, #changelist-form .results, .inline-related.tabular fieldset";
const WIDE = 24; // characters; longer cells of a card take its whole width
const NOTHING = new Set(["", "-", "\u2013"]);

/** Prepare the tables below `root`; again for what is added later. */
export function dress(root = document) {
  for (const table of root.querySelectorAll(FOLDING)) fold(table);
  for (const region of root.querySelectorAll(SCROLLING)) announce(region);
}

function fold(table) {
  const labels = [...table.tHead?.rows[0]?.cells ?? []].map((cell) => (cell.querySelector(".text") ?? cell).textContent.trim());
  if (!labels.length) return;
  table.dataset.folds = "";
  // As blocks and grids they would not be a table to a screen reader any more.
  table.setAttribute("role", "table");
  for (const group of table.querySelectorAll("thead, tbody")) group.setAttribute("role", "rowgroup");
  for (const cell of table.tHead.rows[0].cells) cell.setAttribute("role", "columnheader");
  for (const row of table.rows) {
    row.setAttribute("role", "row");
    if (row.parentElement === table.tHead) continue;
    [...row.cells].forEach((cell, index) => label(cell, labels[index] ?? ""));
  }
}

function label(cell, text) {
  const content = cell.textContent.trim();
  cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "cell");
  if (cell.tagName === "TD" && text) cell.dataset.label = text;
  cell.toggleAttribute("data-wide", content.length > WIDE);
  cell.toggleAttribute("data-empty", NOTHING.has(content) && !cell.querySelector("input, img, svg"));
}

function announce(region) {
  if ("more" in region.dataset) return;
  const title = document.querySelector("h1")?.textContent.trim();
  const named = region.hasAttribute("aria-label") || region.hasAttribute("aria-labelledby");
  const hint = document.createElement("p");
  hint.className = "kv-scroll-hint";
  hint.textContent = "Scroll sideways for more columns";
  hint.hidden = true;
  region.before(hint);
  markOverflow(region, (overflows) => {
    hint.hidden = !overflows;
    if (overflows) {
      region.tabIndex = 0;
      region.setAttribute("role", "region");
      if (!named) region.setAttribute("aria-label", `${title}, table that scrolls sideways`);
    } else {
      region.removeAttribute("tabindex");
      region.removeAttribute("role");
      if (!named) region.removeAttribute("aria-label");
    }
  });
}

dress();
