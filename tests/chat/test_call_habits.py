"""What models write of calls besides what one render shows: numbers, ids, orders, markers that are left out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import pytest
from support.chat_families import FAMILIES, PARIS, TOOLS
from support.chat_templates import ByteVocabulary, Render, parse_answer, renderer, template

from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.template import ChatTemplate
from llamapipe.chat.tools import Tool

NOW: tuple[str, dict[str, Any]] = ("now", {})
WEATHER = ("get_weather", PARIS)


@lru_cache
def form_of(name: str) -> ChatFormat:
    family = FAMILIES[name]
    return ChatFormat.of(renderer(family.template), ByteVocabulary(family.specials).special_id)


def parsed(name: str, text: str, lenient: bool = True, tools: tuple[Tool, ...] = TOOLS) -> ChatMessage:
    """The answer, the same whole and by characters."""

    def read(parts: list[str]) -> ChatMessage:
        options: dict[str, Any] = {
            "prompt_tail": FAMILIES[name].tail,
            "stream_calls": True,
            "lenient": lenient,
        }
        parser = form_of(name).parser(tools, "auto", **options)
        return ChatMessage([*map(parser.feed, parts), parser.finish()])

    whole, cut = read([text]), read(list(text))
    assert (whole.content, calls_of(whole)) == (cut.content, calls_of(cut))
    return whole


def calls_of(answer: ChatMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("Kimi K2", ["functions.get_weather:0", "functions.now:1"]),
        ("Command R7B", ["0", "1"]),
        ("Solar", ["abcdefgh1", "abcdefgh1"]),
    ],
)
def test_the_ids_that_models_write(name: str, ids: list[str]) -> None:
    assert [call.id for call in parsed(name, FAMILIES[name].both).tool_calls] == ids


@pytest.mark.parametrize(("name", "number"), [("Kimi K2", ":0<"), ("Command R7B", '"0"')])
def test_numbers_go_on_through_a_conversation(name: str, number: str) -> None:
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(family.specials)
    grammar = form_of(name).grammar(TOOLS, "required", True, prompt_tail=family.tail)
    assert grammar is not None
    for n in ("1", "12", "345"):
        text = family.full.replace(number, number.replace("0", n))
        assert text != family.full and vocabulary.accepts(grammar, text)
        assert n in parsed(name, text).tool_calls[0].id
    assert not vocabulary.accepts(grammar, family.full.replace(number, number.replace("0", "x")))


CODER = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"


@pytest.mark.parametrize("after", ["", "\n", "\n</tool_call>"])
def test_a_call_without_the_outer_marker(after: str) -> None:
    answer = parsed("Qwen3-Coder", f"I look.\n{CODER}{after}")
    assert (answer.content, calls_of(answer)) == ("I look.", [WEATHER])
    strict = parsed("Qwen3-Coder", f"I look.\n{CODER}{after}", lenient=False)
    assert (strict.content, calls_of(strict)) == (f"I look.\n{CODER}{after}", [])


def test_a_section_without_its_start_or_the_ends_of_calls() -> None:
    first, second = (f"<|tool_call_begin|>functions.now:{n}<|tool_call_argument_begin|>" for n in (0, 1))
    assert calls_of(parsed("Kimi K2", f"{first}{{}}{second}{{}}")) == [NOW, NOW]
    assert calls_of(parsed("Kimi K2", f"{first}{{}}<|tool_call_end|>")) == [NOW]


def test_an_argument_whose_end_is_missing() -> None:
    start = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
    for rest in ("<parameter=days>\n3\n</parameter>\n", "<parameter=days>\n3\n"):
        answer = parsed("Qwen3-Coder", f"{start}{rest}</function>\n</tool_call>")
        assert calls_of(answer) == [("get_weather", {"city": "Paris", "days": 3})]
    assert calls_of(parsed("Qwen3-Coder", f"{start}</function>\n</tool_call>")) == [WEATHER]
    # An argument that the tool does not have is text.
    text = f"{start}<parameter=other>\nx\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(parsed("Qwen3-Coder", text))[0][1] == {"city": "Paris\n<parameter=other>\nx"}


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}',
        '{"type": "function", "function": "get_weather", "parameters": {"city": "Paris"}}',
        '{"type": "function", "name": "get_weather", "arguments": {"city": "Paris"}}',
        '{"function": {"arguments": {"city": "Paris"}, "name": "get_weather"}, "id": "1", "type": "function"}',
    ],
)
def test_the_form_of_openai(text: str) -> None:
    for name, before, after in (
        ("Hermes", "", ""),
        ("Hermes", "<tool_call>\n", "\n</tool_call>"),
        ("Llama", "", ""),
    ):
        answer = parsed(name, before + text + after)
        assert (answer.content, calls_of(answer)) == ("", [WEATHER])


LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


def test_calls_of_llama_after_text_and_with_semicolons() -> None:
    answer = parsed("Llama", f'Here it is: {LLAMA}; {{"name": "now", "parameters": {{}}}}')
    assert (answer.content, calls_of(answer)) == ("Here it is:", [WEATHER, NOW])
    assert calls_of(parsed("Llama", f"{LLAMA}; {LLAMA}")) == [WEATHER, WEATHER]
    for text in ('A dict: {"name": "x"} or {y}; {', f"Say {LLAMA[:-1]}"):
        answer = parsed("Llama", text)
        assert (answer.content, answer.tool_calls) == (text, ())
    assert parsed("Llama", f"Here: {LLAMA}", lenient=False).tool_calls == ()


EITHER = Tool(
    "f",
    "",
    {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "object"]},
            "b": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]},
            "c": {"type": ["boolean", "string", "null"]},
        },
        "required": ["a", "b"],
    },
)


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (('{"x": 1}', "42", "true"), ({"x": 1}, 42, True)),
        (("{x", "4", "null"), ("{x", "4", None)),
        (("true", "4.5", "yes"), ("true", "4.5", "yes")),
        (('"q"', "-7", '"true"'), ('"q"', "-7", '"true"')),
        # Templates show values as Python writes them, and models repeat that.
        (("{'x': None}", "None", "None"), ({"x": None}, "None", None)),
        (("{'x'}", "None", "True"), ("{'x'}", "None", True)),
    ],
)
@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM", "MiniCPM 5", "MiniMax M3"])
def test_strings_that_may_be_something_else(
    name: str, texts: tuple[str, ...], values: tuple[Any, ...]
) -> None:
    form = form_of(name)
    assert form.calls is not None
    calls = form.calls
    text = calls.written([("", "f", dict(zip("abc", texts, strict=True)))])
    expected = dict(zip("abc", values, strict=True))
    assert calls_of(parsed(name, text, tools=(EITHER,))) == [("f", expected)]
    grammar = form.grammar((EITHER,), "required", True, prompt_tail="".join(FAMILIES[name].think or ()))
    assert grammar is not None and ByteVocabulary(FAMILIES[name].specials).accepts(grammar, text)


@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM", "LFM 2.5", "Gemma 4", "DeepSeek V3.2", "MiniMax M3"])
def test_arguments_come_in_any_order(name: str) -> None:
    family, form = FAMILIES[name], form_of(name)
    assert form.calls is not None
    vocabulary = ByteVocabulary(family.specials)
    grammar = form.grammar(TOOLS, "get_weather", True, prompt_tail=family.tail + "".join(family.think or ()))
    assert grammar is not None
    arguments: dict[str, Any] = {"days": 3, "city": "Paris", "unit": "C"}
    for keys, is_valid in (
        ("days city unit", True),
        ("unit city", True),
        ("unit days", False),
        ("city", True),
    ):
        text = form.calls.written([("", "get_weather", {key: arguments[key] for key in keys.split()})])
        assert vocabulary.accepts(grammar, text) == is_valid
    twice = form.calls.written([("", "get_weather", {"city": "Paris", "unit": "C"})]).replace("unit", "city")
    assert not vocabulary.accepts(grammar, twice)


@pytest.mark.parametrize("name", ["LFM2-8B-A1B", "ibm-granite-granite-3.3-2B-Instruct"])
def test_calls_that_a_template_leaves_out_are_written_into_the_text(name: str) -> None:
    form = ChatFormat.of(renderer(name), lambda text: None)
    assert form.calls is not None and form.calls.in_content
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Sun."},
    ]
    text = template(name).render(messages, write_calls=form.calls.written)
    before, written, after = text.partition(form.calls.written([("1", "get_weather", PARIS)]))
    assert written and before.endswith("I look.") and "Sun." in after


def render_of(text: str) -> Render:
    render: Render = ChatTemplate(text).render
    return render


def test_a_format_that_is_not_recognised_is_not_a_template_without_tools() -> None:
    text = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}(calls){% endif %}"
    shown = ChatFormat.of(render_of(text + "{% endfor %}"), lambda text: None)
    assert (shown.shows_tools, shown.supports_tools) == (True, False)
    without = ChatFormat.of(renderer("google-gemma-2-2b-it"), lambda text: None)
    assert (without.shows_tools, without.supports_tools) == (False, False)


def test_values_in_the_syntax_of_python_and_of_gemma() -> None:
    tool = Tool("f", "", {"type": "object", "additionalProperties": True})
    text = r"""a='it\'s', b="\u00e9\n", c=[1, (True, None)], d={'k': {"x": -1.5e3}}, e=[], g=''"""
    answer = parsed("LFM 2.5", f"<|tool_call_start|>[f({text})]<|tool_call_end|>", tools=(tool,))
    assert calls_of(answer) == [
        ("f", {"a": "it's", "b": "é\n", "c": [1, [True, None]], "d": {"k": {"x": -1500.0}}, "e": [], "g": ""})
    ]
    # Quotation marks that nobody escaped: a string ends where a comma or a bracket follows.
    text = """a='it's so', b=["say "hi" now", 'a'b'], c={'k': 'x'y'}, d='' , e='o''"""
    answer = parsed("LFM 2.5", f"<|tool_call_start|>[f({text})]<|tool_call_end|>", tools=(tool,))
    expected = {"a": "it's so", "b": ['say "hi" now', "a'b"], "c": {"k": "x'y"}, "d": "", "e": "o'"}
    assert calls_of(answer) == [("f", expected)]
    text = '<|tool_call>call:f{a:<|"|>"x"<|"|>,b:[1,<|"|>y<|"|>,{c:null}],d:{},e:false}<tool_call|>'
    answer = parsed("Gemma 4", text, tools=(tool,))
    assert calls_of(answer) == [("f", {"a": '"x"', "b": [1, "y", {"c": None}], "d": {}, "e": False})]
    text = '<|tool_call>call:f{"a":{"b c":1, "d":<|"|>x<|"|>}}<tool_call|>'  # JSON's quotes around names
    answer = parsed("Gemma 4", text, tools=(tool,))
    assert calls_of(answer) == [("f", {"a": {"b c": 1, "d": "x"}})]
    deep = f"<|tool_call_start|>[f(a={'[' * 5000}"
    assert (
        parse_answer(form_of("LFM 2.5").parser((tool,), "auto", prompt_tail=""), deep).content
        == deep[len("<|tool_call_start|>") :]
    )


class TestToolsOfTheSystem:
    """Templates such as Phi-4 mini's, which show tools only where a message of the system has them."""

    TEXT = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% if message['tools'] %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    CONTROL = ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|end|>", "<|assistant|>")
    USER: ClassVar = {"role": "user", "content": "Weather?"}

    def test_they_are_shown_once(self) -> None:
        template = ChatTemplate(self.TEXT)
        tools = [tool.as_openai() for tool in TOOLS]
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            text = template.render([*system, self.USER], tools=tools)
            said = system[0]["content"] if system else ""
            assert (
                text.startswith(f'<|system|>{said}<|tool|>[{{"name": "get_weather"')
                and text.count("<|tool|>") == 1
            )
            assert "<|tool|>" not in template.render([*system, self.USER])

    def test_calls_in_a_list_are_constrained_and_read(self) -> None:
        vocabulary = ByteVocabulary(self.CONTROL)
        form = ChatFormat.of(render_of(self.TEXT), vocabulary.special_id)
        calls = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'
        text = f"<|tool_call|>{calls}<|/tool_call|>"
        for choice in ("auto", "required"):
            grammar = form.grammar(TOOLS, choice, True, prompt_tail="<|assistant|>")
            assert grammar is not None and vocabulary.accepts(grammar, text)
            assert not vocabulary.accepts(grammar, text.replace("weather", "wether"))
        for written in (text, f"functools{calls}"):
            for parts in ([written], list(written)):
                parser = form.parser(TOOLS, "auto", prompt_tail="<|assistant|>", lenient=True)
                answer = ChatMessage([*map(parser.feed, parts), parser.finish()])
                assert [(call.name, call.arguments) for call in answer.tool_calls] == [
                    ("get_weather", PARIS),
                    ("now", {}),
                ]
                assert answer.content == ""
        parser = form.parser(TOOLS, "auto", prompt_tail="<|assistant|>", lenient=True)
        assert (
            parser.feed("functools is a module").content + parser.finish().content == "functools is a module"
        )


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_follow_reasoning_where_prompts_begin_a_call(choice: str) -> None:
    """Muse Glimmer's prompts begin every message, so a call after reasoning begins another one."""
    family, form = FAMILIES["Muse Glimmer"], form_of("Muse Glimmer")
    assert form.reasoning is not None and form.calls is not None
    text = f" {form.reasoning.start}Hm.{form.reasoning.end}{form.calls.prompted}{family.both}"
    grammar = form.grammar(TOOLS, choice, True, prompt_tail=family.tail)
    assert grammar is not None
    assert ByteVocabulary(family.specials).accepted(grammar, text) == (text, True)
    answer = parse_answer(form.parser(TOOLS, choice, prompt_tail=family.tail), text)
    assert (answer.reasoning, calls_of(answer)) == ("Hm.", [WEATHER, NOW])


def test_a_marker_of_one_character_after_that_character() -> None:
    """Functionary's calls begin with ``>>>``; the text before may end with a tag."""
    for before in ("Look: <b>here</b>", "a > b >>", "x"):
        answer = parsed("functionary 3.2", f'all\n{before}>>>get_weather\n{{"city": "Paris"}}')
        assert (answer.content, calls_of(answer)) == (before, [WEATHER])
    for text in ("all\n>>>", "all\na >>>> b", "all\na >>>"):
        assert parsed("functionary 3.2", text).content == text.removeprefix("all\n")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("all\n>>> f(1)\n2", ">>> f(1)\n2", []),
        ("all\n>>>>", ">>>>", []),
        ("all\nh ^ (h>>>16)", "h ^ (h>>>16)", []),
        ("all\n>>>nowhere else", ">>>nowhere else", []),
        ('all\n<b>x</b>>>>get_weather\n{"city": "Paris"}', "<b>x</b>", [WEATHER]),
        ('all\na >>> b >>>>> c >>>>>>>get_weather\n{"city": "Paris"}', "a >>> b >>>>> c >>>>", [WEATHER]),
        ('get_weather\n{"city": "Paris"}\n>>>now\n{}', "", [WEATHER, NOW]),
        ('get_weather\n{"city": ">>>>"}>>>now\n{}', "", [("get_weather", {"city": ">>>>"}), NOW]),
    ],
)
def test_a_marker_that_texts_contain_may_be_written(
    text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """What is read as text with ``>>>`` may be generated; after it, only a valid call of a tool."""
    family = FAMILIES["functionary 3.2"]
    vocabulary = ByteVocabulary(family.specials)
    grammar = form_of("functionary 3.2").grammar(TOOLS, "auto", True, prompt_tail=family.tail)
    assert grammar is not None
    assert vocabulary.accepted(grammar, text) == (text, True)
    answer = parsed("functionary 3.2", text)
    assert (answer.content, calls_of(answer)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('all\n>>>get_weather\n{"t', 'all\n>>>get_weather\n{"'),
        ('all\nx >>>>  now\n{"t', "all\nx >>>>  now\n{"),
        ("all\nx >>>get_wether\n{}", "all\nx >>>get_wether"),
    ],
)
def test_what_begins_a_call_after_a_marker_in_a_text(text: str, allowed: str) -> None:
    family = FAMILIES["functionary 3.2"]
    grammar = form_of("functionary 3.2").grammar(TOOLS, "auto", True, prompt_tail=family.tail)
    assert grammar is not None
    assert ByteVocabulary(family.specials).accepted(grammar, text)[0] == allowed


def test_text_after_calls_where_prompts_begin_a_call() -> None:
    """functionary's prompts end in ``>>>``; the model writes it again before a name, or "all" before text."""
    call = 'get_weather\n{"city": "Paris"}'
    for text, content, calls in (
        (f"{call}>>>all\nDone", "Done", [WEATHER]),
        (f"{call}>>>all\nOnce more.>>>{call}", "Once more.", [WEATHER, WEATHER]),
        (">>>all\nHello", "Hello", []),
        ("all\nHello >>> you", "Hello >>> you", []),
    ):
        answer = parsed("functionary 3.2", text)
        assert (answer.content, calls_of(answer)) == (content, calls)
