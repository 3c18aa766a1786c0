// The table of replicas, from /fleet.

import { empty, html, state, table } from "./elements.js";
import { count, percent } from "./formats.js";

const MAP_STATES = { exact: ["good", "EXACT"], catching_up: ["warn", "CATCHING-UP"], blind: ["bad", "BLIND"] };

/** Create the section's content. */
export function replicas(fleet) {
  const notes = [];
  if (fleet.source.detail) notes.push(html("p", { class: "note" }, `Discovery is ${fleet.source.state}: `, fleet.source.detail));
  if (fleet.waking.detail) notes.push(html("p", { class: "note" }, "Scaling up failed: ", fleet.waking.detail));
  if (!fleet.workers.length) return [...notes, empty("No replicas were found.")];
  const ready = fleet.workers.filter((worker) => worker.takes_work).length;
  return [...notes, table(`${ready} of ${fleet.workers.length} accept requests`, COLUMNS, fleet.workers)];
}

const COLUMNS = [
  { label: "Replica", content: (worker) => worker.worker_id ?? worker.name },
  { label: "Role", content: (worker) => worker.role },
  { label: "State", content: readiness },
  { label: "Cache map", full: true, content: cacheMap },
  { label: "KV in use", full: true, content: kvUse },
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
  const [kind, name] = MAP_STATES[worker.cache_map.state] ?? ["bad", worker.cache_map.state];
  const why = worker.cache_map.state === "exact" ? `${count(worker.cache_map.blocks)} blocks` : worker.cache_map.why;
  return [state(kind, name), " ", html("span", { class: "why" }, why)];
}

function kvUse(worker) {
  const load = worker.load;
  if (!load.blocks_total) return "–";
  const used = 1 - load.blocks_free / load.blocks_total;
  const text = `${percent(used)} of ${count(load.blocks_total)} blocks`;
  return [html("meter", { min: 0, max: 1, high: 0.9, value: used, "aria-label": text }), " ",
    html("span", { class: "why" }, text)];
}
