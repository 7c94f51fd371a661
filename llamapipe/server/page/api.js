// Requests to the server: its answers as events, its errors as exceptions.

export function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

export async function getJson(path, key) {
  const answer = await fetch(path, { headers: headers(key) });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

// Yields the decoded events of a stream. Aborting the signal ends the request on the server.
export async function* events(path, body, key, signal) {
  const answer = await fetch(path, {
    method: "POST", headers: headers(key), body: JSON.stringify({ ...body, stream: true }), signal,
  });
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
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
