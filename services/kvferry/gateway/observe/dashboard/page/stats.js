// What the gateway does now: the row of numbers at the top, and what is known of the gateway itself.

import { html } from "./elements.js";
import { count, duration, percent, rate } from "./formats.js";

/** Create the row of numbers from /debug/overview and /fleet. */
export function stats(overview, fleet) {
  const last = (name) => overview.series[name].at(-1) ?? null;
  const [requests, errors, failed] = ["requests", "errors", "failed_streams"].map((name) => last(`${name}_per_second`));
  const over = `over ${overview.window_seconds} s`;
  const flow = fleet.flow ?? null;
  const isBad = errors > 0 || failed > 0;
  return html("dl", { class: "stats" },
    stat("Requests", rate(requests), "per second", `answered, ${over}`),
    stat("Errors", rate(errors), "per second", errorNote(requests, errors, failed), isBad),
    stat("Output tokens", rate(last("output_tokens_per_second")), "per second", over),
    stat("Running", flow ? count(flow.dispatched) : "–", noun(flow?.dispatched), roomNote(flow?.sequences)),
    stat("Queued", flow ? count(flow.queued) : "–", noun(flow?.queued),
      fleet.held ? `${count(fleet.held)} held for a worker` : ""));
}

/** Return facts on the gateway as one line: version, uptime, pool, devices of its workers. */
export function about(overview, fleet) {
  const devices = [...new Set(fleet.workers.map((worker) => worker.device).filter((device) => device))];
  return [`version ${overview.version}`, `up ${duration(overview.uptime_seconds)}`,
    fleet.pool ? `pool ${fleet.pool}` : "", devices.length ? `workers on ${devices.join(", ")}` : ""]
    .filter((part) => part).join(" · ");
}

function stat(name, value, unit, note, isBad = false) {
  return html("div", { class: isBad ? "stat bad" : "stat" }, html("dt", {}, name),
    html("dd", {}, html("b", {}, value), ` ${unit}`), note ? html("dd", { class: "note" }, note) : null);
}

function errorNote(requests, errors, failed) {
  const share = errors > 0 && requests > 0 ? `${percent(errors / requests)} of requests` : "status 500 or above";
  return failed > 0 ? `${share}; ${rate(failed)} failed streams per second` : share;
}

function roomNote(sequences) {
  return (sequences?.bound ?? null) === null ? "" : `${count(sequences.in_use)} of ${count(sequences.bound)} sequences`;
}

function noun(value) {
  return value === 1 ? "request" : "requests";
}
