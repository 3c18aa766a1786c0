// Where the time of an answer went: a line of numbers, and a bar of phases from the gateway's timing.

import { html, svg } from "./elements.js";
import { count, decimal, seconds } from "./formats.js";

const NAMES = { queue: "Queue", prefill: "Prefill", first_token: "First token", handoff: "Hand-off", decode: "Decode" };

/** Create the times of an answer. `measured` has what this page saw, in seconds: ttft (null if nothing came), total. */
export function times(measured, usage, timing) {
  const line = html("p", { class: "note" }, numbers(measured, usage).join(", "));
  return html("div", { class: "times" }, line, timing?.total_seconds > 0 ? bar(phases(timing), timing.total_seconds) : null);
}

function numbers({ ttft, total }, usage) {
  const parts = ttft === null ? [] : [`TTFT ${seconds(ttft)}`];
  if (usage) {
    const output = usage.completion_tokens;
    if (output > 1 && ttft !== null && total > ttft) parts.push(`${decimal((output - 1) / (total - ttft))} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${count(usage.prompt_tokens)} prompt tokens (${count(cached)} cached)`, `${count(output)} generated`);
  }
  return [...parts, `${seconds(total)} in all`];
}

/** Return the phases of a timing that took time, each with its begin and end in seconds; they follow each other. */
export function phases(timing) {
  const total = timing.total_seconds;
  const hasFirst = timing.first_token_seconds > 0;
  const first = hasFirst ? Math.min(timing.first_token_seconds, total) : total;
  const lengths = [["queue", timing.queue_seconds, first], ["prefill", timing.prefill_seconds, first], ["first_token", first, first]];
  if (hasFirst) lengths.push(["handoff", timing.handoff_seconds, total], ["decode", total, total]);
  let at = 0;
  const found = [];
  for (const [name, length, limit] of lengths) {
    const end = Math.min(at + Math.max(0, length), limit);
    if (end > at) found.push({ name, start: at, end });
    at = Math.max(at, end);
  }
  return found;
}

function bar(found, total) {
  const texts = found.map((phase) => `${NAMES[phase.name]} ${seconds(phase.end - phase.start)}`);
  const picture = svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: "waterfall", role: "img", "aria-label": texts.join(", ") },
    svg("rect", { class: "track", width: 100, height: 8 }),
    found.map((phase) => svg("rect", { class: `bar ${phase.name}`, x: (100 * phase.start) / total, height: 8,
      width: Math.max(0.4, (100 * (phase.end - phase.start)) / total) })));
  const key = (name) => svg("svg", { "aria-hidden": "true" }, svg("rect", { class: `bar ${name}`, width: 22, height: 8 }));
  const legend = html("ul", { class: "legend", "aria-hidden": "true" },
    found.map((phase, number) => html("li", {}, key(phase.name), texts[number])));
  return html("div", {}, picture, legend);
}
