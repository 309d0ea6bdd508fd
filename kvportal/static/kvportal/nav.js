// On a narrow screen the navigation scrolls: begin where the reader is, and show that there is more.

import { markOverflow } from "./overflow.js";

const bar = document.querySelector(".kv-nav");
const here = bar?.querySelector("[aria-current]");
if (here) bar.scrollLeft = here.offsetLeft - bar.offsetLeft - (bar.clientWidth - here.offsetWidth) / 2;
if (bar) markOverflow(bar);
