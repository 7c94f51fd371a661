"""openai-agents and openai with MCP servers of PyPI that run where the model is served, also with approvals."""

import asyncio
import json
import os

from agents import (
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, OpenAI

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
set_tracing_disabled(True)
asked = []


def approve(request):
    asked.append(request.data.name)
    return {"approve": True}


def agent(**tool):
    config = {"type": "mcp", "server_label": "time", **tool}
    ask = approve if tool["require_approval"] == "always" else None
    return Agent(
        name="clock",
        model=OpenAIResponsesModel(
            model=MODEL, openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        ),
        tools=[HostedMCPTool(tool_config=config, on_approval_request=ask)],
        model_settings=ModelSettings(temperature=0),
    )


async def main() -> None:
    result = await Runner.run(agent(require_approval="never"), "What time is it?")
    assert result.final_output.endswith("DONE."), result.final_output
    result = await Runner.run(agent(require_approval="always"), "What time is it?")
    assert result.final_output.endswith("DONE."), result.final_output
    assert asked == ["get_current_time", "convert_time", "get_current_time"], asked
    streamed = Runner.run_streamed(agent(require_approval="never"), "What time is it?")
    kinds = [
        event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"
    ]
    assert kinds.count("response.mcp_call.completed") == 3, kinds


asyncio.run(main())
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
tool = {"type": "mcp", "server_label": "time", "require_approval": "never"}
answer = client.responses.create(model=MODEL, input="What time is it?", tools=[tool], temperature=0)
calls = [item for item in answer.output if item.type == "mcp_call"]
assert [call.name for call in calls] == ["get_current_time", "convert_time", "get_current_time"]
assert json.loads(calls[0].output)["timezone"] == "Asia/Tokyo", calls[0]
assert json.loads(calls[1].output)["time_difference"] == "+9.0h", calls[1]
assert answer.output_text.endswith("DONE.")
print(f"did: {len(asked)} approvals, mcp-server-time with HostedMCPTool, streams, responses.create")
