// Numbers as text.

/** Format a duration in seconds; "–" for none. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

/** Format a count with separators of thousands. */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** Format a rate or another number with at most one decimal. */
export function decimal(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
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
