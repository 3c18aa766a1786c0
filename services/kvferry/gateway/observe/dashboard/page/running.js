// The list of what runs and waits, from /debug/requests.

import { empty, html, scrolled, table } from "./elements.js";
import { age, count, plural } from "./formats.js";

const STATES = { handoff: "hand-off", search: "beam search" };

const COLUMNS = [
  { label: "Request", kind: "id", content: named },
  { label: "Tenant", kind: "name", content: (one) => one.tenant || "(default)" },
  { label: "State", content: (one) => STATES[one.state] ?? one.state },
  { label: "Workers", kind: "name", content: workers },
  { label: "Prompt", number: true, content: (one) => count(one.prompt_tokens) },
  { label: "Output", number: true, content: (one) => count(one.output_tokens) },
  { label: "Age", number: true, content: (one) => age(one.age_seconds) },
];

/** Create the content of the list; numFurther is the number of entries that it lacks. */
export function running(list, numFurther) {
  if (!list.length) return [empty("No requests are running.")];
  const rows = table("Running and queued, oldest first; prompt and output in tokens", COLUMNS, list);
  const rest = numFurther ? [html("p", { class: "note" }, `and ${count(numFurther)} newer`)] : [];
  return [scrolled("Running and queued requests", rows), ...rest];
}

function named(one) {
  const part = one.beam_width ? plural(one.beam_width, "beam") : one.sample_index ? `sample ${one.sample_index}` : "";
  return [one.request_id, part ? html("span", { class: "why" }, ` ${part}`) : null];
}

function workers(one) {
  return [...new Set([one.prefill_worker, one.decode_worker].filter((worker) => worker))].join(" → ");
}
