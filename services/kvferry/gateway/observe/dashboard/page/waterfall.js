// One request in detail: facts, waterfall, routes with their candidates, sources of its KV. From /debug/requests/{id}.

import { empty, html, state, svg, table } from "./elements.js";
import { bytes, count, plural, seconds } from "./formats.js";
import { mapState } from "./workers.js";

const NAMES = { queue: "Queue", prefill: "Prefill", first_token: "First token", handoff: "Hand-off", decode: "Decode" };

/** Create the content of the section from the answer about a request; width in pixels. */
export function request(found, tenant, width) {
  const entry = found.tenants.find((one) => one.tenant === tenant) ?? found.tenants[0];
  const parts = entry.samples.map((sample) => [
    html("h3", {}, `Sample ${sample.sample_index}: `, sample.outcome),
    facts(found.request_id, entry.tenant, sample),
    waterfall(sample, width),
    ...routes(sample),
    ...loads(sample),
  ]);
  return parts.flat();
}

function facts(id, tenant, sample) {
  const timing = sample.timing;
  const workers = [timing.prefill_worker, timing.decode_worker].filter((worker) => worker).join(" → ");
  const moved = timing.handoff_blocks ? `, ${plural(timing.handoff_blocks, "block")}, ${bytes(timing.handoff_bytes)}, ${timing.connector}` : "";
  const rows = [
    ["Request", id], ["Tenant", tenant || "(default)"], ["Error", sample.error],
    ["Tokens", `${count(sample.prompt_tokens)} prompt (${count(sample.cached_tokens)} cached), ${count(sample.output_tokens)} generated`],
    ["Computed", sample.computed.map((one) => `${count(one.num_tokens)} ${one.cause}`).join(", ")],
    ["Workers", workers], ["Hand-off", timing.handoff_outcome ? timing.handoff_outcome + moved : ""],
    ["Resumed", timing.resumed ? plural(timing.resumed, "time") : ""],
  ];
  return html("dl", { class: "facts" },
    rows.filter(([, value]) => value).map(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]).flat());
}

function waterfall(sample, width) {
  const phases = sample.phases;
  const total = sample.timing.total_seconds;
  if (!phases.length || !total) return empty("No phases were measured.");
  const start = 76;
  const room = Math.max(40, width - start - 66);
  const height = phases.length * 24 + 20;
  const x = (value) => start + (room * value) / total;
  const label = phases.map((phase) => `${NAMES[phase.name]} ${seconds(phase.end - phase.start)}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label, class: "waterfall" });
  phases.forEach((phase, number) => {
    const y = number * 24 + 2;
    picture.append(
      svg("text", { x: 0, y: y + 12 }, NAMES[phase.name]),
      svg("rect", { class: "track", x: start, y, width: room, height: 16, rx: 2 }),
      svg("rect", { class: `bar ${phase.name}`, x: x(phase.start), y, width: Math.max(1, x(phase.end) - x(phase.start)), height: 16 }),
      svg("text", { x: width, y: y + 12, "text-anchor": "end" }, seconds(phase.end - phase.start)));
  });
  picture.append(
    svg("text", { x: start, y: height - 4 }, "0"),
    svg("text", { x: start + room, y: height - 4, "text-anchor": "end" }, seconds(total)));
  return picture;
}

function routes(sample) {
  return sample.routes.map((route, number) => {
    const home = route.worker === route.preferred ? "ranks first" : `${route.preferred} was full`;
    const load = `load ${route.load}${route.capacity ? ` of ${route.capacity}` : ", no limit"}`;
    const text = `${route.worker}: ${route.reason}, ${home}; ${load}; ${plural(route.num_candidates, "candidate")}`;
    const columns = [
      { label: "Candidate", kind: "name", content: (one) => one.worker },
      { label: "Load", number: true, content: (one) => count(one.load) },
      { label: "Cached", number: true, content: (one) => count(one.cached_tokens) },
      { label: "Reported", number: true, content: (one) => count(one.confirmed_tokens) },
      { label: "Basis", content: (one) => one.basis },
      { label: "Map", content: (one) => mapState(one.map_state).text },
    ];
    const isChosen = (one) => (one.worker === route.worker ? "selected" : null);
    return html("div", {}, html("h3", {}, `Route ${number + 1}: ${route.role}`), table(text, columns, route.candidates, isChosen));
  });
}

function loads(sample) {
  const reports = sample.timing.kv;
  if (!reports.length) return [];
  const columns = [
    { label: "Worker", kind: "name", content: (kv) => kv.worker_id },
    { label: "Source", content: (kv) => kv.source },
    { label: "Choice", content: (kv) => (kv.num_chosen ? `load ${count(kv.num_chosen)} tokens` : `compute ${count(kv.num_tokens)} tokens`) },
    { label: "Load expected", number: true, content: (kv) => seconds(kv.expected_load_seconds) },
    { label: "Compute expected", number: true, content: (kv) => seconds(kv.expected_compute_seconds) },
    { label: "Loaded", number: true, content: (kv) => (kv.num_chosen ? `${bytes(kv.bytes_loaded)} in ${seconds(kv.load_seconds)}` : "") },
    { label: "Failure", kind: "text", content: (kv) => (kv.failure ? [state("bad", "failed"), " ", kv.failure] : "") },
  ];
  return [html("h3", {}, "Load or compute"), table("Decisions on the KV of the prompt", columns, reports)];
}
