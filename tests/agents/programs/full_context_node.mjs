// pi, cline and opencode: their own functions see in our errors that a conversation must be made shorter.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { classifyProviderError, isRetryableProviderError } from "@cline/llms";
import { isContextOverflow } from "@earendil-works/pi-ai";

const { AGENT_URL, AGENT_MODEL: model } = process.env;
const long = [{ role: "user", content: "word ".repeat(20_000) }];
const bodies = {
  "/v1/chat/completions": { model, messages: long },
  "/v1/responses": { model, input: long },
  "/v1/completions": { model, prompt: long[0].content },
  "/v1/messages": { model, messages: long, max_tokens: 10 },
  "/api/chat": { model, messages: long, truncate: false },
};

// opencode is one executable, which holds its patterns as the text of a list.
const pattern = String.raw`/(?:\\.|[^/\\\n])+/i`;
const lists = readFileSync(new URL("node_modules/opencode-ai/bin/opencode.exe", import.meta.url), "latin1")
  .matchAll(new RegExp(String.raw`\[(${pattern}(?:,${pattern}){9,})\]`, "g"));
const list = [...lists].find(([text]) => text.includes("maximum context length is"));
assert(list, "opencode holds no list of patterns");
const opencode = [...list[1].matchAll(/\/((?:\\.|[^/\\\n])+)\/i/g)].map(([, source]) => new RegExp(source, "i"));

for (const [path, body] of Object.entries(bodies)) {
  const response = await fetch(AGENT_URL + path, { method: "POST", body: JSON.stringify(body) });
  assert.equal(response.status, 400, path);
  const answer = await response.json();
  const message = answer.error.message ?? answer.error;
  // OpenAI's packages show the status and the message, Anthropic's the status and the body.
  for (const text of [`400 ${message}`, `400 ${JSON.stringify(answer)}`]) {
    assert(isContextOverflow({ stopReason: "error", errorMessage: text }), `pi: ${text}`);
    assert(opencode.some((known) => known.test(text)), `opencode: ${text}`);
  }
  const error = { status: response.status, ...answer };
  assert.equal(classifyProviderError(error), "context_window_exceeded", `cline: ${message}`);
  assert(!isRetryableProviderError(error), `cline: ${message}`);
}
console.log(`did: a full context by ${Object.keys(bodies).length} routes is known to pi, opencode (${opencode.length} patterns), cline`);
