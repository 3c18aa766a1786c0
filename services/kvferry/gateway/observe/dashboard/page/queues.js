// Queues by priority and tenant, from `flow` in /fleet, and the tokens of prompts by source.

import { empty, html, svg, table } from "./elements.js";
import { bytes, count, percent } from "./formats.js";

/** Create the content of the section of queues. */
export function queues(fleet) {
  const flow = fleet.flow;
  if (!flow) return [empty("This gateway has no flow control.")];
  const text = `${count(flow.queued)} queued (${bytes(flow.queued_bytes)}), ${count(flow.dispatched)} dispatched, ` +
    `${count(fleet.held)} held for a worker; sequences ${inUse(flow.sequences)}, prefill tokens ${inUse(flow.prefill_tokens)}`;
  const bands = table("By priority (lower numbers first)", [
    { label: "Priority", content: (band) => String(band.priority) },
    { label: "Queued", number: true, content: (band) => count(band.queued) },
    { label: "Memory", number: true, content: (band) => bytes(band.queued_bytes) },
  ], flow.bands);
  const tenants = table("By tenant", [
    { label: "Tenant", kind: "name", content: (tenant) => tenant.tenant || "(default)" },
    { label: "Queued", number: true, content: (tenant) => count(tenant.queued) },
    { label: "Memory", number: true, content: (tenant) => bytes(tenant.queued_bytes) },
    { label: "Dispatched", number: true, content: (tenant) => count(tenant.dispatched) },
  ], flow.tenants.slice(0, 50));
  const hidden = flow.tenants.length - 50;
  return [
    html("p", {}, text),
    html("div", { class: "pair" },
      html("div", {}, flow.bands.length ? bands : empty("No requests are waiting.")),
      html("div", {}, flow.tenants.length ? tenants : empty("No tenant has requests."),
        hidden > 0 ? html("p", { class: "note" }, `and ${count(hidden)} further tenants`) : null)),
  ];
}

function inUse(room) {
  return `${count(room.in_use)}${room.bound === null ? ", no limit" : ` of ${count(room.bound)}`}`;
}

const SOURCES = [["computed", "Computed"], ["cached", "Cached"], ["peer", "Fetched from a peer"], ["tier", "Loaded from a tier"]];

/** Create the content of the section of sources; width in pixels. */
export function sources(overview, width) {
  const totals = overview.totals;
  const tokens = totals.prompt_tokens_by_source;
  const causes = totals.computed_tokens_by_cause;
  const moved = count(totals.handoff_tokens);
  const seen = totals.prompt_tokens_seen;
  const routed = Object.values(seen).reduce((sum, number) => sum + number, 0);
  const ceiling = routed ? `${percent((seen.seen ?? 0) / routed)} of the tokens of prompts were in blocks of earlier prompts. ` : "";
  return [
    bars(SOURCES.map(([key, name]) => [name, tokens[key]]), width),
    html("p", { class: "note" }, `Since the gateway's start, on the worker of the first token. ${ceiling}` +
      `Decode workers then fetched ${moved} tokens in hand-offs.`),
    html("h3", {}, "Computed tokens by cause"),
    causes.length ? bars(causes.map((one) => [one.cause, one.num_tokens, one.help]), width) : empty("No tokens were computed."),
  ];
}

/** Create a bar for each name and number, as shares of their sum; a third entry is the text under the pointer. */
function bars(rows, width) {
  const all = rows.reduce((sum, [, number]) => sum + number, 0);
  const start = 132;
  const room = Math.max(40, width - start - 112);
  const height = 8 + rows.length * 26;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": rows.map(([name, number]) => `${name} ${count(number)}`).join(", ") });
  rows.forEach(([name, number, help], index) => {
    const share = all ? number / all : 0;
    const y = 8 + index * 26;
    picture.append(
      svg("text", { x: 0, y: y + 12 }, name, help ? svg("title", {}, help) : null),
      svg("rect", { class: "track", x: start, y, width: room, height: 16, rx: 2 }),
      svg("rect", { class: "bar", x: start, y, width: room * share, height: 16, rx: 2 }),
      svg("text", { x: width, y: y + 12, "text-anchor": "end" }, `${count(number)} (${percent(share)})`));
  });
  return picture;
}
