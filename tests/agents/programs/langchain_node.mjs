// @langchain/openai: a stream, a tool's round trip, an object by schema, the newer API, embeddings.
import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

const { AGENT_URL, AGENT_MODEL: model } = process.env;
const configuration = { baseURL: `${AGENT_URL}/v1` };
const multiply = tool(({ a, b }) => `${a} times ${b} is ${a * b}. Tell the user.`, {
  name: "multiply", description: "Multiply two integers.", schema: z.object({ a: z.number().int(), b: z.number().int() }),
});
for (const useResponsesApi of [false, true]) {
  const chat = new ChatOpenAI({
    model, apiKey: "none", configuration, temperature: 0, maxTokens: 100, maxRetries: 0, useResponsesApi,
  });
  let pieces = 0;
  for await (const piece of await chat.stream("Name one fruit.")) pieces += piece.text ? 1 : 0;
  assert(pieces > 0);

  const bound = chat.bindTools([multiply], { tool_choice: "required" });
  const question = new HumanMessage("What is 12 times 34? Use the tool.");
  const first = await bound.invoke([question]);
  const [call] = first.tool_calls;
  assert.equal(call.name, "multiply");
  const result = await multiply.invoke(call);
  assert(result instanceof ToolMessage);
  const last = await chat.bindTools([multiply]).invoke([question, first, result]);
  assert(last.text || last.tool_calls.length); // a small model may call the tool once more

  const city = z.object({ name: z.string(), country: z.string() });
  for (const method of ["jsonSchema", "functionCalling"]) {
    const found = await chat.withStructuredOutput(city, { name: "city", method }).invoke("Paris: name and country.");
    assert.match(found.country, /France/);
  }
}
const embeddings = new OpenAIEmbeddings({ model: "embedder", apiKey: "none", configuration, maxRetries: 0 });
assert((await embeddings.embedQuery("red")).length > 10);
console.log("did: streams, tools, schema by chat and responses; embeddings");
