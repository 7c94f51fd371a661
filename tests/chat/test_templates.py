"""Every template of the pinned llama.cpp: what it writes as calls is allowed by its grammar, and read by its parser."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_families import FULL, PARIS, TOOLS
from support.chat_templates import ByteVocabulary, names, parse_answer, renderer

from llamapipe.chat._call_format import common_start
from llamapipe.chat.chat_format import ChatFormat

# These write no calls, or write them in a way that is not understood: Python's syntax, types inside of tags, ids only.
WITHOUT_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "HuggingFaceTB-SmolLM3-3B",
    "IFM-K2-Horizon",
    "Kimi-K3",
    "LFM2-8B-A1B",
    "LFM2.5-8B-A1B",
    "LFM2.5-Instruct",
    "MiniMax-M3",
    "deepseek-ai-DeepSeek-V3.2",
    "deepseek-ai-DeepSeek-V4",
    "deepseek-ai-DeepSeek-V4-Flash-0731",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "google-gemma-4-31B-it-interleaved",
    "google-translategemma-4b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "meetkai-functionary-medium-v3.2",
    "microsoft-Phi-3.5-mini-instruct",
    "muse-glimmer",
    "upstage-Solar-Open-100B",
}
EOG = ("<|eom_id|>", "<|END_OF_TURN_TOKEN|>", "<｜hy_eos:opensource｜>")


@pytest.mark.parametrize("name", names())
def test_calls_as_the_template_writes_them(name: str) -> None:
    vocabulary = ByteVocabulary(EOG)
    form = ChatFormat.of(renderer(name), vocabulary.special_id, lambda token: token >= 256)
    assert form.supports_tools == (name not in WITHOUT_TOOLS)
    if form.calls is None:
        return
    tail = f"{form.reasoning.start}{form.reasoning.end}" if form.reasoning else ""
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("abcdefgh1", "get_weather", FULL),
        ("abcdefgh2", "now", {}),
    ]
    for n in (1, 2) if form.calls.parallel else (1,):
        text = form.calls.written(calls[:n])
        for choice in ("auto", "required"):
            grammar = form.grammar(TOOLS, choice, True, prompt_tail=tail)
            assert grammar is not None and vocabulary.accepted(grammar, text) == (text, True)
        answer = parse_answer(form.parser(TOOLS, "auto", prompt_tail=tail), text)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [call[1:] for call in calls[:n]]
        assert (answer.content, answer.reasoning) == ("", "")


@pytest.mark.parametrize("name", names())
def test_a_history_of_calls_is_read_back(name: str) -> None:
    """What the template itself renders of an answer with calls."""
    render = renderer(name)
    vocabulary = ByteVocabulary(EOG)
    form = ChatFormat.of(render, vocabulary.special_id, lambda token: token >= 256)
    if not form.supports_tools:
        return
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    tools = [tool.as_openai() for tool in TOOLS]
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    text = ""
    for content in ("", None):  # one template wants None
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        text = (
            text if "Paris" in text else render([*messages, answer], tools=tools, add_generation_prompt=False)
        )
    prompt = render(messages, tools=tools, add_generation_prompt=True)
    text = text[len(common_start(text, prompt)) :]
    calls = parse_answer(form.parser(TOOLS, "auto", prompt_tail=""), text).tool_calls
    assert [(one.name, one.arguments) for one in calls] == [("get_weather", PARIS)]
