"""openai-agents: an agent with a tool, over the chat API and the newer one; a typed answer; sessions on the server."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
called: list[tuple[int, int]] = []


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    called.append((a, b))
    return f"{a} times {b} is {a * b}. Tell the user."


class City(BaseModel):
    name: str
    country: str


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        called.clear()
        agent = Agent(
            name="calculator",
            instructions="Use the tool to multiply.",
            model=model,
            tools=[multiply],
            model_settings=ModelSettings(temperature=0, max_tokens=120),
        )
        result = await Runner.run(agent, "What is 12 times 34?", max_turns=8)
        assert called, result.final_output
        called.clear()
        streamed = Runner.run_streamed(agent, "What is 12 times 34?", max_turns=8)
        events = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in events
        assert called
        typed = Agent(
            name="cities",
            model=model,
            output_type=City,
            model_settings=ModelSettings(temperature=0, max_tokens=80),
        )
        assert "France" in (await Runner.run(typed, "Paris: name and country.")).final_output.country
        await keeps(agent)
    await continues(agent)


async def keeps(agent: Agent) -> None:
    """A session whose items the server stores."""
    session = OpenAIConversationsSession(openai_client=client)
    first = await Runner.run(agent, "What is 12 times 34?", session=session, max_turns=8)
    n_first = len(await session.get_items())
    assert n_first == len(first.to_input_list())
    await Runner.run(agent, "Thank you.", session=session, max_turns=8)
    items = await session.get_items()
    kinds = [item.get("type") for item in items]
    assert {"function_call", "function_call_output"} <= set(kinds), kinds
    assert [item["content"][0]["text"] for item in items if item.get("role") == "user"] == [
        "What is 12 times 34?",
        "Thank you.",
    ]
    assert await session.get_items(limit=2) == items[-2:]
    assert await session.pop_item() == items[-1]
    assert await session.get_items() == items[:-1]
    await session.clear_session()
    assert await session.get_items() == []


async def continues(agent: Agent) -> None:
    """Runs that send only what is new: after an answer, and in a conversation."""
    first = await Runner.run(agent, "What is 12 times 34?", max_turns=8)
    assert first.last_response_id is not None
    second = await Runner.run(agent, "Thank you.", previous_response_id=first.last_response_id, max_turns=8)
    seen = [
        item async for item in client.responses.input_items.list(second.last_response_id or "", order="asc")
    ]
    assert "function_call" in [item.type for item in seen]
    conversation = await client.conversations.create()
    for text in ("What is 12 times 34?", "Thank you."):
        await Runner.run(agent, text, conversation_id=conversation.id, max_turns=8)
    kinds = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert kinds[:3] == ["message", "function_call", "function_call_output"], kinds


asyncio.run(main())
print("did: tools, streams, typed answers; chat, responses; sessions, runs that continue by an id")
