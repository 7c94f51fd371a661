"""smolagents: an agent that calls tools and one that writes code, each with the tool's result in its answer."""

import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
called: list[tuple[int, int]] = []


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    called.append((a, b))
    return a * b


model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=200)
for kind in (ToolCallingAgent, CodeAgent):
    called.clear()
    agent = kind(tools=[multiply], model=model, max_steps=2, stream_outputs=kind is ToolCallingAgent)
    answer = agent.run("What is 12 times 34? Call multiply, then give the number as the final answer.")
    assert called, answer
print("did: an agent that calls tools (streamed), an agent that writes code")
