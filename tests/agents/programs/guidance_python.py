"""guidance: a chat with a server of OpenAI's API, and an object by schema."""

import json
import os

import guidance
from guidance import assistant, gen, user
from guidance.models import OpenAI

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
model = OpenAI(MODEL, base_url=f"{URL}/v1", api_key="none", echo=False)
with user():
    lm = model + "Name one colour."
with assistant():
    lm += gen("colour", max_tokens=12)
assert lm["colour"]
schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
    "required": ["name", "country"],
    "additionalProperties": False,
}
with user():
    lm = model + "Paris: name and country."
with assistant():
    lm += guidance.json("city", schema=schema, max_tokens=60)
assert "France" in json.loads(lm["city"])["country"]
print("did: chat (streamed), schema")
