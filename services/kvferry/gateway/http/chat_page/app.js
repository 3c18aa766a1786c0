// The chat: settings, prompts, answers. A turn that fails is shown, but is no part of the conversation.

import { answer, ApiError, apiKey, keepApiKey, models } from "./api.js";
import { html } from "./elements.js";
import { AnswerElement, promptElement } from "./messages.js";

const at = (id) => document.getElementById(id);
const NEAR_END_PX = 80;

let messages = [];
let running = null;

async function listModels() {
  try {
    const found = await models();
    const chosen = at("model").value;
    at("model").replaceChildren(...found.map((id) => html("option", { value: id }, id)));
    if (found.includes(chosen)) at("model").value = chosen;
    report(true, found.length === 1 ? found[0] : `${found.length} models`);
    return true;
  } catch (error) {
    report(false, error.message);
    if (error.status === 401) askForKey();
    return false;
  }
}

function report(isGood, text) {
  at("status").textContent = text;
  at("status").classList.toggle("lost", !isGood);
}

function askForKey() {
  at("settings").open = true;
  at("key-fields").hidden = false;
  at("key").focus();
}

function request(prompt) {
  const system = at("system").value.trim() ? [{ role: "system", content: at("system").value }] : [];
  const body = { model: at("model").value, messages: [...system, ...messages, { role: "user", content: prompt }] };
  if (at("temperature").value !== "") body.temperature = at("temperature").valueAsNumber;
  if (at("max-tokens").value !== "") body.max_tokens = at("max-tokens").valueAsNumber;
  return body;
}

async function send() {
  const prompt = at("prompt").value;
  if (running !== null || !prompt.trim()) return;
  for (const field of [at("temperature"), at("max-tokens")]) {
    if (!field.checkValidity()) {
      at("settings").open = true;
      field.reportValidity();
      return;
    }
  }
  const stopping = new AbortController();
  turn(stopping);
  try {
    if (at("model").value !== "" || await listModels()) await exchange(prompt, stopping);
  } finally {
    turn(null);
  }
}

async function exchange(prompt, stopping) {
  const body = request(prompt);
  const conversation = messages; // a new chat meanwhile has messages of its own
  const shown = new AnswerElement(body.model);
  at("prompt").value = "";
  at("welcome").hidden = true;
  at("messages").append(promptElement(prompt), shown.element);
  shown.element.scrollIntoView({ block: "end" });
  try {
    await answer(body, stopping, (chunk) => following(() => shown.add(chunk)));
    keep(conversation, prompt, shown.content);
    following(() => shown.end());
  } catch (error) {
    if (error.name === "AbortError" && !(error instanceof ApiError)) {
      if (shown.content) keep(conversation, prompt, shown.content);
      following(() => shown.end({ note: shown.content ? "Stopped; the text so far is kept." : "Stopped; not kept." }));
      return;
    }
    following(() => shown.end({ error: error.message }));
    if (!at("prompt").value) at("prompt").value = prompt;
    if (error.status === 401) askForKey();
  }
}

function keep(conversation, prompt, text) {
  conversation.push({ role: "user", content: prompt }, { role: "assistant", content: text });
}

/** Change the page, and stay at its end if the reader is there. */
function following(change) {
  const page = document.documentElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END_PX;
  change();
  if (isAtEnd) page.scrollTop = page.scrollHeight;
}

function turn(stopping) {
  running = stopping;
  at("send").hidden = stopping !== null;
  at("stop").hidden = stopping === null;
  if (stopping === null && document.activeElement === document.body) at("prompt").focus();
}

function clear() {
  running?.abort();
  messages = [];
  at("messages").replaceChildren();
  at("welcome").hidden = false;
  at("prompt").focus();
}

at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);
at("key").addEventListener("change", () => { keepApiKey(at("key").value.trim()); listModels(); });
if (apiKey()) {
  at("key-fields").hidden = false;
  at("key").value = apiKey();
}
at("settings").open = window.matchMedia("(min-width: 761px)").matches;
listModels();
