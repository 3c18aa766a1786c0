// OpenAI's library for Node: chat, streams, tools by Zod schemas, structured outputs, Responses, retries.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Is it sunny in Paris?" }];
const Answer = z.object({ sunny: z.boolean(), note: z.string().max(8) });
const weather = zodFunction({ name: "get_weather", parameters: z.object({ city: z.enum(["Paris", "Oslo"]) }) });

assert.deepEqual((await client.models.list()).data.map((one) => one.id), [model]);
const chat = await client.chat.completions.create({ model, messages, max_completion_tokens: 8 });
assert.ok(chat.choices[0].message.content);
const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 8,
  stream: true,
  stream_options: { include_usage: true },
});
let usage = null;
for await (const chunk of stream) usage = chunk.usage ?? usage;
assert.ok(usage.completion_tokens > 0);
const called = await client.chat.completions.create({ model, messages, tools: [weather], tool_choice: "required" });
assert.equal(called.choices[0].message.tool_calls[0].function.name, "get_weather");
const parsed = await client.chat.completions.parse({
  model,
  messages,
  max_tokens: 80,
  response_format: zodResponseFormat(Answer, "answer"),
});
assert.equal(typeof parsed.choices[0].message.parsed.sunny, "boolean");

const first = await client.responses.create({ model, input: "Name a city.", max_output_tokens: 8 });
assert.ok(first.output_text);
const counted = await client.responses.inputTokens.count({ model, input: "Name a city." });
assert.equal(counted.input_tokens, first.usage.input_tokens);
const output = await client.responses.parse({
  model,
  input: "Sunny?",
  max_output_tokens: 80,
  text: { format: zodTextFormat(Answer, "answer") },
});
assert.equal(typeof output.output_parsed.sunny, "boolean");

await assert.rejects(
  client.chat.completions.create({ model, messages: [{ role: "user", content: "city ".repeat(20000) }] }),
  (error) => error.status === 400 && error.code === "context_length_exceeded",
);
