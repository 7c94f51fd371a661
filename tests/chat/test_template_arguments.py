"""Template arguments that change how calls and reasoning are written: grammar and parser follow the prompt."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.chat_families import FULL, TOOLS
from support.chat_templates import ByteVocabulary, names, parse_answer, template
from support.peer_cases import format_of

import llamapipe as lp
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.errors import InvalidRequestError

QUESTION = [{"role": "user", "content": "Weather?"}]
HORIZON = "IFM-K2-Horizon"
_CALL = "<ifm|tool_calls>\n<ifm|tool_call>{}</ifm|tool_call>\n</ifm|tool_calls>"


def _argument(key: str, kind: str, value: str) -> str:
    kind = f"<ifm|arg_type>{kind}</ifm|arg_type>\n"
    return f"<ifm|arg_key>{key}</ifm|arg_key>\n{kind}<ifm|arg_value>{value}</ifm|arg_value>\n"


def _tagged(days: str) -> str:
    city, unit = _argument("city", "string", FULL["city"]), _argument("unit", "string", "C")
    return _CALL.format(f"get_weather\n{city}{unit}{_argument('days', days, '3')}")


_JSON = _CALL.format(json.dumps({"name": "get_weather", "arguments": FULL}, ensure_ascii=False))
# A template argument, and calls of get_weather as a model writes them then.
CALLS = {
    "xml": (re.sub(r"<ifm\|arg_type>.*\n", "", _tagged("integer")),),
    "json": (_JSON,),
    "xml_typed": (_tagged("integer"), _tagged("number")),
}


@pytest.mark.parametrize("call_format", CALLS)
def test_calls_in_the_form_that_an_argument_chooses(call_format: str) -> None:
    args = {"tool_call_format": call_format}
    form, vocabulary = format_of(HORIZON, json.dumps(args)), ByteVocabulary()
    prompt = template(HORIZON).render(QUESTION, template_args=args)
    for text in CALLS[call_format]:
        answer = parse_answer(form.parser(TOOLS, "auto", prompt_tail=prompt), f"Hm.</ifm|think>{text}")
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("get_weather", FULL)]
        assert (answer.content, answer.reasoning) == ("", "Hm.")
        for choice in ("auto", "required"):
            grammar = form.grammar(TOOLS, choice, True, prompt_tail=prompt)
            assert grammar is not None
            for other, texts in CALLS.items():
                is_allowed = vocabulary.accepts(grammar, f"Hm.</ifm|think>{texts[0]}")
                assert is_allowed == (other == call_format), (choice, other)


@pytest.mark.parametrize(("effort", "tag"), [("high", ""), ("medium", "_fast"), ("low", "_faster")])
def test_reasoning_in_the_markers_that_an_argument_chooses(effort: str, tag: str) -> None:
    args = {"reasoning_effort": effort}
    form = format_of(HORIZON, json.dumps(args))
    prompt = template(HORIZON).render(QUESTION, template_args=args)
    assert prompt.endswith(f"<ifm|think{tag}>\n")
    answer = parse_answer(form.parser((), "none", prompt_tail=prompt), f"Hm.</ifm|think{tag}>Yes.")
    assert (answer.content, answer.reasoning) == ("Yes.", "Hm.")
    grammar = form.grammar((), "none", False, prompt_tail=prompt, schema='{"type": "boolean"}')
    assert grammar is not None and ByteVocabulary().accepts(grammar, f"Hm.</ifm|think{tag}>true")


# Template arguments that many templates read. They change prompts, but not how answers are marked.
_PLAIN: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False},
    {"thinking": False},
    {"thinking": True},
    {"reasoning_effort": "low"},
    {"documents": [{"title": "Title", "text": "Text."}]},
    {"thinking_mode": "disabled"},
    {"render_assistant_messages_raw": True},
    {"response_format": {"type": "json_object"}},
    {"think_render_option": "preserved"},
)


@pytest.mark.parametrize("name", [name for name in names() if name != HORIZON])
def test_arguments_that_hide_what_a_probe_looks_for_change_nothing(name: str) -> None:
    usual = format_of(name)
    for args in _PLAIN:
        form = format_of(name, json.dumps(args))
        assert form.calls == usual.calls
        assert form.reasoning == usual.reasoning
        assert form.markers.text_end == usual.markers.text_end
        assert form.markers.control >= usual.markers.control


# ---- through an engine
SWITCHED = """
{%- set form = call_form | default('json') -%}
{%- set mark = 'thought' if deep else 'think' -%}
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' }}
    {%- if message.reasoning_content %}<{{ mark }}>{{ message.reasoning_content }}</{{ mark }}>{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set arguments = call.function.arguments | tojson %}
        {%- if form == 'json' %}<call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}</call>
        {%- elif form == 'named' %}<call>{{ call.function.name }}:{{ arguments }}</call>
        {%- else %}{{ raise_exception('call_form is json or named') }}{% endif %}
    {%- endfor %}{{- message.content }}<|end|>
{%- endfor %}
{%- for _ in range(rounds or 0) %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {%- if enable_thinking is false %}<{{ mark }}></{{ mark }}>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def engine() -> Iterator[lp.Engine]:
    with (
        lp.Model(lp.demo_model_path(), chat_template=SWITCHED) as model,
        lp.Engine(model, n_ctx=1024) as chat_engine,
    ):
        yield chat_engine


@pytest.mark.parametrize(
    ("args", "start"),
    [
        ({}, "<call>{"),
        ({"call_form": "json"}, "<call>{"),
        ({"call_form": "named"}, "<call>now:{"),
    ],
)
def test_a_forced_call_is_written_and_read_as_the_prompt_shows_it(
    engine: lp.Engine, args: dict[str, Any], start: str
) -> None:
    params = lp.SamplingParams(max_tokens=200, temperature=0)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "now"}
    options["template_args"] = {**args, "enable_thinking": False}
    answer = engine.chat(QUESTION, params, **options)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("now", {})]
    written = engine.model.detokenize(answer.choices[0].token_ids)
    assert written.lstrip().startswith(start)
    deltas = list(engine.stream_chat(QUESTION, params, **options))
    assert [call.name for delta in deltas for call in delta.tool_calls if call.name] == ["now"]


def test_formats_are_found_once_for_what_the_template_reads(engine: lp.Engine) -> None:
    prompts = engine.model.chat_prompts
    usual = prompts.chat_format()
    assert prompts.chat_format({"unknown": 1, "enable_thinking": True}) is usual
    named = prompts.chat_format({"call_form": "named"})
    assert named.calls != usual.calls
    assert prompts.chat_format({"call_form": "named", "unknown": 2}) is named
    deep = prompts.chat_format({"deep": True}).reasoning
    assert deep is not None and (deep.start, deep.end) == ("<thought>", "</thought>")
    history = [{"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    text = engine.model.tokenize_chat(QUESTION + history, deep=True)
    assert "<thought>Hm</thought>" in engine.model.detokenize(text)


def test_only_the_start_of_long_arguments_counts(engine: lp.Engine) -> None:
    prompts = engine.model.chat_prompts
    first = prompts.chat_format({"deep": "x" * 1000})
    assert prompts.chat_format({"deep": "x" * 2000}) is first
    nested: dict[str, Any] = {str(i): [["y" * 100] * 10] * 10 for i in range(100)}
    assert len(json.dumps(template(HORIZON).probed_arguments({"reasoning_effort": nested}))) < 5_000


def test_formats_of_many_arguments_are_forgotten(engine: lp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamapipe.llama._chat_prompts._MOST_FORMATS", 3)
    prompts = engine.model.chat_prompts
    first = prompts.chat_format({"deep": 0.5})
    formats = [prompts.chat_format({"deep": i}) for i in range(3)]
    assert prompts.chat_format({"deep": 0.5}) is not first
    assert [prompts.chat_format({"deep": i}) for i in (2, 1)] == formats[:0:-1]


def test_nobody_waits_for_the_probe_of_another_set(
    engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = engine.model.chat_prompts
    usual, probe = prompts.chat_format(), prompts.render_probe
    others: list[ChatFormat] = []

    def probed(*args: Any, **kwargs: Any) -> str:
        if not others:  # while this set is probed, another thread asks for the usual format
            other = threading.Thread(target=lambda: others.append(prompts.chat_format()))
            other.start()
            other.join(timeout=60)
        return probe(*args, **kwargs)

    monkeypatch.setattr(prompts, "render_probe", probed)
    prompts.chat_format({"deep": "waits"})
    assert others == [usual]


def test_all_probes_share_the_time_of_one_rendering(
    engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamapipe.chat.sandbox.MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match=r"the chat template was stopped: .* 0\.05 seconds"):
        engine.model.chat_prompts.chat_format({"rounds": 100_000})
