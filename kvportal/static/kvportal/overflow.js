// What scrolls sideways says so: it fades where there is more, and can be scrolled with the keyboard.

/** Keep `data-more` of `region` true to what is beyond its edges: "", "left", "right" or "left right".
 * `onChange(overflows)` is called whenever it starts or ends to overflow. */
export function markOverflow(region, onChange = () => {}) {
  let overflowed = null;
  const mark = () => {
    const hidden = region.scrollWidth - region.clientWidth;
    const overflows = hidden > 1;
    const more = [];
    if (overflows && region.scrollLeft > 1) more.push("left");
    if (overflows && region.scrollLeft < hidden - 1) more.push("right");
    region.dataset.more = more.join(" ");
    if (overflows !== overflowed) onChange((overflowed = overflows));
  };
  region.addEventListener("scroll", mark, { passive: true });
  const observer = new ResizeObserver(mark);
  observer.observe(region);
  for (const child of region.children) observer.observe(child);
}
