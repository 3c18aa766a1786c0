// Polls the gateway and fills the page.

import { chart } from "./charts.js";
import { empty, show } from "./elements.js";
import { decimal, seconds } from "./formats.js";
import { queues, sources } from "./queues.js";
import { replicas } from "./replicas.js";
import { requests, selected } from "./requests.js";
import { request } from "./waterfall.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 5000;

let latest = null;
let detail = null;
let updated = null;

async function fetched(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), credentials: "omit" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  return body;
}

async function poll() {
  try {
    const [fleet, overview, list] = await Promise.all(
      [fetched("fleet"), fetched("debug/overview"), fetched("debug/requests?limit=50")]);
    latest = { fleet, overview, list: list.requests };
    updated = new Date();
    render();
    report(true, `Last updated ${updated.toLocaleTimeString()}`);
  } catch (error) {
    const since = updated ? `; the data is of ${updated.toLocaleTimeString()}` : "";
    report(false, `Gateway not reachable (${error.message})${since}`);
  }
}

function report(isReachable, text) {
  const line = document.getElementById("status");
  if (line.textContent !== text) line.textContent = text;
  // Only a change of state is announced, not every update.
  line.setAttribute("aria-live", isReachable ? "off" : "polite");
  line.classList.toggle("lost", !isReachable);
  document.getElementById("data").classList.toggle("stale", !isReachable && updated !== null);
}

function width(id) {
  return Math.max(200, document.getElementById(id).clientWidth);
}

function render() {
  if (latest === null) return;
  const { fleet, overview, list } = latest;
  document.getElementById("pool").textContent = fleet.pool || "gateway";
  show("replicas", replicas(fleet));
  show("queues", queues(fleet));
  show("sources", sources(overview, width("sources")));
  show("requests", requests(list, selected(location.hash)));
  lines("first-token", "Time to first token", [["p50", "first_token_p50"], ["p95", "first_token_p95"]], seconds);
  lines("token-gap", "Inter-token latency", [["p50", "token_gap_p50"], ["p95", "token_gap_p95"]], seconds);
  lines("rate", "Output tokens per second", [["tokens/s", "output_tokens_per_second"]], decimal);
}

function lines(id, name, keys, format) {
  const { series, interval_seconds: interval, max_points: points } = latest.overview;
  const drawn = keys.map(([label, key], number) => ({ label, values: series[key], kind: number ? "second" : "main" }));
  show(id, chart(name, width(id), series.seconds_ago, interval * points, drawn, format));
}

async function select() {
  const current = selected(location.hash);
  render();
  if (current === null) return;
  let found = null;
  let failure = "";
  try {
    found = await fetched(`debug/requests/${encodeURIComponent(current.id)}`);
  } catch (error) {
    failure = error.message;
  }
  if (selected(location.hash)?.id !== current.id) return; // another request was selected meanwhile
  detail = found && { found, tenant: current.tenant };
  if (detail === null) show("request", empty(failure));
  else renderDetail();
}

function renderDetail() {
  if (detail !== null) show("request", request(detail.found, detail.tenant, width("request")));
}

async function run() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, INTERVAL_MS));
  }
}

window.addEventListener("hashchange", select);
window.addEventListener("resize", () => { render(); renderDetail(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
select();
run();
