"""inspect-ai: an evaluation with a tool, over the chat API, the newer one and Anthropic's."""

import os

from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
called: list[tuple[int, int]] = []


@tool
def multiply():  # type: ignore[no-untyped-def]
    async def execute(a: int, b: int) -> str:
        """Multiply two integers.

        Args:
            a: The first integer.
            b: The second integer.
        """
        called.append((a, b))
        return f"{a} times {b} is {a * b}. Tell the user."

    return execute


task = Task(
    dataset=[Sample(input="What is 12 times 34? Use the tool.", target="408")],
    solver=[use_tools(multiply()), generate()],
    scorer=includes(),
)
models = {
    "chat": get_model(f"openai/{MODEL}", base_url=f"{URL}/v1", api_key="none", responses_api=False),
    "responses": get_model(f"openai/{MODEL}", base_url=f"{URL}/v1", api_key="none", responses_api=True),
    "anthropic": get_model(f"anthropic/{MODEL}", base_url=URL, api_key="none"),
}
for name, model in models.items():
    called.clear()
    (log,) = eval(
        task,
        model=model,
        display="none",
        log_dir=os.environ["HOME"],
        max_retries=0,
        max_tokens=120,
        temperature=0.0,
    )
    assert log.status == "success", (name, log.error)
    assert called, (name, log.samples)
print("did: an evaluation with a tool; chat, responses, anthropic")
