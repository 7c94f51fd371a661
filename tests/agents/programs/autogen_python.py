"""autogen (autogen-agentchat, autogen-ext[openai]): a client, an assistant with a tool, a typed answer."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
called: list[tuple[int, int]] = []


class City(BaseModel):
    name: str
    country: str


async def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    called.append((a, b))
    return f"{a} times {b} is {a * b}. Tell the user."


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        temperature=0,
        max_tokens=100,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": "unknown",
            "structured_output": True,
        },
    )
    question = [UserMessage(content="Paris: name and country.", source="user")]
    assert (await client.create(question, json_output=City)).content
    pieces = [
        event async for event in client.create_stream([UserMessage(content="Name one fruit.", source="user")])
    ]
    assert len(pieces) >= 2  # a chunk of text at least, and the result
    agent = AssistantAgent("calculator", client, tools=[multiply], reflect_on_tool_use=True)
    result = await agent.run(task="What is 12 times 34? Use the tool.")
    assert called, result
    await client.close()


asyncio.run(main())
print("did: schema, stream, tools")
