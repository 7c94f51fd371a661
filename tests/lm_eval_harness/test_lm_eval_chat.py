"""Chat templates for the harness: chosen by name, with a message to continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_models import with_templates

import llamapipe as lp

pytest.importorskip(
    "lm_eval",
    reason='needs lm-evaluation-harness: nox -s lm_eval, or pip install "llamapipe[lm-eval]"',
)

from llamapipe.lm_eval._model import ModelChat

pytestmark = pytest.mark.lm_eval

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The answer is "}


def test_the_shipped_model(demo: lp.Model) -> None:
    chat = ModelChat(demo)
    assert chat.render([USER], True) == "<s><|user|>\nHi<|end|>\n<|assistant|>\n"
    assert chat.render([SYSTEM, USER], True).startswith("<s><|system|>\nBe brief.<|end|>\n<|user|>\nHi")
    assert chat.render([USER, ANSWER], False) == "<s><|user|>\nHi<|end|>\n<|assistant|>\nThe answer is "
    assert chat.text == demo.chat_template


def test_a_template_without_a_place_for_system_messages(demo: lp.Model) -> None:
    text = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with lp.Model(demo.path, chat_template=text + "{{ m.content }}{% endfor %}") as model:
        assert ModelChat(model).render([SYSTEM, USER], True) == "Be brief.\nHi"
    source = "{{ raise_exception('never') }}"
    with (
        lp.Model(demo.path, chat_template=source) as model,
        pytest.raises(ValueError, match="refuses these messages: never"),
    ):
        ModelChat(model).render([USER], True)


def test_models_with_several_templates(tmp_path: Path) -> None:
    path = with_templates(tmp_path / "some.gguf", "{{ bos_token }}one", tool_use="{{ enable_thinking }}")
    with lp.Model(path) as model:
        chat = ModelChat(model, enable_thinking=False)
        assert chat.render([USER], True) == "<s>one"
        assert chat.choose("tool_use") == "{{ enable_thinking }}"
        assert chat.render([USER], True) == "False"
        with pytest.raises(ValueError, match=r"some\.gguf has no chat template named 'other'"):
            chat.choose("other")


def test_a_model_without_a_template(tiny: lp.Model) -> None:
    with pytest.raises(ValueError, match="has no chat template; run without --apply_chat_template"):
        ModelChat(tiny).render([USER], True)
