// Polls the gateway and fills the page.

import { chart } from "./charts.js";
import { choose, pointedAt } from "./cursor.js";
import { empty, html, show } from "./elements.js";
import { decimal, seconds } from "./formats.js";
import { queues, sources } from "./queues.js";
import { requests, selected } from "./requests.js";
import { running } from "./running.js";
import { about, stats } from "./stats.js";
import { request } from "./waterfall.js";
import { workers } from "./workers.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 5000;
const CHARTS = {
  "first-token": { keys: [["p50", "first_token_p50"], ["p95", "first_token_p95"]], format: seconds },
  "token-gap": { keys: [["p50", "token_gap_p50"], ["p95", "token_gap_p95"]], format: seconds },
  rate: { keys: [["tokens/s", "output_tokens_per_second"]], format: decimal },
};

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
    latest = { fleet, overview, list };
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
  document.title = `kvferry: ${overview.model}`;
  document.getElementById("model").textContent = overview.model;
  document.getElementById("about").textContent = about(overview, fleet);
  show("stats", stats(overview, fleet));
  show("workers", workers(fleet));
  show("queues", queues(fleet));
  show("sources", sources(overview, width("sources")));
  show("running", running(list.running, list.num_further_running));
  show("requests", requests(list.requests, selected(location.hash)));
  for (const id of Object.keys(CHARTS)) draw(id);
}

/** The seconds that the charts cover, those between two points, and the age of each point. */
function span() {
  const { interval_seconds: step = 1, max_points: points = 1, series } = latest?.overview ?? {};
  return { seconds: step * points, step, ages: series?.seconds_ago ?? [] };
}

function draw(id) {
  if (latest === null) return;
  const { keys, format } = CHARTS[id];
  const { series } = latest.overview;
  const lines = keys.map(([label, key], number) => ({ label, values: series[key], kind: number ? "second" : "main" }));
  const at = pointedAt(id);
  const { elements, text } = chart(width(id), series.seconds_ago, span().seconds, lines, format, at);
  show(id, elements);
  const place = document.getElementById(id);
  const values = { min: -span().seconds, max: 0, now: -Math.round(at ?? 0), text };
  for (const [key, value] of Object.entries(values)) place.setAttribute(`aria-value${key}`, String(value));
}

async function select(mayScroll) {
  const current = selected(location.hash);
  render();
  if (current === null) {
    detail = null;
    show("request", empty("Select an ended request in the list."));
    return;
  }
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
  if (mayScroll) reveal();
}

/** Bring the selected request into view, unless its begin is already seen. */
function reveal() {
  const title = document.getElementById("request-title");
  const { top } = title.getBoundingClientRect();
  if (top >= 0 && top < window.innerHeight * 0.6) return;
  title.parentElement.scrollIntoView({ block: "start" });
  title.focus({ preventScroll: true });
}

function renderDetail() {
  if (detail === null) return;
  const back = html("p", {}, html("a", { href: "#requests-title" }, "Back to the list"));
  show("request", back, request(detail.found, detail.tenant, width("request")));
}

async function run() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, INTERVAL_MS));
  }
}

for (const id of Object.keys(CHARTS)) choose(id, span, () => draw(id));
window.addEventListener("hashchange", () => select(true));
window.addEventListener("resize", () => { render(); renderDetail(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
select(false);
run();
