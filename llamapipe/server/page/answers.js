// Answers of both APIs as parts {content, reasoning, progress, n_tokens, reason, item}: that of chats, and that of
// responses, in which tools of MCP servers run.

import { events } from "./api.js";

// An entry of the conversation is {role, content, images}; of an answer with tools also `items`, what the server sent,
// and `approvals`, what the reader said to the calls that it asked for.
export async function* plain(options, entries, key, signal) {
  const messages = entries.map(({ role, content, images }) => ({
    role, content: images?.length ? parts(content, images, (url) => ({ type: "image_url", image_url: { url } }), "text") : content,
  }));
  const body = { ...options, stream_options: { include_usage: true }, truncation: "auto", return_progress: true, messages };
  for await (const event of events("v1/chat/completions", body, key, signal)) {
    yield { progress: event.prompt_progress, n_tokens: event.usage?.completion_tokens };
    for (const { delta, finish_reason } of event.choices) {
      yield { content: delta.content, reasoning: delta.reasoning_content, reason: finish_reason };
    }
  }
}

export async function* withTools(tools, { max_tokens, ...options }, entries, key, signal) {
  const body = {
    ...options, ...(max_tokens === undefined ? {} : { max_output_tokens: max_tokens }),
    input: entries.flatMap(inputs), tools, truncation: "auto", store: false,
  };
  let n_texts = 0;
  for await (const event of events("v1/responses", body, key, signal)) {
    const { type, delta, item, response } = event;
    if (type === "response.output_text.delta") yield { content: delta };
    else if (type === "response.reasoning_text.delta") yield { reasoning: delta };
    else if (type === "response.output_item.added" && item.type === "message" && n_texts++) yield { content: "\n\n" };
    else if (type === "response.output_item.added" || type === "response.output_item.done") {
      yield { item, isDone: type.endsWith("done") };
    } else if (response && response.status !== "in_progress") {
      yield { n_tokens: response.usage?.output_tokens, reason: response.status === "incomplete" ? "length" : "stop" };
      if (response.error) throw new Error(response.error.message);
    }
  }
}

function parts(text, images, picture, kind) {
  const shown = images.map(picture);
  return text ? [...shown, { type: kind, text }] : shown;
}

// What the conversation is in the API of responses. What was written when an answer was cut is no item.
function inputs({ role, content, images, items, rest, approvals }) {
  if (items) {
    return [
      ...items, ...(rest ? [{ role, content: rest }] : []),
      ...(approvals ?? []).map(({ id, approve }) => ({ type: "mcp_approval_response", approval_request_id: id, approve })),
    ];
  }
  const picture = (url) => ({ type: "input_image", image_url: url });
  return [{ role, content: images?.length ? parts(content, images, picture, "input_text") : content }];
}
