"""Per family of templates: what is found by probing, what its grammars allow, and what its parser reads."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_families import FAMILIES, FULL, PARIS, TOOLS, Family
from support.chat_templates import ByteVocabulary, cuts, form_of

from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def vocabulary(family: Family) -> ByteVocabulary:
    return ByteVocabulary(family.specials)


@pytest.fixture
def form(family: Family) -> ChatFormat:
    return form_of(family.template, family.specials)


def parse(form: ChatFormat, text: str, tail: str, stream_calls: bool = False) -> ChatMessage:
    """The answer; the same for every cut."""
    answers: list[tuple[Any, ...]] = []
    for parts in cuts(text):
        parser = form.parser(TOOLS, "auto", prompt_tail=tail, stream_calls=stream_calls)
        answer = ChatMessage([*map(parser.feed, parts), parser.finish()])
        assert not parser.finish()
        calls = [(call.name, call.arguments) for call in answer.tool_calls]
        answers.append(
            (answer.content, answer.reasoning, calls, tuple(call.is_complete for call in answer.tool_calls))
        )
        assert answers[-1] == answers[0], parts
        assert all(len(call.id) >= 1 for call in answer.tool_calls)
    return answer


def calls_of(answer: ChatMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


class TestParser:
    def test_text_without_markers_is_unchanged(self, form: ChatFormat, family: Family) -> None:
        for text in ("", "hello", " Hello,\n\nworld!\n ", "a < b, <b>, </x> and [x] {}", "日本 ✓"):
            answer = parse(form, text, family.tail)
            assert (answer.content, answer.reasoning, answer.tool_calls) == (text, "", ())

    @pytest.mark.parametrize("stream_calls", [False, True])
    def test_calls_are_read_with_their_arguments(
        self, form: ChatFormat, family: Family, stream_calls: bool
    ) -> None:
        for text, arguments in ((family.paris, PARIS), (family.full, FULL)):
            answer = parse(form, text, family.tail, stream_calls)
            assert calls_of(answer) == [("get_weather", arguments)]
            assert (answer.content, answer.reasoning) == ("", "")
        if family.both:
            answer = parse(form, family.both, family.tail, stream_calls)
            assert calls_of(answer) == [("get_weather", PARIS), ("now", {})]

    def test_text_before_a_call_is_content(self, form: ChatFormat, family: Family) -> None:
        if family.may_talk:
            answer = parse(form, f"I look it up. <\n\n{family.paris}", family.tail)
            assert (answer.content, calls_of(answer)) == ("I look it up. <", [("get_weather", PARIS)])

    def test_a_streamed_call_arrives_in_pieces(self, form: ChatFormat, family: Family) -> None:
        parser = form.parser(TOOLS, "auto", prompt_tail=family.tail, stream_calls=True)
        deltas = [delta for c in family.both or family.full for delta in parser.feed(c).tool_calls]
        deltas += parser.finish().tool_calls
        named = [(0, "get_weather"), (1, "now")][: 2 if family.both else 1]
        assert [(d.index, d.name) for d in deltas if d.name] == named
        assert [d.index for d in deltas if d.id] == [index for index, _ in named]
        assert sum(d.index == 0 for d in deltas) > 1

    def test_what_is_no_call_is_content(self, form: ChatFormat, family: Family) -> None:
        for text in (family.unknown, *family.broken):
            answer = parse(form, f"Well: {text}" if family.may_talk else text, family.tail)
            seen = family.visible(text)
            assert answer.tool_calls == ()
            assert answer.content == (f"Well: {seen}" if family.may_talk else seen)

    def test_content_and_calls_follow_what_is_no_call(self, form: ChatFormat, family: Family) -> None:
        if family.may_talk:
            answer = parse(form, f"{family.unknown} Sorry. {family.paris}", family.tail)
            assert answer.content == f"{family.visible(family.unknown)} Sorry."
            assert calls_of(answer) == [("get_weather", PARIS)]

    def test_a_streamed_call_that_breaks_off_is_not_complete(self, form: ChatFormat, family: Family) -> None:
        at = family.full.index("Paulo")
        answer = parse(form, family.full[:at], family.tail, stream_calls=True)
        (call,) = answer.tool_calls
        assert (call.name, call.is_complete, answer.content) == ("get_weather", False, "")
        written = call.arguments_text.endswith('{"city": "São \\"')  # where the arguments are no JSON
        assert written or family.full[:at].endswith(call.arguments_text)

    def test_choice_none_reads_no_calls(self, form: ChatFormat, family: Family) -> None:
        parser = form.parser(TOOLS, "none", prompt_tail=family.tail)
        text = family.paris if family.may_talk or not family.specials else family.unknown
        assert parser.feed(text).content + parser.finish().content == family.visible(text)

    def test_a_finished_parser_takes_no_text(self, form: ChatFormat, family: Family) -> None:
        parser = form.parser(TOOLS, "auto", prompt_tail=family.tail)
        parser.finish()
        with pytest.raises(ValueError, match="finished"):
            parser.feed("x")


class TestReasoning:
    def test_it_is_separated(self, form: ChatFormat, family: Family) -> None:
        if family.think is None:
            return
        start, end = family.think
        for tail, text in ((family.tail, start), (family.tail + start, "")):
            answer = parse(form, f"{text}Hm,\nwell{end}Yes. ", tail)
            assert (answer.reasoning, answer.content) == ("Hm,\nwell", "Yes. ")
            answer = parse(form, f"{text}Hm{end}{family.paris}", tail)
            assert (answer.reasoning, answer.content, calls_of(answer)) == (
                "Hm",
                "",
                [("get_weather", PARIS)],
            )
            answer = parse(form, f"{text}Hm", tail)
            assert (answer.reasoning, answer.content) == ("Hm", "")

    def test_a_prompt_may_have_closed_it(self, form: ChatFormat, family: Family) -> None:
        if family.think is None:
            return
        start, end = family.think
        answer = parse(form, "Yes.", family.tail + start + end)
        assert (answer.reasoning, answer.content) == ("", "Yes.")


class TestGrammar:
    def test_auto_allows_text_and_valid_calls(
        self, form: ChatFormat, family: Family, vocabulary: ByteVocabulary
    ) -> None:
        grammar = form.grammar(TOOLS, "auto", True, prompt_tail=family.tail)
        assert grammar is not None
        for text in (f"{family.text}Hello, <b>world</b>!\n", family.paris, family.full, family.both):
            assert not text or vocabulary.accepts(grammar, text), text
        if family.may_talk:
            assert vocabulary.accepts(grammar, f"I look.\n{family.paris}")
        assert vocabulary.accepted(grammar, family.wrong_key) == (family.wrong_key[:-1], False)
        assert not vocabulary.accepts(grammar, family.unknown)
        for text in family.broken:
            assert not vocabulary.accepts(grammar, text)

    @pytest.mark.parametrize("choice", ["required", "get_weather"])
    def test_forced_calls_allow_nothing_else(
        self, form: ChatFormat, family: Family, vocabulary: ByteVocabulary, choice: str
    ) -> None:
        grammar = form.grammar(TOOLS, choice, True, prompt_tail=family.tail)
        assert grammar is not None
        assert vocabulary.accepts(grammar, family.paris) and vocabulary.accepts(grammar, family.full)
        assert not family.both or vocabulary.accepts(grammar, family.both) == (choice == "required")
        assert vocabulary.accepted(grammar, "Hello") == ("", False)
        assert vocabulary.accepted(grammar, f"Hello {family.paris}") == ("", False)
        assert vocabulary.accepted(grammar, family.wrong_key) == (family.wrong_key[:-1], False)

    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_without_parallel_calls_a_second_one_is_forbidden(
        self, form: ChatFormat, family: Family, vocabulary: ByteVocabulary, choice: str
    ) -> None:
        grammar = form.grammar(TOOLS, choice, False, prompt_tail=family.tail)
        assert grammar is not None
        assert vocabulary.accepts(grammar, family.paris)
        assert not family.both or not vocabulary.accepts(grammar, family.both)

    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_reasoning_comes_first(
        self, form: ChatFormat, family: Family, vocabulary: ByteVocabulary, choice: str
    ) -> None:
        if family.think is None:
            return
        start, end = family.think
        key = "" if family.specials else family.wrong_key  # control tokens end the reasoning's text
        for tail, text in ((family.tail, start), (family.tail + start, "")):
            grammar = form.grammar(TOOLS, choice, True, prompt_tail=tail)
            assert grammar is not None
            assert vocabulary.accepts(grammar, f"{text}Hm, {key}{end}{family.paris}")
            assert vocabulary.accepts(grammar, f"{text}Hm{end}{family.text}Hello") == (choice == "auto")
        closed = form.grammar(TOOLS, choice, True, prompt_tail=family.tail + start + end)
        assert closed is not None and vocabulary.accepts(closed, family.paris)

    def test_a_schema_of_the_text(self, form: ChatFormat, family: Family, vocabulary: ByteVocabulary) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        alone = form.grammar((), "none", True, prompt_tail=family.tail, schema=schema)
        both = form.grammar(TOOLS, "auto", True, prompt_tail=family.tail, schema=schema)
        assert alone is not None and both is not None
        text = f'{family.text}{{"n":1}}'
        assert vocabulary.accepts(alone, text) and vocabulary.accepts(both, text)
        assert vocabulary.accepts(both, family.paris) and not vocabulary.accepts(alone, family.paris)
        assert not vocabulary.accepts(both, "Hello")

    def test_no_tools_and_no_schema_need_no_grammar(self, form: ChatFormat, family: Family) -> None:
        assert form.grammar((), "auto", True, prompt_tail=family.tail) is None
        assert form.grammar(TOOLS, "none", True, prompt_tail=family.tail) is None
