// On a narrow screen the navigation scrolls: begin where the reader is.

const bar = document.querySelector(".kv-nav");
const here = bar?.querySelector("[aria-current]");
if (here) bar.scrollLeft = here.offsetLeft - bar.offsetLeft - (bar.clientWidth - here.offsetWidth) / 2;
