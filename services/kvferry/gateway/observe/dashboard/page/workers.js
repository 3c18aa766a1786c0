// The table of workers, from /fleet.

import { empty, html, state, table } from "./elements.js";
import { count, percent, plural } from "./formats.js";

const MAP_STATES = { exact: ["good", "exact"], catching_up: ["warn", "catching up"], blind: ["bad", "blind"] };

/** Create the section's content. */
export function workers(fleet) {
  const notes = [];
  if (fleet.source.detail) notes.push(html("p", { class: "note" }, `Discovery is ${fleet.source.state}: `, fleet.source.detail));
  if (fleet.waking.detail) notes.push(html("p", { class: "note" }, "Scaling up failed: ", fleet.waking.detail));
  if (!fleet.workers.length) return [...notes, empty("No workers were found.")];
  const ready = fleet.workers.filter((worker) => worker.takes_work).length;
  return [...notes, table(`${ready} of ${fleet.workers.length} accept requests`, COLUMNS, fleet.workers)];
}

/** Return {kind, text} of the state of a cache map. */
export function mapState(name) {
  const [kind, text] = MAP_STATES[name] ?? ["bad", name];
  return { kind, text };
}

const COLUMNS = [
  { label: "Worker", kind: "id", content: (worker) => worker.worker_id ?? worker.name },
  { label: "Role", content: (worker) => worker.role },
  { label: "State", kind: "text", full: true, content: readiness },
  { label: "Cache map", kind: "text", full: true, content: cacheMap },
  { label: "KV in use", kind: "fixed", full: true, content: kvUse },
  { label: "Running", number: true, content: (worker) => count(worker.load.running) },
  { label: "Waiting", number: true, content: (worker) => count(worker.load.waiting) },
  { label: "Loading", number: true, content: (worker) => count(worker.load.loading) },
  { label: "Calls", number: true, content: (worker) => count(worker.in_flight) },
];

function readiness(worker) {
  if (worker.takes_work) return state("good", "ready");
  if (worker.why_not === "draining") return state("warn", "draining");
  return [state("bad", "not ready"), html("div", { class: "why" }, worker.why_not)];
}

function cacheMap(worker) {
  if (!worker.cache_map) return "";
  const { kind, text } = mapState(worker.cache_map.state);
  const why = worker.cache_map.state === "exact" ? plural(worker.cache_map.blocks, "block") : worker.cache_map.why;
  return [state(kind, text), " ", html("span", { class: "why" }, why)];
}

function kvUse(worker) {
  const load = worker.load;
  if (!load.blocks_total) return "–";
  const used = 1 - load.blocks_free / load.blocks_total;
  const text = `${percent(used)} of ${plural(load.blocks_total, "block")}`;
  return [html("meter", { min: 0, max: 1, high: 0.9, value: used, "aria-label": text }), " ",
    html("span", { class: "why" }, text)];
}
