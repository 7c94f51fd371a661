"""openai (Python): chat, a stream, a tool's round trip, an object by schema, the newer API, embeddings."""

import json
import os

import openai
from pydantic import BaseModel

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ask = [{"role": "user", "content": "What is 12 times 34? Use the tool."}]
tool = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class City(BaseModel):
    name: str
    country: str


answer = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": "Name one colour."}], max_tokens=12
)
assert answer.choices[0].message.content

with client.chat.completions.stream(
    model=MODEL,
    messages=[{"role": "user", "content": "Name one fruit."}],
    max_tokens=12,
    stream_options={"include_usage": True},
) as stream:
    assert stream.get_final_completion().usage.completion_tokens > 0

first = client.chat.completions.create(
    model=MODEL, messages=ask, tools=[tool], tool_choice="required", temperature=0, max_tokens=100
).choices[0]
assert first.finish_reason == "tool_calls", first
call = first.message.tool_calls[0]
numbers = json.loads(call.function.arguments)
assert sorted(numbers.values()) == [12, 34], numbers
result = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] * numbers["b"])}
last = client.chat.completions.create(
    model=MODEL, messages=[*ask, first.message, result], tools=[tool], temperature=0, max_tokens=40
).choices[0]
# What a small model says after a result is not checked: it may refuse, or call once more.
assert last.message.content or last.message.tool_calls, last

city = client.chat.completions.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "Paris: name and country."}],
    response_format=City,
    temperature=0,
    max_tokens=60,
)
assert "France" in city.choices[0].message.parsed.country

item = client.responses.parse(
    model=MODEL,
    input="Rome: name and country.",
    text_format=City,
    temperature=0,
    max_output_tokens=60,
    store=False,
)
assert "Ital" in item.output_parsed.country, item.output_text

later = {
    "model": MODEL,
    "input": "Name one animal.",
    "max_output_tokens": 16,
    "temperature": 0,
    "background": True,
}
waiting = client.responses.create(**later)
while waiting.status in ("queued", "in_progress"):
    waiting = client.responses.retrieve(waiting.id)
assert waiting.background and waiting.output_text, waiting
told = list(client.responses.create(**later, stream=True))
again = list(client.responses.retrieve(told[0].response.id, stream=True, starting_after=3))
assert again == told[4:], (again, told)
long = client.responses.create(**{**later, "max_output_tokens": 4000})
assert client.responses.cancel(long.id).status == "cancelled"

lines = [
    {
        "custom_id": word,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"A rhyme with {word}."}],
            "max_tokens": 8,
        },
    }
    for word in ("red", "blue", "green")
]
file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed"):
    batch = client.batches.retrieve(batch.id)
results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert [record["custom_id"] for record in results] == ["red", "blue", "green"], results
assert all(record["response"]["body"]["choices"][0]["message"]["content"] for record in results)
assert {file.id, batch.output_file_id} <= {listed.id for listed in client.files.list(limit=1)}
assert client.files.delete(file.id).deleted

vectors = client.embeddings.create(model="embedder", input=["red", "blue"]).data
assert len(vectors) == 2
print("did: chat, stream, tools, schema, responses, background, batches, embeddings")
