// Line charts of values over the last minutes.

import { empty, html, svg } from "./elements.js";

const HEIGHT = 130;
const LEFT = 52;
const BOTTOM = 18;
const TOP = 8;

/**
 * Create a chart with its legend.
 * lines: {label, values, kind: "main" or "second"}; a value of null interrupts its line.
 * secondsAgo: the age of each value, descending. span: the seconds that the chart covers. format: value to text.
 */
export function chart(name, width, secondsAgo, span, lines, format) {
  const top = niceTop(Math.max(0, ...lines.flatMap((line) => line.values.filter((value) => value !== null))));
  const x = (ago) => LEFT + (width - LEFT - 6) * (1 - Math.min(ago, span) / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const latest = lines.map((line) => `${line.label} ${format(line.values.at(-1) ?? null)}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img",
    "aria-label": `${name}, now: ${latest}` });
  for (const share of [0, 0.5, 1]) {
    picture.append(
      svg("line", { class: "grid", x1: LEFT, x2: width - 6, y1: y(top * share), y2: y(top * share) }),
      svg("text", { x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end" }, share ? format(top * share) : "0"));
  }
  picture.append(
    svg("text", { x: LEFT, y: HEIGHT - 3 }, `${Math.round(span / 60)} min ago`),
    svg("text", { x: width - 6, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
  for (const line of lines) picture.append(...drawn(line, secondsAgo, x, y));
  const hasValues = lines.some((line) => line.values.some((value) => value !== null));
  return [legend(lines, format), picture, ...(hasValues ? [] : [empty("No values in this time.")])];
}

function drawn(line, secondsAgo, x, y) {
  const parts = [];
  let part = [];
  const finish = () => {
    if (part.length === 1) parts.push(svg("circle", { class: `dot ${line.kind}`, cx: part[0][0], cy: part[0][1], r: 2 }));
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

function legend(lines, format) {
  return html("ul", { class: "legend" }, lines.map((line) => html("li", {},
    svg("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" },
      svg("line", { class: `line ${line.kind}`, x1: 0, x2: 22, y1: 4, y2: 4 })),
    `${line.label} `, html("b", {}, format(line.values.at(-1) ?? null)))));
}

/** Return the smallest of 1, 2, 5 times a power of ten that is at least the value. */
function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}
