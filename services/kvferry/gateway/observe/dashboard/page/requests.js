// The list of ended requests, from /debug/requests.

import { empty, html, scrolled, state, table } from "./elements.js";
import { count, seconds } from "./formats.js";

const KINDS = { done: "good", cancelled: "warn", failed: "bad" };

/** Return the fragment of the page's address that selects a request. */
export function fragment(request) {
  return `#${new URLSearchParams({ request: request.request_id, tenant: request.tenant })}`;
}

/** Return {id, tenant} of the request that a fragment selects, or null. */
export function selected(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const id = fields.get("request");
  return id ? { id, tenant: fields.get("tenant") } : null;
}

/** Create the section's content. */
export function requests(list, current) {
  if (!list.length) return [empty("No requests have ended yet.")];
  const isCurrent = (one) => current !== null && current.id === one.request_id && (current.tenant ?? one.tenant) === one.tenant;
  const columns = [
    { label: "Request", kind: "id", content: (one) => html("a",
      { href: fragment(one), "aria-current": isCurrent(one) ? "true" : null }, one.request_id) },
    { label: "Tenant", kind: "name", content: (one) => one.tenant || "(default)" },
    { label: "Outcome", content: (one) => state(KINDS[one.outcome] ?? "bad", one.outcome) },
    { label: "Prompt", number: true, content: (one) => count(one.prompt_tokens) },
    { label: "Cached", number: true, content: (one) => count(one.cached_tokens) },
    { label: "Output", number: true, content: (one) => count(one.output_tokens) },
    { label: "Time to first token", number: true, content: (one) => seconds(one.first_token_seconds || null) },
    { label: "Total", number: true, content: (one) => seconds(one.total_seconds) },
  ];
  const rows = table("Ended, newest first; prompt, cached and output in tokens", columns, list, (one) => (isCurrent(one) ? "selected" : null));
  return [scrolled("Ended requests", rows)];
}
