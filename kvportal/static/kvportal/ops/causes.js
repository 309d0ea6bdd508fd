// What is wrong, by cause: things with the same reason are one line with a count and a few names.

/** Groups of `items` with equal keys, in the order of their first member. */
export function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return [...groups.values()];
}

/** Causes in the order in which they want attention: by `rankOf` a member, then the most concerned, then the
 * longest. Members of one cause: the longest first. */
export function causes(items, { keyOf, rankOf, sinceOf }) {
  const groups = groupBy([...items].sort((a, b) => sinceOf(a) - sinceOf(b)), keyOf);
  return groups.sort((a, b) => rankOf(a[0]) - rankOf(b[0]) || b.length - a.length || sinceOf(a[0]) - sinceOf(b[0]));
}

/** The text that all members share; null where they differ. */
export function shared(items, textOf) {
  const [first, ...rest] = items.map(textOf);
  return rest.every((text) => text === first) ? first : null;
}
