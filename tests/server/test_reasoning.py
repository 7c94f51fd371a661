"""How much a model reasons: what a request says in each API, and what the operator has set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.chat_templates import template
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

HELLO: Any = [{"role": "user", "content": "Hello"}]
N = 1000  # words of a thought that has more tokens than a low effort, 1,024
THOUGHT = " ".join(f"w{i:05d}" for i in range(N))
ANSWER = "Yes, 40 km."
CHAT: Any = {"model": "m", "messages": HELLO, "temperature": 0}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    """A model that thinks long, with a template that can turn reasoning off and has no levels of it."""
    text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    path = scripted_model(
        tmp_path_factory.mktemp("m") / "m.gguf",
        text,
        ("<think>", "</think>"),
        template("Qwen-Qwen3-0.6B").text,
    )
    with lp.Engine(path, n_ctx=8192, n_seq_max=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(thinker: lp.Engine) -> Iterator[str]:
    with serve(thinker, settings=ServerSettings(model_names=("m",), ollama=True)) as server:
        yield server.url


def of_chat(url: str, **more: Any) -> tuple[str, str]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | more, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "x-llamapipe-unused" not in answer.headers
    message = answer.json()["choices"][0]["message"]
    return message.get("reasoning_content", "").strip(), message["content"].strip()


@pytest.mark.parametrize(
    "field",
    ["reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"],
)
def test_the_names_of_a_budget(url: str, field: str) -> None:
    reasoning, content = of_chat(url, **{field: 20})
    assert 0 < len(reasoning) < 200 and THOUGHT.startswith(reasoning)
    assert content == ANSWER
    assert of_chat(url, **{field: -1}) == (THOUGHT, ANSWER)


def test_efforts_are_budgets_where_the_template_has_no_levels(url: str) -> None:
    lengths = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for effort in ("none", "minimal", "low", "medium"):
            answer = client.chat.completions.create(**CHAT, reasoning_effort=effort)
            message = answer.choices[0].message
            lengths[effort] = len(getattr(message, "reasoning_content", "").strip())
            assert message.content.strip() == ANSWER
        response = client.responses.create(
            model="m", input="Hello", temperature=0, reasoning={"effort": "minimal"}
        )
        assert response.output_text.strip() == ANSWER
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens <= 256 + 3  # with the markers
    assert lengths["none"] == 0 < lengths["minimal"] < lengths["low"] < lengths["medium"] == len(THOUGHT)


def test_anthropics_budget_limits_thinking(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="m", messages=HELLO, max_tokens=4000, thinking={"type": "enabled", "budget_tokens": 30}
        )
        kinds = {block.type: block for block in answer.content}
        assert kinds["text"].text.strip() == ANSWER  # type: ignore[union-attr]
        thought = kinds["thinking"].thinking.strip()  # type: ignore[union-attr]
        assert THOUGHT.startswith(thought) and 0 < len(thought) < 300
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens is -7"):
            client.messages.create(
                model="m", messages=HELLO, max_tokens=9, thinking={"type": "enabled", "budget_tokens": -7}
            )


def test_ollamas_levels_limit_thinking(url: str) -> None:
    body = {
        "model": "m",
        "messages": HELLO,
        "stream": False,
        "options": {"temperature": 0, "num_predict": -1},
    }
    lengths = {}
    for think in ("low", True):
        answer = httpx.post(f"{url}/api/chat", json=body | {"think": think}, timeout=60).json()
        assert answer["message"]["content"].strip() == ANSWER
        lengths[think] = len(answer["message"]["thinking"])
    assert 0 < lengths["low"] < lengths[True]


def test_what_the_operator_has_set_holds_where_a_request_says_nothing(thinker: lp.Engine) -> None:
    with serve(thinker, settings=ServerSettings(model_names=("m",), reasoning="12")) as server:
        reasoning, content = of_chat(server.url)
        assert 0 < len(reasoning) < 120 and content == ANSWER
        assert of_chat(server.url, reasoning_effort="high") == (THOUGHT, ANSWER)
        assert of_chat(server.url, chat_template_kwargs={"enable_thinking": True})[0]
        assert of_chat(server.url, reasoning_budget=2000) == (THOUGHT, ANSWER)


def test_the_operator_turns_reasoning_off(thinker: lp.Engine) -> None:
    """The template closes the reasoning in the prompt, which counts for the number of its tokens, too."""
    with serve(thinker, settings=ServerSettings(model_names=("m",), reasoning="off")) as server:
        counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"model": "m", "messages": HELLO})
        off = len(thinker.model.tokenize_chat(HELLO, enable_thinking=False))
        assert off > len(thinker.model.tokenize_chat(HELLO))
        assert counted.json()["input_tokens"] == off
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60).json()
        assert answer["usage"]["prompt_tokens"] == off
        # This model opens it again.
        assert of_chat(server.url) == ("", ANSWER)
        asked = httpx.post(
            f"{server.url}/v1/chat/completions", json=CHAT | {"reasoning_effort": "minimal"}, timeout=60
        ).json()
        assert asked["usage"]["prompt_tokens"] < off


def test_a_model_whose_template_has_no_switch_closes_its_reasoning_at_once(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = scripted_model(
        tmp_path / "m.gguf", f"<think>{THOUGHT[:69]}</think>{ANSWER}", ("<think>", "</think>"), source
    )
    with (
        lp.Engine(path, n_ctx=1024, n_seq_max=1) as engine,
        serve(engine, settings=ServerSettings(model_names=("m",), reasoning="off")) as server,
    ):
        assert of_chat(server.url) == ("", ANSWER)
        assert of_chat(server.url, reasoning_effort="high") == (THOUGHT[:69], ANSWER)


def test_arguments_of_the_template(thinker: lp.Engine) -> None:
    settings = ServerSettings(model_names=("m",), template_args='{"enable_thinking": false}')
    with serve(thinker, settings=settings) as server:
        off = len(thinker.model.tokenize_chat(HELLO, enable_thinking=False))
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60).json()
        assert answer["usage"]["prompt_tokens"] == off
        assert of_chat(server.url, chat_template_kwargs={"enable_thinking": True})[0] == THOUGHT


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("reasoning", "on", "reasoning is 'on'; it must be off, auto or a number of tokens"),
        ("reasoning", "-1", "reasoning is '-1'; it must be off"),
        ("reasoning", 5, "reasoning must be a str"),
        ("template_args", {}, "template_args must be a str"),
        ("template_args", "{", "template_args is not JSON"),
        ("template_args", "[1]", "template_args must be a JSON object"),
        ("template_args", '{"tools": []}', "template_args may not hold 'tools'"),
    ],
)
def test_wrong_settings_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message.replace("[", r"\[")):
        ServerSettings(**{option: value})
