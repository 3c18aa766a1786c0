// The point of a chart whose values are read, chosen with a pointer or the arrow keys.

import { agoAt, nearest } from "./charts.js";

const pointed = new Map();

/** Return the age in seconds of the chosen point of a chart, or null if none is chosen. */
export function pointedAt(id) {
  return pointed.get(id) ?? null;
}

/**
 * Let points of a chart be chosen; the element stays when its content is replaced.
 * span: returns the seconds that the chart covers, those between two points, and the age of each point. redraw: called
 * after each choice.
 */
export function choose(id, span, redraw) {
  const place = document.getElementById(id);
  const put = (value) => {
    if (value === null) pointed.delete(id);
    else pointed.set(id, Math.min(span().seconds, Math.max(0, value)));
    redraw();
  };
  const point = (event) => {
    const picture = place.querySelector(":scope > svg")?.getBoundingClientRect();
    if (picture) put(agoAt(event.clientX - picture.left, picture.width, span().seconds));
  };
  place.addEventListener("pointerdown", point);
  place.addEventListener("pointermove", point);
  place.addEventListener("pointerleave", () => put(null));
  place.addEventListener("focus", () => put(pointedAt(id) ?? 0));
  place.addEventListener("blur", () => put(null));
  place.addEventListener("keydown", (event) => {
    const { seconds, step, ages } = span();
    const now = ages[nearest(ages, pointedAt(id) ?? 0)] ?? 0;
    const next = { ArrowLeft: now + step, ArrowRight: now - step, PageUp: now + 60, PageDown: now - 60, Home: seconds,
      End: 0, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    put(next);
  });
}
