"""Chat calls of an engine: answers, tool calls of every family of templates, reasoning, formats, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pydantic
import pytest
from support.chat_families import FAMILIES, FULL, PARIS, TOOLS, WEATHER
from support.chat_templates import template
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.chat.results import ChatMessage, ChatPiece
from llamapipe.compat.formats import FUNCTION_CALLING
from llamapipe.errors import EngineClosedError, InvalidRequestError
from llamapipe.results import ChatDelta

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = lp.SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=8) as engine:
        yield engine


def joined(parts: list[ChatDelta]) -> ChatMessage:
    return ChatMessage(ChatPiece(part.content, part.reasoning, part.tool_calls) for part in parts)


class TestAnswers:
    def test_an_answer_is_what_the_rendered_prompt_generates(self, engine: lp.Engine) -> None:
        tokens = engine.model.tokenize_chat(HELLO)
        answer = engine.chat(HELLO, GREEDY)
        expected = engine.generate(tokens, GREEDY)
        assert (answer.content, answer.n_prompt_tokens) == (expected.text, len(tokens))
        assert answer.choices[0].token_ids == expected.token_ids
        assert answer.message == {"role": "assistant", "content": expected.text}

    def test_text_is_a_message_of_the_user(self, engine: lp.Engine) -> None:
        assert engine.chat("Hello", GREEDY).content == engine.chat(HELLO, GREEDY).content
        assert engine.count_chat_tokens("Hello") == engine.count_chat_tokens(HELLO)

    def test_conversations_are_answered_in_their_order(self, engine: lp.Engine) -> None:
        texts = [f"Number {i}" for i in range(12)]
        together = engine.chat(texts, GREEDY)
        assert [answer.content for answer in together] == [
            engine.chat(text, GREEDY).content for text in texts
        ]

    def test_each_conversation_may_have_its_params(self, engine: lp.Engine) -> None:
        params = [lp.SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 5, 3)]
        assert [a.n_completion_tokens for a in engine.chat(["One", "Two", "Three"], params)] == [1, 5, 3]
        with pytest.raises(
            ValueError, match="there are 2 conversations and 3 params; give one for all, or one for"
        ):
            engine.chat(["One", "Two"], params)
        with pytest.raises(TypeError, match=r"params must be SamplingParams, not list$"):
            engine.chat("One", params)
        with pytest.raises(TypeError, match=r"not int \(prompt 1 of the list\)"):
            engine.chat(["One", "Two"], [params[0], 5])  # type: ignore[list-item]

    def test_a_stream_joins_to_the_answer(self, engine: lp.Engine) -> None:
        parts = list(engine.stream_chat(HELLO, GREEDY))
        answer = engine.chat(HELLO, GREEDY)
        assert joined(parts).content == answer.content
        assert [t for part in parts for t in part.token_ids] == answer.choices[0].token_ids
        assert parts[-1].finish_reason == "stop"

    def test_asyncio_gives_the_same(self, engine: lp.Engine) -> None:
        async def run() -> tuple[str, list[str], str]:
            streamed = [part async for part in engine.astream_chat(HELLO, GREEDY)]
            several = await engine.achat([HELLO, "x" * 9000], lp.SamplingParams(max_tokens=1))
            return (
                joined(streamed).content,
                [answer.content for answer in several],
                (await engine.achat(HELLO, GREEDY)).content,
            )

        expected = engine.chat(HELLO, GREEDY).content
        with pytest.raises(InvalidRequestError, match=r"n_ctx is 512.*prompt 1"):
            asyncio.run(run())

        async def short() -> tuple[str, str]:
            streamed = [part async for part in engine.astream_chat(HELLO, GREEDY)]
            return joined(streamed).content, (await engine.achat(HELLO, GREEDY)).content

        assert asyncio.run(short()) == (expected, expected)

    def test_an_answer_can_be_appended(self, engine: lp.Engine) -> None:
        messages: list[Any] = list(HELLO)
        messages += [engine.chat(messages, GREEDY).message, {"role": "user", "content": "And then?"}]
        assert engine.chat(messages, GREEDY).n_prompt_tokens > engine.chat(HELLO, GREEDY).n_prompt_tokens

    def test_choices_have_seeds_of_their_own(self, engine: lp.Engine) -> None:
        answer = engine.chat(HELLO, lp.SamplingParams(n=3, seed=5, max_tokens=12))
        assert [choice.seed for choice in answer.choices] == [5, 6, 7]
        again = engine.chat(HELLO, lp.SamplingParams(seed=6, max_tokens=12))
        assert again.content == answer.choices[1].content


@contextmanager
def speaking(path: Path, text: str, specials: tuple[str, ...], source: str) -> Iterator[lp.Engine]:
    """An engine whose model says this text."""
    with (
        lp.Model(scripted_model(path / "said.gguf", text, specials, source)) as model,
        lp.Engine(model, n_ctx=8192, n_seq_max=2) as engine,
    ):
        yield engine


def speaking_family(path: Path, name: str, text: str) -> AbstractContextManager[lp.Engine]:
    """An engine whose model says this text after a prompt of the family."""
    family = FAMILIES[name]
    chat_template = template(family.template)
    prompt = chat_template.render(HELLO, template_args={"enable_thinking": False})
    if family.think and prompt.endswith(family.think[0]):  # a prompt that opens the reasoning
        text = f"Hm. {family.think[1]}{text}"
    # Some repeat their control tokens, which a table of bigrams cannot: here they are text.
    specials = () if any(text.count(special) > 1 for special in family.specials) else family.specials
    return speaking(path, text, specials, chat_template.text)


@pytest.mark.parametrize("name", FAMILIES)
class TestFamilies:
    """Models that say a call as the models of a family write it."""

    def test_a_call_is_read_whole_and_streamed(self, tmp_path: Path, name: str) -> None:
        """One engine for every choice: reading the template takes most of the time."""
        with speaking_family(tmp_path, name, FAMILIES[name].full) as engine:
            args = {"enable_thinking": False}
            for choice in ("auto", "required", "get_weather"):
                options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "template_args": args}
                answer = engine.chat(HELLO, GREEDY, **options)
                assert [(call.name, call.arguments) for call in answer.tool_calls] == [("get_weather", FULL)]
                assert (answer.content, answer.finish_reason) == ("", "tool_calls"), choice
                parts = list(engine.stream_chat(HELLO, GREEDY, **options))
                streamed = joined(parts)
                assert [(call.name, call.arguments) for call in streamed.tool_calls] == [
                    ("get_weather", FULL)
                ]
                assert (streamed.content, parts[-1].finish_reason) == ("", "tool_calls"), choice
                ids = [t for part in parts for t in part.token_ids]
                assert ids == answer.choices[0].token_ids, choice

    def test_text_without_a_call_is_content(self, tmp_path: Path, name: str) -> None:
        said = f"{FAMILIES[name].text}It is sunny in Paris."
        with speaking_family(tmp_path, name, said) as engine:
            off = {"enable_thinking": False, "thinking": False}  # as the templates name it
            answer = engine.chat(HELLO, GREEDY, tools=TOOLS, tool_choice="none", template_args=off)
            assert (answer.content, answer.tool_calls) == ("It is sunny in Paris.", ())
            assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "said", "specials", "content", "reasoning"),
    [
        (
            "google-gemma-4-31B-it",
            "<|channel>thought\nWell, what now.\n<channel|>It is sunny.",
            ("<|channel>", "<channel|>", "<|turn>", "<turn|>"),
            "It is sunny.",
            "Well, what now.",
        ),
        (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "<|START_THINKING|>Well, what.<|END_THINKING|><|START_RESPONSE|>It is sunny.<|END_RESPONSE|>",
            ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            "It is sunny.",
            "Well, what.",
        ),
        # A control token that the template does not know, and the same text where the model spells a token.
        (
            "Qwen-Qwen3-0.6B",
            "<think>Well, what.</think>It is <|fim_middle|>sunny <|fim_suffix|>.",
            ("<|fim_middle|>",),
            "It is sunny <|fim_suffix|>.",
            "Well, what.",
        ),
    ],
)
def test_control_tokens_are_no_content(
    tmp_path: Path, name: str, said: str, specials: tuple[str, ...], content: str, reasoning: str
) -> None:
    with speaking(tmp_path, said, specials, template(name).text) as engine:
        answer = engine.chat(HELLO, GREEDY)
        streamed = joined(list(engine.stream_chat(HELLO, GREEDY)))
        for completion in (answer, streamed):
            assert (completion.content, completion.reasoning) == (content, reasoning)


class TestTools:
    def test_two_calls_in_one_answer(self, tmp_path: Path) -> None:
        family = FAMILIES["Hermes"]
        with speaking(tmp_path, family.both, (), template(family.template).text) as engine:
            args = {"enable_thinking": False}
            answer = engine.chat(HELLO, GREEDY, tools=TOOLS, template_args=args)
            assert [(call.name, call.arguments) for call in answer.tool_calls] == [
                ("get_weather", PARIS),
                ("now", {}),
            ]
            single = engine.chat(
                HELLO,
                GREEDY,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                template_args=args,
            )
            assert [call.name for call in single.tool_calls] == ["get_weather"]

    def test_calls_as_plain_json(self, tmp_path: Path) -> None:
        """An answer that consists of calls is read as these; `tool_calls="strict"` reads the template's form only."""
        said = '```json\n{\n  "name": "get_weather",\n  "arguments": {"city": "Paris"}\n}\n```'
        path = scripted_model(tmp_path / "said.gguf", said, (), template(FAMILIES["Hermes"].template).text)
        options: dict[str, Any] = {"template_args": {"enable_thinking": False}}
        with lp.Model(path) as model, lp.Engine(model, n_ctx=8192, n_seq_max=2) as engine:
            answer = engine.chat(HELLO, GREEDY, tools=TOOLS, **options)
            parts = list(engine.stream_chat(HELLO, GREEDY, tools=TOOLS, **options))
            for completion in (answer, joined(parts)):
                assert [(call.name, call.arguments) for call in completion.tool_calls] == [
                    ("get_weather", PARIS)
                ]
                assert completion.content == ""
            assert answer.finish_reason == parts[-1].finish_reason == "tool_calls"
            assert sum(bool(part.tool_calls) for part in parts) == 1
            texts: list[dict[str, Any]] = [
                {},
                {"tools": TOOLS, "tool_choice": "none"},
                {
                    "tools": TOOLS,
                    "params": lp.SamplingParams(temperature=0, max_tokens=None, regex="(?s:.*)"),
                },
                {"tools": TOOLS[1:]},
            ]
            for more in texts:
                answer = engine.chat(HELLO, **{"params": GREEDY, **options, **more})
                assert (answer.content, answer.tool_calls, answer.finish_reason) == (said, (), "stop")
        with lp.Model(path, tool_calls="strict") as model, lp.Engine(model, n_ctx=8192) as engine:
            answer = engine.chat(HELLO, GREEDY, tools=TOOLS, **options)
            assert (answer.content, answer.tool_calls, answer.finish_reason) == (said, (), "stop")
        with pytest.raises(ValueError, match="'lenient', 'strict'"):
            lp.Model(path, tool_calls="loose")  # type: ignore[arg-type]

    def test_arguments_are_streamed(self, tmp_path: Path) -> None:
        family = FAMILIES["Hermes"]
        with speaking(tmp_path, family.full, (), template(family.template).text) as engine:
            options: dict[str, Any] = {"tools": TOOLS, "template_args": {"enable_thinking": False}}
            (call,) = engine.chat(HELLO, GREEDY, **options).tool_calls
            pieces = [p for part in engine.stream_chat(HELLO, GREEDY, **options) for p in part.tool_calls]
            assert len(pieces) > 5 and "".join(piece.arguments for piece in pieces) == call.arguments_text
            # A stop string within the arguments ends the answer there.
            params = lp.SamplingParams(temperature=0, max_tokens=None, stop='"unit"')
            answer = engine.chat(HELLO, params, **options)
            parts = list(engine.stream_chat(HELLO, params, **options))
            for completion in (answer, joined(parts)):
                (call,) = completion.tool_calls
                assert (call.arguments, call.is_complete) == ({"city": FULL["city"]}, False)
            assert answer.finish_reason == parts[-1].finish_reason == "stop"
            assert json.loads(answer.message["tool_calls"][0]["function"]["arguments"]) == call.arguments

    def test_python_functions_are_tools(self, tmp_path: Path) -> None:
        def get_weather(city: str, days: int = 1) -> str:
            """The weather of a city."""
            return f"{city}: sunny for {days} days"

        family = FAMILIES["Hermes"]
        with speaking(tmp_path, family.paris, (), template(family.template).text) as engine:
            answer = engine.chat(HELLO, GREEDY, tools=[get_weather], template_args={"enable_thinking": False})
            (call,) = answer.tool_calls
            assert get_weather(**call.arguments) == "Paris: sunny for 1 days"
            follow: list[Any] = [
                *HELLO,
                answer.message,
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
            ]
            assert "sunny" in engine.model.render_chat(follow)

    def test_a_forced_call_of_a_model_that_knows_none_is_valid(self, demo: lp.Model) -> None:
        source = template(FAMILIES["Hermes"].template).text
        tools = [
            {
                "type": "function",
                "function": {
                    "name": "now",
                    "parameters": {
                        "type": "object",
                        "properties": {"zone": {"enum": ["UTC", "CET"]}},
                        "required": ["zone"],
                    },
                },
            }
        ]
        with lp.Model(demo.path, chat_template=source) as model, lp.Engine(model, n_ctx=1024) as engine:
            for seed in range(10):
                answer = engine.chat(
                    HELLO,
                    lp.SamplingParams(seed=seed, max_tokens=200),
                    tools=tools,
                    tool_choice="now",
                    template_args={"enable_thinking": False},
                )
                (call,) = answer.tool_calls
                assert call.arguments["zone"] in ("UTC", "CET")

    def test_reasoning_is_separated(self, tmp_path: Path) -> None:
        family = FAMILIES["Hermes"]
        text = "<think>\nIs it far?\n</think>\n\nYes, 40 km."
        with speaking(tmp_path, text, (), template(family.template).text) as engine:
            answer = engine.chat(HELLO, GREEDY)
            assert (answer.reasoning.strip(), answer.content.strip()) == ("Is it far?", "Yes, 40 km.")
            parts = list(engine.stream_chat(HELLO, GREEDY))
            assert joined(parts).reasoning == answer.reasoning
            assert joined(parts).content == answer.content
            assert any(part.reasoning for part in parts[:-1])

    @pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
    @pytest.mark.parametrize(
        "name", ["Hermes", "Llama", "Mistral args", "DeepSeek V3", "Qwen3-Coder", "gpt-oss"]
    )
    def test_the_limit_within_a_call_leaves_a_part_of_it(
        self, tmp_path: Path, name: str, choice: str
    ) -> None:
        with speaking_family(tmp_path, name, FAMILIES[name].full) as engine:
            options: Any = {
                "tools": TOOLS,
                "tool_choice": choice,
                "template_args": {"enable_thinking": False},
            }
            whole = engine.chat(HELLO, GREEDY, **options)
            text = whole.tool_calls[0].arguments_text
            members = [dict(list(FULL.items())[:n]) for n in range(len(FULL) + 1)]
            parts_of_calls = 0
            for n in range(1, whole.n_completion_tokens, 3):
                params = lp.SamplingParams(temperature=0, max_tokens=n)
                answer = engine.chat(HELLO, params, **options)
                streamed = joined(parts := list(engine.stream_chat(HELLO, params, **options)))
                assert answer.finish_reason == parts[-1].finish_reason == "length"
                assert (answer.content, answer.reasoning) == (streamed.content, streamed.reasoning)
                assert [c.arguments_text for c in answer.tool_calls] == [
                    c.arguments_text for c in streamed.tool_calls
                ]
                for call in answer.tool_calls:
                    assert call.name == "get_weather" and text.startswith(call.arguments_text)
                    assert call.arguments in members and call.is_complete == (call.arguments_text == text)
                    parts_of_calls += not call.is_complete
            assert parts_of_calls > 0


class Person(pydantic.BaseModel):
    """Closed by default: nothing but a name and an age."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)
    tags: list[str] = pydantic.Field(max_length=0)


class TestFormats:
    @pytest.mark.parametrize("seed", range(10))
    def test_a_pydantic_model_is_a_format(self, engine: lp.Engine, seed: int) -> None:
        params = lp.SamplingParams(seed=seed, max_tokens=250)
        Person.model_validate_json(engine.chat(HELLO, params, response_format=Person).content)
        text = engine.generate(
            "A person:", lp.SamplingParams(seed=seed, max_tokens=250, json_schema=Person)
        ).text
        assert set(json.loads(text)) == {"name", "age", "tags"}

    def test_a_class_that_allows_more_is_left_open(self) -> None:
        class Open(pydantic.BaseModel):
            model_config = pydantic.ConfigDict(extra="allow")
            name: str

        schema = json.loads(str(lp.SamplingParams(json_schema=Open).json_schema))
        assert schema["additionalProperties"] is True
        closed = json.loads(str(lp.SamplingParams(json_schema=Person).json_schema))
        assert closed["additionalProperties"] is False

    def test_a_class_without_a_schema_is_refused(self) -> None:
        with pytest.raises(TypeError, match="model_json_schema"):
            lp.SamplingParams(json_schema=int)  # type: ignore[arg-type]


class TestEventLoops:
    def test_tools_and_long_conversations_are_read_in_a_thread(self, tmp_path: Path) -> None:
        threads: set[str] = set()

        class Definition(dict[str, Any]):
            """A tool that notes who reads it."""

            def __getitem__(self, key: str) -> Any:
                threads.add(threading.current_thread().name)
                return super().__getitem__(key)

            def get(self, key: str, default: Any = None) -> Any:
                threads.add(threading.current_thread().name)
                return super().get(key, default)

        family = FAMILIES["Hermes"]
        tool = Definition(TOOLS[0].as_openai())

        async def run(engine: lp.Engine) -> None:
            args = {"enable_thinking": False}
            answer = await engine.achat(HELLO, GREEDY, tools=[tool], template_args=args)
            assert [call.name for call in answer.tool_calls] == ["get_weather"]
            async with engine.astream_chat(HELLO, GREEDY, tools=[tool], template_args=args) as stream:
                parts = [part async for part in stream]
                assert stream.n_prompt_tokens == answer.n_prompt_tokens
            assert joined(parts).tool_calls[0].name == "get_weather"

        with speaking(tmp_path, family.full, (), template(family.template).text) as engine:
            asyncio.run(run(engine))
        assert threads and "MainThread" not in threads

    def test_a_stream_that_is_closed_before_it_began_gives_nothing(self, engine: lp.Engine) -> None:
        async def run() -> None:
            for messages in (HELLO, [{"role": "user", "content": "word " * 3000}]):
                stream = engine.astream_chat(messages, GREEDY)
                await stream.aclose()
                assert [part async for part in stream] == []

        asyncio.run(run())

    def test_params_are_checked_and_compiled_ahead(self, engine: lp.Engine) -> None:
        engine.check_params(lp.SamplingParams(regex="a+"))
        with pytest.raises(InvalidRequestError, match="regex"):
            engine.check_params(lp.SamplingParams(regex="("))
        with pytest.raises(TypeError, match="params must be"):
            engine.check_params({})  # type: ignore[arg-type]


class TestRefusals:
    @pytest.mark.parametrize(
        ("messages", "options", "message"),
        [
            ([], {}, "messages is empty"),
            ([{"role": "user"}], {}, r"messages\[0\] has no content"),
            ([{"role": "user", "content": 3}], {}, "content must be text"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "only text is supported"),
            (HELLO, {"tools": TOOLS}, "no place for them"),
            (HELLO, {"tool_choice": "required"}, "tool"),
            (HELLO, {"tools": TOOLS, "tool_choice": "other"}, "other"),
            (HELLO, {"template_args": {"messages": []}}, "template_args"),
            (HELLO, {"params": lp.SamplingParams(regex="a"), "response_format": WEATHER}, "give only one"),
            (["Hello", [{"role": "user"}]], {}, "prompt 1"),
        ],
    )
    def test_bad_input_is_named(
        self, engine: lp.Engine, messages: Any, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            engine.chat(messages, **options)

    @pytest.mark.parametrize("messages", [3, None, b"Hello", {"role": "user"}])
    def test_other_types_are_refused(self, engine: lp.Engine, messages: Any) -> None:
        with pytest.raises((TypeError, InvalidRequestError)):
            engine.chat(messages)

    def test_a_model_without_a_template_says_how_to_pass_one(self, tiny: lp.Model) -> None:
        with (
            lp.Engine(tiny) as engine,
            pytest.raises(
                InvalidRequestError,
                match="has no chat template; give one with chat_template, as text or as a file",
            ),
        ):
            engine.chat("Hello")

    def test_a_closed_engine_says_so(self, demo: lp.Model) -> None:
        with lp.Engine(demo) as engine:
            pass
        with pytest.raises(EngineClosedError):
            engine.chat("Hello")


class TestOddAnswers:
    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_a_token_that_ends_generation_is_no_part_of_a_call(self, tmp_path: Path, choice: str) -> None:
        said = '<function=get_weather>{"city": "Paris"}</function><|eom_id|>'
        source = template("meetkai-functionary-medium-v3.1").text
        with speaking(tmp_path, said, ("<|eom_id|>",), source) as engine:
            params = lp.SamplingParams(temperature=0, max_tokens=120)
            choice_made = engine.chat(HELLO, params, tools=TOOLS, tool_choice=choice).choices[0]
        assert (choice_made.content, choice_made.finish_reason) == ("", "tool_calls")
        assert [call.arguments for call in choice_made.tool_calls] == [{"city": "Paris"}]

    def test_reasoning_that_is_never_closed_may_end(self, tmp_path: Path) -> None:
        source = template("Qwen-Qwen3-0.6B").text
        with speaking(tmp_path, "<think>Hm <tool_call> never closed", (), source) as engine:
            params = lp.SamplingParams(temperature=0, max_tokens=120)
            answers = [engine.chat(HELLO, params, tools=tools).choices[0] for tools in (None, TOOLS)]
        assert [answer.finish_reason for answer in answers] == ["stop", "stop"]
        assert {answer.reasoning for answer in answers} == {"Hm <tool_call> never closed"}

    def test_tools_from_a_generator_serve_every_conversation(self, engine: lp.Engine, tmp_path: Path) -> None:
        with speaking_family(tmp_path, "Hermes", FAMILIES["Hermes"].full) as speaking_engine:
            params = lp.SamplingParams(temperature=0, max_tokens=3)
            answers = speaking_engine.chat([HELLO, HELLO], params, tools=iter(TOOLS))  # type: ignore[call-overload]
        assert len({answer.n_prompt_tokens for answer in answers}) == 1

    def test_reasoning_is_continued(self, tmp_path: Path) -> None:
        source = template("Qwen-Qwen3-0.6B").text
        begun = [*HELLO, {"role": "assistant", "content": "<think>\nHm,"}]
        with speaking(tmp_path, " it is so</think>Fine answer.", (), source) as engine:
            params = lp.SamplingParams(temperature=0, max_tokens=120)
            answer = engine.chat(begun, params, continue_last=True).choices[0]
        assert (answer.reasoning.strip(), answer.content) == ("it is so", "Fine answer.")

    def test_response_formats_of_openai(self, demo: lp.Model) -> None:
        properties = {"a": {"type": "boolean"}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["a"],
            "additionalProperties": False,
        }
        with lp.Engine(demo, n_ctx=512) as engine:
            params = lp.SamplingParams(seed=1, max_tokens=40)
            wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            answers = [engine.chat(HELLO, params, response_format=form).content for form in (schema, wrapped)]
            assert answers[0] == answers[1] and "a" in json.loads(answers[0])
            plain = engine.chat(HELLO, params, response_format={"type": "text"}).content
            assert plain == engine.chat(HELLO, params).content
            with pytest.raises(InvalidRequestError, match="no schema"):
                engine.chat(HELLO, params, response_format={"type": "json_schema"})

    def test_messages_that_contain_themselves(self, engine: lp.Engine) -> None:
        message: dict[str, Any] = {"role": "user", "content": "x"}
        message["me"] = message
        with pytest.raises(InvalidRequestError, match="nested too deeply"):
            engine.chat([message], GREEDY)

    def test_values_that_are_nested_deeply(self) -> None:
        """Each is accepted, or refused with the limit: none exhausts Python's stack."""
        one = lp.SamplingParams(max_tokens=1)
        call = {"id": "1", "type": "function"}
        with (
            lp.Model(lp.demo_model_path(), chat_template=FUNCTION_CALLING) as model,
            lp.Engine(model, n_ctx=8192, n_seq_max=1) as engine,
        ):

            def ask(schema: Any, value: Any, text: str, place: int) -> object:
                parameters = {"type": "object", "properties": {"a": schema}}
                tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
                arguments = {"a": value} if place == 2 else f'{{"a": {text}}}'
                calls = [{**call, "function": {"name": "f", "arguments": arguments}}]
                called: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]
                match place:
                    case 0:
                        return engine.chat(HELLO, one, tools=tools)
                    case 1:
                        return engine.chat(HELLO, one, tools=tools, tool_choice="required")
                    case 2 | 3:
                        return engine.chat(called, one)
                    case 4:
                        return engine.chat([{**HELLO[0], "more": value}], one)
                    case 5:
                        return engine.chat(HELLO, one, template_args={"more": value})
                    case 6:
                        return engine.chat(HELLO, one, response_format=parameters)
                return lp.SamplingParams(json_schema=parameters)

            refused: dict[tuple[int, int], str] = {}
            for n, places in ((100, (1, 6)), (400, range(8)), (10_000, (0, 2, 4, 5, 6, 7))):
                schema: Any = {"type": "string"}
                value: Any = 1
                for _ in range(n):
                    schema, value = {"anyOf": [schema]}, [value]
                for place in places:
                    try:
                        ask(schema, value, f"{'[' * n}1{']' * n}", place)
                    except InvalidRequestError as e:
                        refused[n, place] = str(e)
            assert all("levels of objects and lists" in message for message in refused.values())
            # The arguments of an earlier call may be any text.
            assert [place for n, place in refused if n == 400] == [0, 1, 2, 4, 5, 6, 7]
            assert [place for n, place in refused if n == 100] == [1, 6]
