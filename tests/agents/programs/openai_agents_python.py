"""openai-agents: an agent with a tool and a handoff-free loop, over the chat API and the newer one; a typed answer."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
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


asyncio.run(main())
print("did: tools, streams, typed answers; chat, responses")
