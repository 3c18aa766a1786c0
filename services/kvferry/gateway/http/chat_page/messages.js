// Messages on the page. Text of the model only ever becomes text nodes.

import { html } from "./elements.js";
import { times } from "./timing.js";

/** Create the element of a prompt. */
export function promptElement(text) {
  return html("article", { class: "message user panel" }, html("h2", {}, "You"), paragraph(text));
}

function paragraph(text = "") {
  return html("p", { class: "text", dir: "auto" }, text);
}

/** An answer on the page; it grows with the chunks of its stream. */
export class AnswerElement {
  #began = performance.now();
  #first = null;
  #text = null;
  #reasoning = null;
  #calls = new Map();
  #usage = null;
  #timing = null;
  #finish = "";

  constructor(model) {
    this.element = html("article", { class: "message panel", "aria-busy": "true" }, html("h2", {}, model));
    this.waiting = html("p", { class: "empty" }, "…");
    this.element.append(this.waiting);
  }

  /** Add a chunk of the stream. */
  add(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    this.#timing = chunk.kvferry ?? this.#timing;
    const choice = chunk.choices?.[0];
    if (choice === undefined) return;
    this.#finish = choice.finish_reason ?? this.#finish;
    const { content, reasoning, reasoning_content: older, tool_calls: calls } = choice.delta ?? {};
    const thought = reasoning ?? older;
    if (thought) this.#added(() => this.#appendReasoning(String(thought)));
    if (content) this.#added(() => this.#appendText(String(content)));
    for (const call of calls ?? []) this.#added(() => this.#appendCall(call));
  }

  /** The answer for the messages of the next request: its text, and calls as text, since the page runs none. */
  get content() {
    const calls = [...this.#calls.values()].map((call) => call.textContent);
    return [this.#text?.textContent ?? "", ...calls].filter((part) => part).join("\n");
  }

  /** Show how the answer ended: `note` for a stopped answer, `error` for a failed one. */
  end({ note = "", error = "" } = {}) {
    this.waiting.remove();
    const said = note || (this.#finish === "length" ? "Cut off at its maximum number of tokens, or at the end of the context." : "");
    if (said) this.element.append(html("p", { class: "note" }, said));
    if (error) this.element.append(html("p", { class: "error", role: "alert" }, error));
    if (this.#first !== null) this.element.append(times(this.#measured(), this.#usage, this.#timing));
    this.element.setAttribute("aria-busy", "false");
  }

  #measured() {
    const since = (at) => (at - this.#began) / 1000;
    return { ttft: since(this.#first), total: since(performance.now()) };
  }

  #added(append) {
    this.#first ??= performance.now();
    this.waiting.remove();
    append();
  }

  #appendReasoning(text) {
    if (this.#reasoning === null) {
      this.#reasoning = paragraph();
      this.element.append(html("details", { class: "reasoning" }, html("summary", {}, "Reasoning"), this.#reasoning));
    }
    extend(this.#reasoning, text);
  }

  #appendText(text) {
    if (this.#text === null) {
      this.#text = paragraph();
      this.element.append(this.#text);
    }
    extend(this.#text, text);
  }

  #appendCall(call) {
    let code = this.#calls.get(call.index);
    if (code === undefined) {
      code = html("code");
      this.#calls.set(call.index, code);
      this.element.append(html("pre", { "aria-label": "Tool call" }, code));
    }
    extend(code, `${call.function?.name ? `${call.function.name} ` : ""}${call.function?.arguments ?? ""}`);
  }
}

function extend(element, text) {
  const last = element.lastChild;
  if (last === null) element.append(text);
  else last.appendData(text);
}
