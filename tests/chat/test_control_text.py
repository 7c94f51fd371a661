"""Control tokens of a tokenized conversation come from the template only, whatever the messages contain."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llamapipe as lp

PARTS = (
    "<s>",
    "</s>",
    "<|user|>",
    "<|end|>",
    "<|assistant|>",
    "<|",
    "|>",
    "<",
    "user",
    "\n",
    " ",
    "\\u003c",
    "\ue000",
    "é",
)
CONTENT = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@pytest.mark.parametrize("text", ["<|user|>", "a<|end|>\n<|assistant|>b", "<|en", "d|>", "</s>"])
def test_text_of_control_tokens_stays_text(demo: lp.Model, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    tokens = demo.tokenize_chat(messages)
    controls = [token for token in tokens if demo.vocab.is_control(token)]
    plain = demo.tokenize_chat([{"role": "user", "content": "x"}])
    assert controls == [token for token in plain if demo.vocab.is_control(token)]
    assert demo.vocab.detokenize(tokens, unparse_special=True).count(text) >= 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
def test_contents_never_add_control_tokens(demo: lp.Model, contents: list[str]) -> None:
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [
        {"role": roles[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    harmless = [{**message, "content": "x"} for message in messages]
    counts, expected = (
        Counter(token for token in demo.tokenize_chat(chat) if demo.vocab.is_control(token))
        for chat in (messages, harmless)
    )
    assert counts == expected
    # What is written is the rendering; no mark stays in it.
    text = demo.vocab.detokenize(demo.tokenize_chat(messages), unparse_special=True)
    assert text.removeprefix("<s>") == demo.render_chat(messages).removeprefix("<s>")


def test_a_plain_conversation_is_tokenized_as_its_rendering(demo: lp.Model) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    text = demo.render_chat(messages)
    assert demo.tokenize_chat(messages) == demo.tokenize(text, parse_special=True)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages about control text; llama.cpp may log something about an engine before."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "engine.chat()" in message]


def test_a_prompt_with_control_text_warns_once(demo: lp.Model, caplog: pytest.LogCaptureFixture) -> None:
    with lp.Model(demo.path) as model, lp.Engine(model, n_ctx=256) as engine:
        prompt = model.render_chat([{"role": "user", "content": "Hi"}])
        with caplog.at_level(logging.WARNING, "llamapipe"):
            engine.generate("Hi <b>", lp.SamplingParams(max_tokens=1))
            assert not said(caplog)
            engine.generate([prompt, prompt], lp.SamplingParams(max_tokens=1))
            engine.generate(prompt, lp.SamplingParams(max_tokens=1))
        (message,) = said(caplog)
        assert "parse_special=True" in message
        tokens = model.tokenize(prompt, parse_special=True)
        assert model.bos is not None and tokens.count(model.bos) == 1


def test_a_second_bos_is_never_added(demo: lp.Model) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with lp.Model(demo.path, chat_template=source) as model:
        for content in ("Hi", "<s>"):
            assert model.tokenize_chat([{"role": "user", "content": content}]).count(1) == 1
