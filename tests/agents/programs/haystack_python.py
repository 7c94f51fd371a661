"""haystack-ai: a chat generator, a streaming callback, an agent with a tool, a schema, embeddings."""

import os

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
KEY = Secret.from_token("none")


class City(BaseModel):
    name: str
    country: str


def generator(**settings: object) -> OpenAIChatGenerator:
    settings = {"temperature": 0, "max_completion_tokens": 100, **settings}
    return OpenAIChatGenerator(
        api_key=KEY,
        model=MODEL,
        api_base_url=f"{URL}/v1",
        generation_kwargs=settings,
        timeout=300,
        max_retries=0,
    )


def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return f"{a} times {b} is {a * b}. Tell the user."


assert generator(max_completion_tokens=12).run([ChatMessage.from_user("Name one colour.")])["replies"][0].text
pieces: list[str] = []
generator(max_completion_tokens=12).run(
    [ChatMessage.from_user("Name one fruit.")], streaming_callback=lambda chunk: pieces.append(chunk.content)
)
assert len(pieces) > 2, pieces
said = (
    generator(response_format=City)
    .run([ChatMessage.from_user("Paris: name and country.")])["replies"][0]
    .text
)
assert "France" in City.model_validate_json(said).country, said
agent = Agent(chat_generator=generator(), tools=[create_tool_from_function(multiply)])
messages = agent.run([ChatMessage.from_user("What is 12 times 34? Use the tool.")])["messages"]
assert any(message.tool_call_results for message in messages), messages
embedder = OpenAITextEmbedder(api_key=KEY, model="embedder", api_base_url=f"{URL}/v1")
assert len(embedder.run("red")["embedding"]) > 10
print("did: chat, stream, schema, tools, embeddings")
