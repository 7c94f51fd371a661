"""``/v1/messages`` through Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from support.chat_families import FAMILIES, FULL, WEATHER
from support.chat_templates import template
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.server import serve

GREEDY = {"temperature": 0}  # not an argument of the client any more
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[anthropic.Anthropic]:
    with (
        serve(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


def test_an_answer_is_the_engines(client: anthropic.Anthropic, engine: lp.Engine) -> None:
    message: Any = client.messages.create(
        model="demo", max_tokens=40, messages=HELLO, system="Be brief.", extra_body=GREEDY
    )
    conversation = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = engine.chat(conversation, lp.SamplingParams(temperature=0, max_tokens=40))
    (block,) = message.content
    assert block.type == "text" and block.text == expected.content
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    assert message.usage.input_tokens == expected.n_prompt_tokens
    assert message.usage.output_tokens == expected.n_completion_tokens


def test_models_are_listed_with_their_limits(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.created_at.tzinfo is not None and model.lifecycle == "active"
    assert model.max_input_tokens == client.models.retrieve("demo").max_input_tokens == 512
    page = client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, "demo", "demo")


def test_a_stream_gives_the_same_message(client: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": "demo", "max_tokens": 40, "messages": HELLO, "extra_body": GREEDY}
    whole: Any = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final: Any = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, engine: lp.Engine) -> None:
    text = engine.chat(HELLO, lp.SamplingParams(temperature=0, max_tokens=40)).content
    word = text.split()[1]
    options: dict[str, Any] = {"model": "demo", "max_tokens": 40, "messages": HELLO, "extra_body": GREEDY}
    message: Any = client.messages.create(**options, stop_sequences=["never said", word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    with client.messages.stream(**options, stop_sequences=[word]) as stream:
        final: Any = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", word)


def test_a_begun_answer_is_continued(client: anthropic.Anthropic, engine: lp.Engine) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    message: Any = client.messages.create(model="demo", max_tokens=8, messages=begun, extra_body=GREEDY)
    prompt = engine.model.render_chat(HELLO) + "Once upon"
    expected = engine.generate(
        engine.model.tokenize(prompt, parse_special=True), lp.SamplingParams(temperature=0, max_tokens=8)
    )
    assert message.content[0].text == expected.text


def test_tokens_are_counted(client: anthropic.Anthropic, demo: lp.Model) -> None:
    counted = client.messages.count_tokens(model="demo", messages=HELLO)
    assert counted.input_tokens == len(demo.tokenize_chat(HELLO))


def test_a_begun_answer_is_counted_as_it_is_continued(client: anthropic.Anthropic) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once up"}]
    counted = client.messages.count_tokens(model="demo", messages=messages)
    usage = client.messages.create(model="demo", max_tokens=1, messages=messages).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_what_a_document_says_about_itself_is_read(client: anthropic.Anthropic) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "a story"}
    about = {"title": "Fox", "context": "a letter", "citations": {"enabled": True}}
    result = {
        "type": "search_result",
        "title": "Cow",
        "source": "farm",
        "content": [{"type": "text", "text": "moo"}],
    }
    blocks: dict[str, dict[str, Any]] = {
        "Fox\na letter\na story\n": {"type": "document", "source": source, **about},
        "Cow\nfarm\nmoo\n": result,
    }
    for text, block in blocks.items():
        messages: Any = [{"role": "user", "content": [block]}]
        raw = client.messages.with_raw_response.count_tokens(model="demo", messages=messages)
        plain: Any = [{"role": "user", "content": text}]
        assert raw.parse() == client.messages.count_tokens(model="demo", messages=plain)
        unused = raw.headers.get("x-llamapipe-unused")
        assert unused == ("messages.content.citations" if "citations" in block else None)


def test_tools_are_called_and_their_results_read(tmp_path: Path) -> None:
    family = FAMILIES["Hermes"]
    source = template(family.template).text
    said = "<think>\nA tool.\n</think>\n\n" + family.full
    with (
        lp.Model(scripted_model(tmp_path / "said.gguf", said, (), source)) as model,
        lp.Engine(model, n_ctx=4096) as engine,
        serve(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        options: dict[str, Any] = {
            "model": "said",
            "max_tokens": 400,
            "messages": HELLO,
            "extra_body": GREEDY,
        }
        choices: list[Any] = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}]
        for choice in choices:
            whole: Any = client.messages.create(**options, tools=[TOOL], tool_choice=choice)
            with client.messages.stream(**options, tools=[TOOL], tool_choice=choice) as stream:
                streamed: Any = stream.get_final_message()
            message: Any
            for message in (whole, streamed):
                thinking, call = message.content
                assert thinking.type == "thinking" and thinking.thinking.strip() == "A tool."
                assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", FULL)
                assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "sunny"}
        follow: Any = [
            *HELLO,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        longer = client.messages.count_tokens(model="said", messages=follow).input_tokens
        assert longer > client.messages.count_tokens(model="said", messages=HELLO).input_tokens + 30


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_tool_runner_sends_the_conversation_itself(tmp_path: Path, stream: bool) -> None:
    family = FAMILIES["Hermes"]
    source = template(family.template).text
    called: list[dict[str, Any]] = []
    schema: Any = WEATHER

    @anthropic.beta_tool(name="get_weather", description="The weather.", input_schema=schema)
    def get_weather(**arguments: Any) -> str:
        called.append(arguments)
        return "sunny"

    with (
        lp.Model(scripted_model(tmp_path / "said.gguf", family.full, (), source)) as model,
        lp.Engine(model, n_ctx=4096) as engine,
        serve(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        runner: Any = client.beta.messages.tool_runner(
            model="said",
            max_tokens=400,
            messages=HELLO,
            tools=[get_weather],
            max_iterations=2,
            stream=stream,
            extra_body=GREEDY,
        )
        replies = [reply.get_final_message() if stream else reply for reply in runner]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "tool_use"]
    assert called[0] == FULL


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}]
)
def test_a_thread_is_refused_in_words_for_programs(client: anthropic.Anthropic, thread: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="whole conversation") as caught:
        client.messages.create(
            model="demo", max_tokens=4, messages=HELLO, stream=True, extra_body={"thread": thread}
        )
    assert caught.value.error_code == "thread_unsupported_request"
    assert caught.value.body["error"]["details"]["unsupported"] == ["thread"]  # type: ignore[index]


def test_what_only_an_answer_depends_on_is_ignored_by_the_count(client: anthropic.Anthropic) -> None:
    expected = client.messages.count_tokens(model="demo", messages=HELLO).input_tokens
    answer = client.messages.with_raw_response.count_tokens(
        model="demo", messages=HELLO, extra_body={"max_tokens": 100, "temperature": 0.5, "stream": True}
    )
    assert answer.parse().input_tokens == expected
    assert answer.headers["x-llamapipe-unused"] == "max_tokens, stream, temperature"


def test_fields_of_tools_without_effect_are_named(client: anthropic.Anthropic) -> None:
    tool = {"name": "get_weather", "input_schema": {"type": "object"}, "defer_loading": True}
    cached = {"name": "get_time", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
    answer = client.messages.with_raw_response.count_tokens(
        model="demo", messages=HELLO, extra_body={"tools": [tool, tool | cached]}
    )
    assert answer.headers["x-llamapipe-unused"] == "tools.defer_loading, tools.cache_control"


@pytest.mark.parametrize("arguments", [None, [], "x", {"city": "Par"}, '{"city": "Par'])
def test_the_input_of_a_call_may_be_anything(client: anthropic.Anthropic, arguments: Any) -> None:
    call = {"type": "tool_use", "id": "1", "name": "get_weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
    chat: Any = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(model="demo", max_tokens=4, messages=chat).usage.output_tokens


def test_a_prompt_that_is_too_long_is_told_as_agents_read_it(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d{3,} tokens > 512 maximum"):
        client.messages.create(
            model="demo", max_tokens=4, messages=[{"role": "user", "content": "Hello. " * 900}]
        )


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": "x"},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a"}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user"}]},
        {"tools": [{"type": "web_serch_20250305", "name": "web_search"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
        {"tools": [TOOL]},
        {"tools": [{"name": "get_weather", "parameters": {"type": "object"}}]},
        {"tool_choice": {"type": "any"}},
        {"temperature": -1},
        {"unknown": 1},
    ],
)
def test_what_cannot_be_done_is_refused_in_the_apis_shape(
    client: anthropic.Anthropic, change: dict[str, Any]
) -> None:
    body = {"model": "demo", "max_tokens": 4, "messages": HELLO, **change}
    answer = httpx.post(f"{str(client.base_url).rstrip(chr(47))}/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_no_word_of_another_api_is_proposed_for_a_tool(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "nope"}
    with pytest.raises(anthropic.BadRequestError, match="tool_choice names 'nope'") as refused:
        client.messages.create(model="demo", max_tokens=4, messages=HELLO, tools=[TOOL], tool_choice=choice)
    assert "did you mean" not in str(refused.value)


def test_an_error_about_an_image_does_not_name_another_apis_type(client: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0 is an image; only text is"):
        client.messages.create(model="demo", max_tokens=4, messages=[{"role": "user", "content": [image]}])


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'demo'"):
        client.messages.create(model="claude", max_tokens=4, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError, match="no-such") as caught:
        client.models.retrieve("no-such")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
