// Line charts of values over the last minutes.

import { empty, html, svg } from "./elements.js";
import { ago } from "./formats.js";

const HEIGHT = 140;
const LEFT = 52;
const RIGHT = 6;
const BOTTOM = 22;
const TOP = 8;
const WIDE = 480;

/**
 * Create a chart with its legend. Return its elements, and its values at the chosen point as text.
 * lines: {label, values, kind: "main" or "second"}; a value of null interrupts its line.
 * secondsAgo: the age of each value, descending. span: the seconds that the chart covers. format: value to text.
 * at: the age of the chosen point in seconds; null for the latest values.
 */
export function chart(width, secondsAgo, span, lines, format, at) {
  const top = niceTop(Math.max(0, ...lines.flatMap((line) => line.values.filter((value) => value !== null))));
  const x = (age) => LEFT + (width - LEFT - RIGHT) * (1 - Math.min(age, span) / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const chosen = at === null ? secondsAgo.length - 1 : nearest(secondsAgo, at);
  const isLatest = chosen === secondsAgo.length - 1;
  const when = isLatest ? "now" : ago(secondsAgo[chosen]);
  const texts = lines.map((line) => format(line.values[chosen] ?? null));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
  picture.append(...scale(width, top, y, format), ...ticks(span, x, width < WIDE ? 2 : 5));
  for (const line of lines) picture.append(...drawn(line, secondsAgo, x, y));
  if (at !== null && chosen >= 0) picture.append(...cursor(lines, chosen, x(secondsAgo[chosen]), y));
  const hasValues = lines.some((line) => line.values.some((value) => value !== null));
  return {
    elements: [legend(lines, texts, when), picture, ...(hasValues ? [] : [empty("No values in this time.")])],
    text: hasValues ? `${when}: ${names(lines, texts)}` : "no values",
  };
}

function names(lines, texts) {
  return lines.map((line, number) => `${line.label} ${texts[number]}`).join(", ");
}

/** Return the age in seconds of the point at x in a chart of this width, which may be out of its span. */
export function agoAt(x, width, span) {
  return span * (1 - (x - LEFT) / (width - LEFT - RIGHT));
}

/** Return the index of the point whose age is nearest to `at` seconds; -1 if there is none. */
export function nearest(secondsAgo, at) {
  let best = secondsAgo.length - 1;
  secondsAgo.forEach((age, number) => {
    if (Math.abs(age - at) < Math.abs(secondsAgo[best] - at)) best = number;
  });
  return best;
}

function scale(width, top, y, format) {
  return [0, 0.5, 1].flatMap((share) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(top * share), y2: y(top * share) }),
    svg("text", { x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end" },
      share ? round(format(top * share)) : "0")]);
}

/** Leave out the zeros after the point of a formatted number. */
function round(text) {
  return text.replace(/\.0+(?=\D|$)/, "");
}

function ticks(span, x, most) {
  const base = HEIGHT - BOTTOM;
  return Array.from({ length: most + 1 }, (_, number) => {
    const age = (span * number) / most;
    const anchor = number === 0 ? "end" : number === most ? "start" : "middle";
    return [
      svg("line", { class: "grid", x1: x(age), x2: x(age), y1: base, y2: base + 4 }),
      svg("text", { class: "tick", x: x(age), y: base + 16, "text-anchor": anchor },
        number ? `${Math.round(age / 60)} min` : "now")];
  }).flat();
}

function cursor(lines, chosen, x, y) {
  return [
    svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
    ...lines.filter((line) => line.values[chosen] !== null).map((line) =>
      svg("circle", { class: `dot ${line.kind}`, cx: x, cy: y(line.values[chosen]), r: 3.5 }))];
}

function drawn(line, secondsAgo, x, y) {
  const parts = [];
  let part = [];
  const finish = () => {
    const [cx, cy] = part[0] ?? [];
    if (part.length === 1) parts.push(svg("circle", { class: `dot ${line.kind}`, cx, cy, r: 2 }));
    if (part.length > 1) parts.push(svg("polyline", { class: `line ${line.kind}`, points: part.join(" ") }));
    part = [];
  };
  line.values.forEach((value, number) => {
    if (value === null) finish();
    else part.push([x(secondsAgo[number]).toFixed(1), y(value).toFixed(1)]);
  });
  finish();
  return parts;
}

function legend(lines, texts, when) {
  return html("ul", { class: "legend" },
    lines.map((line, number) => html("li", {},
      svg("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" },
        svg("line", { class: `line ${line.kind}`, x1: 0, x2: 22, y1: 4, y2: 4 })),
      `${line.label} `, html("b", {}, texts[number]))),
    html("li", { class: "when" }, when));
}

/** Return the smallest of 1, 2, 5 times a power of ten that is at least the value. */
function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}
