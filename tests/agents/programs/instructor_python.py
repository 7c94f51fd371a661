"""instructor: an object through a tool call and through a schema, and a stream of partial objects."""

import os

import instructor
from pydantic import BaseModel

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]


class City(BaseModel):
    name: str
    country: str


question = [{"role": "user", "content": "Paris is in France. Extract the city."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_provider(f"openai/{MODEL}", base_url=f"{URL}/v1", api_key="none", mode=mode)
    city = client.chat.completions.create(
        messages=question, response_model=City, max_retries=1, temperature=0, max_tokens=60
    )
    assert (city.name, city.country) == ("Paris", "France"), city
partials = list(
    client.chat.completions.create_partial(
        messages=question, response_model=City, max_retries=1, temperature=0, max_tokens=60
    )
)
assert partials[-1].country == "France"
assert len(partials) > 1
print("did: tools, schema, stream of partial objects")
