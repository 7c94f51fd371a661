"""Chat templates for the harness: names and settings of transformers, in a sandbox."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llamapipe as lp

pytest.importorskip(
    "lm_eval",
    reason='needs lm-evaluation-harness: nox -s lm_eval, or pip install "llamapipe[lm-eval]"',
)

from llamapipe.lm_eval.chat import ChatTemplate, ModelChat

pytestmark = pytest.mark.lm_eval

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The answer is "}


def shown(text: str, *messages: dict[str, str], prompt: bool = True, **variables: Any) -> str:
    return ChatTemplate(text, variables).render(messages or [USER], prompt)


def model(template: str | None, **others: str) -> Any:
    """Of a model only what a chat needs."""
    metadata = {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    return SimpleNamespace(
        chat_template=template, metadata=metadata, bos=1, eos=None, path=Path("some.gguf"),
        vocab=SimpleNamespace(detokenize=lambda ids, unparse_special: f"<{ids[0]}>"),
    )  # fmt: skip


def test_the_shipped_model(demo: lp.Model) -> None:
    chat = ModelChat(demo)
    assert chat.render([USER], True) == "<s><|user|>\nHi<|end|>\n<|assistant|>\n"
    assert chat.render([SYSTEM, USER], True).startswith("<s><|system|>\nBe brief.<|end|>\n<|user|>\nHi")
    assert chat.render([USER, ANSWER], False) == "<s><|user|>\nHi<|end|>\n<|assistant|>\nThe answer is "
    assert chat.text == demo.chat_template


def test_names_of_transformers() -> None:
    assert shown("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>Hi"
    assert shown("{{ tools is none and documents is none and add_generation_prompt }}") == "True"
    assert shown("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().astimezone().year)
    assert shown("{{ messages | tojson }}", {"role": "user", "content": "<é>'"}) == (
        '[{"role": "user", "content": "<é>\'"}]'
    )
    assert shown("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert shown("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"
    assert shown("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"


def test_blocks_take_their_line_with_them() -> None:
    assert shown("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_a_message_is_continued_where_it_ends() -> None:
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}end"
    assert shown(template, USER, {"role": "assistant", "content": "Hi"}, prompt=False) == "[Hi][Hi"
    assert shown(template, USER, ANSWER, prompt=False) == "[Hi][The answer is "
    assert ANSWER["content"] == "The answer is "
    with pytest.raises(ValueError, match="does not show the last message, so it cannot be continued"):
        shown("{{ messages[0].content }}", USER, ANSWER, prompt=False)
    with pytest.raises(ValueError, match="no message to be continued"):
        ChatTemplate("", {}).render([], False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "refuses these messages: .* has no attribute 'missing'"),
        ("{{ messages.__class__.__base__ }}", "refuses these messages: access to attribute '__class__'"),
        (
            "{{ messages.append(1) }}",
            "refuses these messages: access to attribute 'append' of 'list' object is unsafe",
        ),
        ("{% if %}", "cannot be read: Expected an expression"),
    ],
)
def test_what_a_template_may_not_do(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shown(template)


def test_a_template_without_a_place_for_system_messages(caplog: pytest.LogCaptureFixture) -> None:
    text = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    chat = ModelChat(model(text + "{{ m.content }}{% endfor %}"))
    assert chat.render([SYSTEM, USER], True) == "Hi"
    assert "trying without the system message" in caplog.text
    with pytest.raises(ValueError, match="refuses these messages: never"):
        ModelChat(model("{{ raise_exception('never') }}")).render([USER], True)


def test_models_with_none_one_and_several() -> None:
    chat = ModelChat(
        model("{{ bos_token }}{{ eos_token }}one", tool_use="{{ enable_thinking }}"), enable_thinking=False
    )
    assert chat.render([USER], True) == "<1>one"
    assert chat.choose("tool_use") == "{{ enable_thinking }}"
    assert chat.render([USER], True) == "False"
    with pytest.raises(ValueError, match="has no chat template named 'other'"):
        chat.choose("other")
    with pytest.raises(
        ValueError, match=r"some\.gguf has no chat template; run without --apply_chat_template"
    ):
        ModelChat(model(None)).render([USER], True)
