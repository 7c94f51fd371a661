"""LangChain, litellm and OpenHands: they see in our errors that a conversation must be made shorter."""

import os
import sys
from collections.abc import Callable
from typing import Any

import litellm
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
LONG = "word " * 20_000
did = ["langchain-openai (chat, responses)", "langchain-anthropic", "litellm"]


def error_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> Exception:
    try:
        result = call(*arguments, **options)
        list(result)  # a stream
    except Exception as error:
        return error
    raise AssertionError("no error")


for is_streamed in (False, True):
    for chat in (
        ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0),
        ChatOpenAI(
            base_url=f"{URL}/v1",
            api_key="none",
            model=MODEL,
            max_retries=0,
            use_responses_api=True,
            store=False,
        ),
        ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_retries=0, max_tokens=10),
    ):
        error = error_of(chat.stream if is_streamed else chat.invoke, LONG)
        assert isinstance(error, ContextOverflowError), (chat, error)


def is_known(error: Exception) -> bool:
    return isinstance(error, litellm.ContextWindowExceededError)


if sys.version_info >= (3, 12):
    from openhands.sdk.llm.exceptions.classifier import is_context_window_exceeded

    did.append("OpenHands")
    is_known = is_context_window_exceeded  # type: ignore[assignment]
for route, base in {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL}.items():
    error = error_of(
        litellm.completion,
        model=f"{route}/{MODEL}",
        api_base=base,
        api_key="none",
        num_retries=0,
        messages=[{"role": "user", "content": LONG}],
    )
    # OpenHands needs an older litellm, which does not know all errors, and reads the message itself.
    assert is_known(error), (route, error)
print("did: a full context is known to", ", ".join(did))
