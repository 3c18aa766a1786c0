// Vercel's AI SDK with both of its providers: text, streams, tools, objects by Zod schemas, embeddings.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, embed, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const compatible = createOpenAICompatible({
  name: "kvferry",
  baseURL: `${url}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const weather = tool({
  description: "Returns the weather.",
  inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }),
  execute: async ({ city }) => ({ city, sunny: true }),
});
const shape = z.object({
  city: z.string().max(12),
  people: z.number().int().min(1),
  kind: z.union([z.object({ type: z.literal("town") }), z.object({ type: z.literal("village"), farms: z.number() })]),
});

for (const model of [compatible(name), openai.chat(name), openai.responses(name)]) {
  const text = await generateText({ model, prompt: "Name a city.", maxOutputTokens: 8, maxRetries: 0 });
  assert.ok(text.usage.outputTokens > 0);
  const streamed = streamText({ model, prompt: "Name a city.", maxOutputTokens: 8, maxRetries: 0 });
  let parts = "";
  for await (const part of streamed.textStream) parts += part;
  assert.ok(parts.length > 0);
  assert.ok((await streamed.usage).outputTokens > 0);
  const called = await generateText({
    model,
    prompt: "Is it sunny in Paris?",
    tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" },
    maxOutputTokens: 60,
    maxRetries: 0,
    stopWhen: stepCountIs(1),
  });
  assert.equal(called.toolCalls[0].toolName, "weather");
  assert.ok(called.toolResults[0].output.sunny);
  const made = await generateText({
    model,
    output: Output.object({ schema: shape }),
    prompt: "Name a city.",
    maxOutputTokens: 120,
    maxRetries: 0,
  });
  assert.ok(shape.parse(made.output));
}
const vector = await embed({ model: compatible.textEmbeddingModel(name), value: "a city" });
assert.ok(vector.embedding.length > 0);
