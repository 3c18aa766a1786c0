// Requests to the gateway that served this page, and their errors with what to do about them.

import { events } from "./events.js";

const KEY = "kvferry-api-key";
const LIST_MS = 10000;

/** A request that failed; the message names the remedy. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Return the API key of this tab; empty for none. */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keep the API key until this tab is closed; an empty one is forgotten. */
export function keepApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Return the ids of the models. */
export async function models() {
  const answer = await asked("v1/models", { signal: AbortSignal.timeout(LIST_MS) });
  const body = await answer.json().catch(() => null);
  if (!Array.isArray(body?.data)) throw new ApiError("The gateway lists no models; is this a kvferry gateway?");
  return body.data.map((model) => String(model.id));
}

/**
 * Send a chat request, and call `onChunk` with each chunk of the answer; return when it has ended.
 * An abort by `stopping`, an AbortController, ends the request, which the gateway then cancels.
 */
export async function answer(request, stopping, onChunk) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const headers = { "content-type": "application/json" };
  const response = await asked("v1/chat/completions", { method: "POST", headers, body, signal: stopping.signal });
  let isWhole = false;
  let isIdle = false;
  const onIdle = () => { isIdle = true; stopping.abort(); };
  try {
    for await (const data of events(response.body, onIdle)) {
      if (data === "[DONE]") {
        isWhole = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw failure(200, chunk.error, response.headers);
      onChunk(chunk);
    }
  } catch (error) {
    if (isIdle) throw new ApiError("The answer was cut: nothing came for ten minutes. Send the prompt again.");
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(`The answer was cut (${error.message}). Send the prompt again.`);
  }
  if (!isWhole) throw new ApiError("The answer was cut before its end. Send the prompt again.");
}

async function asked(path, options) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(error.name === "TimeoutError" ? "The gateway does not answer. Try again later."
      : `The gateway cannot be reached (${error.message}). Check that it runs, then send the prompt again.`);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw failure(response.status, body?.error ?? {}, response.headers);
}

function failure(status, error, headers) {
  const said = typeof error.message === "string" && error.message ? error.message : `The gateway answered status ${status}`;
  const remedy = remedyOf(status, String(error.code ?? ""), headers.get("retry-after"));
  const id = status >= 500 || status === 200 ? headers.get("x-request-id") : null;
  return new ApiError(`${said.replace(/\.$/, "")}.${remedy ? ` ${remedy}` : ""}${id ? ` (Request ${id})` : ""}`, status);
}

function remedyOf(status, code, retryAfter) {
  if (status === 401) return "Enter an API key in the settings, then send the prompt again.";
  if (code === "context_length_exceeded") return "Start a new chat, or shorten the prompt.";
  if (status === 404) return "Choose another model in the settings.";
  if (/^\d+$/.test(retryAfter ?? "")) return `Send the prompt again in ${retryAfter} s.`;
  return status === 429 || status >= 500 || status === 200 ? "Send the prompt again." : "";
}
