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
  const tokens = overview.totals.prompt_tokens_by_source;
  const all = SOURCES.reduce((sum, [key]) => sum + tokens[key], 0);
  const start = 132;
  const room = Math.max(40, width - start - 112);
  const picture = svg("svg", { viewBox: `0 0 ${width} 112`, height: 112, role: "img",
    "aria-label": SOURCES.map(([key, name]) => `${name} ${count(tokens[key])}`).join(", ") });
  SOURCES.forEach(([key, name], number) => {
    const share = all ? tokens[key] / all : 0;
    const y = 8 + number * 26;
    picture.append(
      svg("text", { x: 0, y: y + 12 }, name),
      svg("rect", { class: "track", x: start, y, width: room, height: 16, rx: 2 }),
      svg("rect", { class: "bar", x: start, y, width: room * share, height: 16, rx: 2 }),
      svg("text", { x: width, y: y + 12, "text-anchor": "end" }, `${count(tokens[key])} (${percent(share)})`));
  });
  const moved = count(overview.totals.handoff_tokens);
  return [picture, html("p", { class: "note" },
    `Since the gateway's start, on the worker of the first token. Decode workers then fetched ${moved} tokens in hand-offs.`)];
}
