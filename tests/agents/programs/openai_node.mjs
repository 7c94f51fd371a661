// openai (npm): chat, a stream, a runner of tools, an object by schema, the newer API, embeddings.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const { AGENT_URL, AGENT_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${AGENT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];

const answer = await client.chat.completions.create({ model, messages: user("Name one colour."), max_tokens: 12 });
assert(answer.choices[0].message.content);

const stream = client.chat.completions.stream({
  model, messages: user("Name one fruit."), max_tokens: 12, stream_options: { include_usage: true },
});
assert((await stream.finalChatCompletion()).usage.completion_tokens > 0);

const called = [];
const multiply = ({ a, b }) => { called.push([a, b]); return `${a} times ${b} is ${a * b}. Tell the user.`; };
const parameters = {
  type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"],
};
const runner = client.chat.completions.runTools({
  model, temperature: 0, max_tokens: 100, stream: true,
  messages: user("What is 12 times 34? Use the tool."),
  tools: [{
    type: "function",
    function: { name: "multiply", description: "Multiply two integers.", parameters, parse: JSON.parse, function: multiply },
  }],
});
const said = await runner.finalContent();
assert(called.length > 0, said);

const schema = {
  type: "object", properties: { name: { type: "string" }, country: { type: "string" } },
  required: ["name", "country"], additionalProperties: false,
};
const format = { type: "json_schema", name: "city", schema, strict: true };
const item = await client.responses.create({
  model, input: "Rome: name and country.", text: { format }, temperature: 0, max_output_tokens: 60, store: false,
});
assert.match(JSON.parse(item.output_text).country, /Ital/);
const events = [];
for await (const event of client.responses.stream({ model, input: "Name one colour.", max_output_tokens: 16 })) {
  events.push(event.type);
}
assert(events.includes("response.output_text.delta"));

const first = await client.responses.create({ model, input: "Name one colour.", max_output_tokens: 16 });
const second = await client.responses.create({
  model, input: "Another one.", max_output_tokens: 16, previous_response_id: first.id,
});
assert.equal((await client.responses.retrieve(second.id)).output_text, second.output_text);
const seen = [];
for await (const one of client.responses.inputItems.list(second.id, { order: "asc", limit: 2 })) seen.push(one.role);
assert.deepEqual(seen, ["user", "assistant", "user"]);
await client.responses.delete(first.id);
await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);

const conversation = await client.conversations.create({ items: [{ role: "user", content: "Hello" }], metadata: { a: "b" } });
await client.responses.create({ model, input: "Name one fruit.", max_output_tokens: 16, conversation: conversation.id });
const kept = [];
for await (const one of client.conversations.items.list(conversation.id, { order: "asc" })) kept.push(one);
assert.deepEqual(kept.map((one) => one.role), ["user", "user", "assistant"]);
await client.conversations.items.delete(kept[0].id, { conversation_id: conversation.id });
assert.equal((await client.conversations.update(conversation.id, { metadata: { c: "d" } })).metadata.c, "d");
assert((await client.conversations.delete(conversation.id)).deleted);

const later = { model, input: "Name one animal.", max_output_tokens: 16, temperature: 0, background: true };
let waiting = await client.responses.create(later);
assert(waiting.background);
while (["queued", "in_progress"].includes(waiting.status)) waiting = await client.responses.retrieve(waiting.id);
assert(waiting.output_text);
const told = [];
for await (const event of await client.responses.create({ ...later, stream: true })) told.push(event);
const again = [];
const { id } = told[0].response;
for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: 3 })) again.push(event);
assert.deepEqual(again, told.slice(4));
const long = await client.responses.create({ ...later, max_output_tokens: 4000 });
assert.equal((await client.responses.cancel(long.id)).status, "cancelled");

const lines = ["red", "blue", "green"].map((word) => JSON.stringify({
  custom_id: word, method: "POST", url: "/v1/chat/completions",
  body: { model, messages: [{ role: "user", content: `A rhyme with ${word}.` }], max_tokens: 8 },
}));
const file = await client.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
while (!["completed", "failed"].includes(batch.status)) batch = await client.batches.retrieve(batch.id);
const results = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
assert.deepEqual(results.map((one) => one.custom_id), ["red", "blue", "green"]);
assert(results.every((one) => one.response.body.choices[0].message.content));
const files = [];
for await (const one of client.files.list({ limit: 1 })) files.push(one.id);
assert(files.includes(file.id) && files.includes(batch.output_file_id));
assert((await client.files.delete(file.id)).deleted);

const vectors = await client.embeddings.create({ model: "embedder", input: ["red", "blue"] });
assert.equal(vectors.data.length, 2);
console.log("did: chat, stream, a streamed runner of tools, schema, responses, stored ones, conversations, background, batches, embeddings");
