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

vectors = client.embeddings.create(model="embedder", input=["red", "blue"]).data
assert len(vectors) == 2
print("did: chat, stream, tools, schema, responses, embeddings")
