"""pydantic-ai: an agent with a tool, a typed answer, a stream; OpenAI's chat and newer API, Anthropic's."""

import asyncio
import os
from contextlib import suppress

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "anthropic": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}
called: list[tuple[int, int]] = []
SETTINGS = {"max_tokens": 120, "temperature": 0.0}


class City(BaseModel):
    name: str
    country: str


async def main() -> None:
    for name, model in MODELS.items():
        called.clear()
        agent = Agent(model, model_settings=SETTINGS, instructions="Use the tool to multiply.")

        @agent.tool_plain
        def multiply(a: int, b: int) -> str:
            """Multiply two integers."""
            called.append((a, b))
            return f"{a} times {b} is {a * b}. Tell the user."

        with suppress(AgentRunError):  # a small model may call the tool again and again, or then say nothing
            await agent.run("What is 12 times 34?", usage_limits=UsageLimits(request_limit=3))
        assert called, name

        typed = Agent(model, model_settings=SETTINGS, output_type=City)  # through a forced tool call
        assert "France" in (await typed.run("Paris: name and country.")).output.country, name

        async with Agent(model, model_settings=SETTINGS).run_stream("Name one fruit.") as stream:
            assert [piece async for piece in stream.stream_text(delta=True)], name
    native = Agent(MODELS["chat"], model_settings=SETTINGS, output_type=NativeOutput(City))
    assert "Ital" in (await native.run("Rome: name and country.")).output.country


asyncio.run(main())
print("did: tools, typed answers, streams; chat, responses, anthropic; schema")
