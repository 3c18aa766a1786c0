// Calls a server with OpenAI's Node package and prints what it received, as one JSON object.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const chat = {
  model,
  messages: [{ role: "user", content: "Name a city." }],
  temperature: 0,
  max_tokens: 24,
};
const found = {};

found.models = (await client.models.list()).data.length;

const whole = await client.chat.completions.create(chat);
found.chat = whole.choices[0].message.content;
found.usage = whole.usage.completion_tokens;

found.stream = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  found.stream += chunk.choices[0]?.delta?.content ?? "";
}

const format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
const object = await client.chat.completions.create({ ...chat, max_tokens: 64, response_format: format });
found.object = object.choices[0].message.content;

const tools = [
  { type: "function", function: { name: "get_weather", description: "Returns the weather.", parameters: schema } },
];
const calling = { ...chat, max_tokens: 128, parallel_tool_calls: false, tools };
const called = (await client.chat.completions.create({ ...calling, tool_choice: "required" })).choices[0].message;
found.call = called.tool_calls[0].function.name;
found.arguments = called.tool_calls[0].function.arguments;
const answer = { role: "tool", tool_call_id: called.tool_calls[0].id, content: "cold" };
const answered = await client.chat.completions.create({
  ...calling,
  messages: [...chat.messages, called, answer],
  tool_choice: "none",
  max_tokens: 16,
});
found.answered = answered.choices[0].message.content;

const prompt = "The capital of France is";
const completed = await client.completions.create({ model, prompt, temperature: 0, max_tokens: 8 });
found.completion = completed.choices[0].text;

const vector = await client.embeddings.create({ model, input: "a ferry" });
found.dimensions = vector.data[0].embedding.length;

const request = { model, input: "Name a city.", temperature: 0, max_output_tokens: 24 };
found.response = (await client.responses.create(request)).output_text;
found.response_stream = "";
for await (const event of await client.responses.create({ ...request, stream: true })) {
  if (event.type === "response.output_text.delta") found.response_stream += event.delta;
}

try {
  await client.chat.completions.create({ ...chat, model: "no-such-model" });
} catch (error) {
  found.refused = error.status;
  found.refused_param = error.param;
}
console.log(JSON.stringify(found));
