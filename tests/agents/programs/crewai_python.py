"""crewai: a crew of one agent with a tool, and a call of its model."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
called: list[tuple[int, int]] = []


@tool("multiply")
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    called.append((a, b))
    return f"{a} times {b} is {a * b}. Tell the user."


llm = LLM(model=f"openai/{MODEL}", base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=150)
assert llm.call("Name one colour.")
agent = Agent(
    role="calculator",
    goal="Multiply numbers with the tool multiply",
    backstory="You never calculate yourself.",
    tools=[multiply],
    llm=llm,
    max_iter=3,
)
task = Task(description="What is 12 times 34?", expected_output="the number", agent=agent)
result = Crew(agents=[agent], tasks=[task]).kickoff()
assert called, result.raw
print("did: chat, an agent with a tool")
