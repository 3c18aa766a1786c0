// Numbers as text.

/** Format a duration in seconds, with a space that does not break; "–" for none. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0\u00a0s";
  if (value < 0.01) return `${(value * 1e3).toFixed(1)}\u00a0ms`;
  if (value < 1) return `${Math.round(value * 1e3)}\u00a0ms`;
  return value < 100 ? `${value.toFixed(2)}\u00a0s` : `${Math.round(value)}\u00a0s`;
}

/** Format a count with separators of thousands. */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** Format a rate or another number with at most one decimal. */
export function decimal(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
}

/** Format a rate: with two decimals below 1, so that few events in a window are not 0. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  const digits = value < 1 ? 2 : value < 100 ? 1 : 0;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Format a long time in its two largest units. */
export function duration(value) {
  const whole = Math.floor(value);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

/** Format the age of what runs. */
export function age(value) {
  return value < 10 ? `${value.toFixed(1)} s` : duration(value);
}

/** Format a time in the past. */
export function ago(value) {
  return `${duration(Math.round(value))} ago`;
}

/** Format a number of things whose plural ends in s. */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Format a number of bytes. */
export function bytes(value) {
  if (value < 1024) return `${value} B`;
  return value < 1 << 20 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / (1 << 20)).toFixed(1)} MiB`;
}

/** Format a fraction from 0 to 1 as a percentage. */
export function percent(value) {
  return `${Math.round(value * 100)} %`;
}
