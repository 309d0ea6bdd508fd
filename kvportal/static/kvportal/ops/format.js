// Numbers and times as people read them. Times are seconds since the epoch, server's clock.

export const EMPTY = "\u2013";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export function count(value) {
  return value === null || value === undefined ? EMPTY : whole.format(value);
}

/** At most five characters, for cards. */
export function compact(value) {
  if (value === null || value === undefined) return EMPTY;
  return Math.abs(value) < 10000 ? whole.format(value) : short.format(value);
}

export function rate(value) {
  if (value === null || value === undefined) return EMPTY;
  return value > 0 && value < 10 ? value.toFixed(1) : compact(value);
}

export function percent(value) {
  return value === null || value === undefined ? EMPTY : `${(value * 100).toFixed(1)} %`;
}

/** `0 s`, `45 s`, `3 min`, `2 h 05 min`, `5 d 3 h` */
export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function ago(at, now) {
  return at === null || at === undefined ? EMPTY : `${duration(now - at)} ago`;
}

/** A lag in seconds; a negative one is a difference of clocks and is shown as that. */
export function lag(seconds) {
  if (seconds === null || seconds === undefined) return EMPTY;
  const size = Math.abs(seconds);
  const text = size < 1 ? `${(size * 1000).toFixed(size < 0.01 ? 1 : 0)} ms` : `${size.toFixed(1)} s`;
  return seconds < 0 ? `\u2212${text}` : text;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  if (value < 1024 * 1024) return `${(value / 1024).toFixed(1)} KiB`;
  return `${(value / 1024 / 1024).toFixed(1)} MiB`;
}

export function exact(at) {
  return at === null || at === undefined ? "" : `${new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** Time of day, UTC. */
export function clock(at) {
  return new Date(at * 1000).toISOString().slice(11, 19);
}

export function streamName(stream) {
  return `${stream.instance}/dp${stream.rank}`;
}

/** `a, b`, or `a, b and 3 more` of which `most` are named. */
export function someOf(names, most) {
  const more = names.length - most;
  return names.slice(0, most).join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}

export function plural(number, singular, several = `${singular}s`) {
  return `${whole.format(number)} ${number === 1 ? singular : several}`;
}
