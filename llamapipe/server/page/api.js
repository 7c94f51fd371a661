// Requests to the server: its answers as events, its errors as exceptions.

const UNREACHABLE = "The server cannot be reached.";
const LOST = "The connection to the server was lost; the answer is incomplete.";

const DATA = /^(?:event: .*\n)?data: (.*)$/;
const LAST = ["response.completed", "response.incomplete", "response.failed"];  // of the API that sends no [DONE]

export function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// fetch and readers report a lost connection as a TypeError, with a text that depends on the browser.
function explained(error, text) {
  return error instanceof TypeError ? new Error(text) : error;
}

export async function getJson(path, key) {
  const answer = await fetch(path, { headers: headers(key) }).catch((error) => { throw explained(error, UNREACHABLE); });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

export async function postJson(path, body, key) {
  const answer = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body) })
    .catch((error) => { throw explained(error, UNREACHABLE); });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

// Yields the decoded events of a stream. Aborting the signal ends the request on the server.
export async function* events(path, body, key, signal) {
  const answer = await fetch(path, {
    method: "POST", headers: headers(key), body: JSON.stringify({ ...body, stream: true }), signal,
  }).catch((error) => { throw explained(error, UNREACHABLE); });
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => { throw explained(error, LOST); });
    if (done) throw new Error(LOST);  // the last event did not come
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.match(DATA)?.[1];
      if (data === undefined) continue;  // a comment: the server is still there
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
      if (LAST.includes(event.type)) return;
    }
  }
}

async function failure(answer) {
  let text = `${answer.status} ${answer.statusText}`;
  try {
    text = (await answer.json()).error.message;
  } catch { /* the body is not JSON: the status says enough */ }
  return new Error(text);
}
