// AI SDK: texts, streams, tools in several steps and objects, by its four providers; store: false; embeddings.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { AGENT_URL, AGENT_MODEL: id } = process.env;
const openai = createOpenAI({ baseURL: `${AGENT_URL}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "local", baseURL: `${AGENT_URL}/v1`, apiKey: "none", supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${AGENT_URL}/v1`, apiKey: "none" });
const models = {
  responses: openai.responses(id), chat: openai.chat(id), compatible: compatible(id), anthropic: anthropic(id),
};
const providerOptions = { openai: { store: false } };
const common = { maxRetries: 0, temperature: 0, maxOutputTokens: 100, providerOptions };
const city = z.object({ name: z.string(), country: z.string() });

for (const [name, model] of Object.entries(models)) {
  const stream = streamText({ ...common, model, prompt: "Name one fruit.", onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert(text, name);

  const called = [];
  const multiply = tool({
    description: "Multiply two integers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => { called.push([a, b]); return `${a} times ${b} is ${a * b}. Tell the user.`; },
  });
  const steps = streamText({
    ...common, model, tools: { multiply }, stopWhen: stepCountIs(5), prompt: "What is 12 times 34? Use the tool.",
    onError: ({ error }) => { throw error; },
  });
  const said = await steps.text;
  assert(called.length > 0, `${name}: ${said}`);

  const { output } = await generateText({
    ...common, model, output: Output.object({ schema: city }), prompt: "Paris: name and country.",
  });
  assert.match(output.country, /France/, name);
}
const { embedding } = await embed({ model: openai.embedding("embedder"), value: "red", maxRetries: 0 });
assert(embedding.length > 10);
console.log("did: streams, tools in steps, schema by responses (store: false), chat, compatible, anthropic; embeddings");
