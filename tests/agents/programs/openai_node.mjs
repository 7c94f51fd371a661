// openai (npm): chat, a stream, a runner of tools, an object by schema, the newer API, embeddings.
import assert from "node:assert/strict";
import OpenAI from "openai";

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

const vectors = await client.embeddings.create({ model: "embedder", input: ["red", "blue"] });
assert.equal(vectors.data.length, 2);
console.log("did: chat, stream, a streamed runner of tools, schema, responses, stored ones, conversations, embeddings");
