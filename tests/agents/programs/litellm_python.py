"""litellm: its calls of OpenAI's and Anthropic's API, a tool, a stream, a schema, embeddings."""

import json
import os

import litellm

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
litellm.telemetry = False
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
schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
    "required": ["name", "country"],
    "additionalProperties": False,
}
routes = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL}
for route, base in routes.items():
    common = {
        "model": f"{route}/{MODEL}",
        "api_base": base,
        "api_key": "none",
        "temperature": 0,
        "num_retries": 0,
    }
    ask = [{"role": "user", "content": "What is 12 times 34? Use the tool."}]
    stream = litellm.completion(
        messages=[{"role": "user", "content": "Name one fruit."}],
        stream=True,
        max_tokens=12,
        stream_options={"include_usage": True},
        **common,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices), route
    first = (
        litellm.completion(messages=ask, tools=[tool], tool_choice="required", max_tokens=100, **common)
        .choices[0]
        .message
    )
    call = first.tool_calls[0]
    numbers = json.loads(call.function.arguments)
    assert sorted(numbers.values()) == [12, 34], (route, numbers)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] * numbers["b"])}
    last = litellm.completion(messages=[*ask, first, result], tools=[tool], max_tokens=40, **common)
    answer = last.choices[0].message
    # What a small model says after a result is not checked: it may refuse, or call once more.
    assert answer.content or answer.tool_calls, (route, last)
    said = litellm.completion(
        messages=[{"role": "user", "content": "Paris: name and country."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
        max_tokens=60,
        **common,
    )
    assert "France" in json.loads(said.choices[0].message.content)["country"], (route, said)
item = litellm.responses(
    model=f"openai/{MODEL}",
    input="Name one colour.",
    api_base=routes["openai"],
    api_key="none",
    max_output_tokens=20,
)
assert item.output
vectors = litellm.embedding(
    model="openai/embedder", input=["red", "blue"], api_base=routes["openai"], api_key="none"
).data
assert len(vectors) == 2
print("did: stream, tools, schema by openai, hosted_vllm, anthropic; responses, embeddings")
