// openai (npm) with MCP servers of npm that run where the model is served: whole answers, a stream, approvals.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { AGENT_URL, AGENT_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${AGENT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const tools = (approval) => ["everything", "memory", "files"].map((label) => (
  { type: "mcp", server_label: label, require_approval: approval }
));
const options = { model, input: "Use them.", temperature: 0 };
const callsOf = (answer) => answer.output.filter((item) => item.type === "mcp_call");
const check = (answer) => {
  const [sum, graph, folder] = callsOf(answer);
  assert.match(sum.output, /\b5\b/);
  assert.match(graph.output, /entities/);
  assert.match(folder.output, /Allowed directories/);
  assert.match(answer.output_text, /DONE\.$/);
};

const answer = await client.responses.create({ ...options, tools: tools("never") });
check(answer);
assert.equal(answer.output.filter((item) => item.type === "mcp_list_tools").length, 3);

const kinds = [];
const stream = client.responses.stream({ ...options, tools: tools("never") });
for await (const event of stream) kinds.push(event.type);
check(await stream.finalResponse());
for (const kind of ["in_progress", "completed"]) {
  assert.equal(kinds.filter((one) => one === `response.mcp_call.${kind}`).length, 3);
  assert.equal(kinds.filter((one) => one === `response.mcp_list_tools.${kind}`).length, 3);
}

let last = await client.responses.create({ ...options, tools: tools("always") });
let approvals = 0;
for (;;) {
  const request = last.output.find((item) => item.type === "mcp_approval_request");
  if (!request) break;
  approvals += 1;
  const input = [{ type: "mcp_approval_response", approval_request_id: request.id, approve: true }];
  last = await client.responses.create({
    ...options, input, tools: tools("always"), previous_response_id: last.id,
  });
}
assert.equal(approvals, 3);
assert.match(last.output_text, /DONE\.$/);
console.log(`did: three servers, ${kinds.length} events, ${approvals} approvals with previous_response_id`);
