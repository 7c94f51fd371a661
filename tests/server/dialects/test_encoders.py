"""What each API's clients read, from parts of an answer: no engine computes them and no server sends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

import llamapipe as lp
from llamapipe.chat.results import ToolCall, ToolCallDelta
from llamapipe.results import ChatChoice, ChatCompletion, ChatDelta, Delta, Timings, TokenLogprob
from llamapipe.server._times import RequestTimes
from llamapipe.server._tools import ClientName, Tools, tools_of
from llamapipe.server.dialects.anthropic import AnthropicEncoder
from llamapipe.server.dialects.chat import ChatEncoder
from llamapipe.server.dialects.completions import CompletionEncoder, Prompts, Shown
from llamapipe.server.dialects.encoder import Counts, Encoder
from llamapipe.server.dialects.llama_server import CUT, Form, LlamaServerEncoder
from llamapipe.server.dialects.mistral import FimEncoder
from llamapipe.server.dialects.ollama import OllamaEncoder
from llamapipe.server.dialects.openai_stream import DONE, Format, system_fingerprint
from llamapipe.server.dialects.responses import ResponsesEncoder
from llamapipe.streams import PromptProgress

CALL = (
    ToolCallDelta(0, "call_1", "add", '{"a":'),
    ToolCallDelta(0, None, None, " 1}"),
)


def chat_part(
    content: str = "",
    reasoning: str = "",
    calls: Sequence[ToolCallDelta] = (),
    reason: Any = None,
    stop: str | None = None,
    logprobs: Any = None,
) -> ChatDelta:
    return ChatDelta(content, reasoning, tuple(calls), (7,), logprobs, reason, stop)


def text_part(text: str, reason: Any = None) -> Delta:
    return Delta(text, (7,), None, reason, None)


def sent(encoder: Encoder[Any], parts: Sequence[Any], index: int = 0, n_cached: int = 2) -> bytes:
    """What a stream of one choice has: a token for each part, after a prompt of five."""
    data = encoder.begin(index, Counts(5, n_cached, 1), [1, 2, 3, 4, 5])
    for n, part in enumerate(parts, 1):
        data += encoder.part(index, part, Counts(5, n_cached, n))
    return data + encoder.end(Counts(5, n_cached, len(parts), 4, 3), [1, 2, 3, 4, 5])


def events(data: bytes) -> list[Any]:
    """The values of server-sent events, without the last one that says that it is the last."""
    blocks = data.removesuffix(DONE).decode().split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks if block]


def chat(demo: lp.Model, tools: Tools | None = None, reasoning: bool = True, **form: bool) -> ChatEncoder:
    known = tools or tools_of(None, None, is_flat=False)
    return ChatEncoder("chatcmpl-1", "m", 9, Format(**form), demo.vocab, RequestTimes(), known, reasoning)


class TestChat:
    def test_a_stream_begins_with_the_role_and_ends_with_a_reason(self, demo: lp.Model) -> None:
        data = sent(chat(demo), [chat_part("Hel"), chat_part("lo", reason="stop")])
        assert data.endswith(DONE)
        first, middle, last = events(data)
        assert {key: first[key] for key in ("id", "object", "created", "model")} == {
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 9, "model": "m"
        }  # fmt: skip
        assert {event["system_fingerprint"] for event in (first, middle, last)} == {system_fingerprint()}
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert middle["choices"] == [
            {"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}
        ]
        assert last["choices"][0]["finish_reason"] == "stop" and last["timings"]["predicted_n"] == 2
        assert "usage" not in last

    def test_usage_ends_the_stream(self, demo: lp.Model) -> None:
        received = events(sent(chat(demo, with_usage=True, predicted=True), [chat_part("a", reason="stop")]))
        assert ["usage" in event for event in received] == [False, False, True]
        assert received[-1]["choices"] == []
        assert received[-1]["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 1,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
        }

    def test_each_event_has_the_usage_so_far(self, demo: lp.Model) -> None:
        parts = [chat_part("a"), chat_part("b", reason="stop")]
        received = events(sent(chat(demo, with_usage=True, continuous_usage=True), parts))
        assert [event["usage"]["completion_tokens"] for event in received] == [1, 1, 2, 2]

    def test_reasoning_and_calls(self, demo: lp.Model) -> None:
        parts = [chat_part(reasoning="hm"), chat_part(calls=CALL), chat_part(reason="tool_calls")]
        _, thought, called, _ = events(sent(chat(demo), parts))
        assert thought["choices"][0]["delta"] == {"reasoning_content": "hm"}
        assert called["choices"][0]["delta"]["tool_calls"] == [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":'}},
            {"index": 0, "function": {"arguments": " 1}"}},
        ]  # fmt: skip
        hidden = events(sent(chat(demo, reasoning=False), parts))
        assert hidden[1]["choices"][0]["delta"] == {}

    def test_the_input_of_a_custom_tool_comes_whole(self, demo: lp.Model) -> None:
        tools = Tools([], "auto", {"run": ClientName("run", None, is_custom=True)}, (), {})
        parts = [
            chat_part(calls=[ToolCallDelta(0, "call_1", "run", '{"input":')]),
            chat_part(calls=[ToolCallDelta(0, None, None, '"ls"}')]),
            chat_part(reason="tool_calls"),
        ]
        received = events(sent(chat(demo, tools), parts))
        calls = [event["choices"][0]["delta"].get("tool_calls") for event in received]
        custom = {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
        assert calls == [None, None, None, [custom]]

    def test_a_tool_of_a_namespace_has_the_same_name_in_pieces_and_whole(self, demo: lp.Model) -> None:
        """The model's: the next turn gives it back, and the API has no namespaces."""
        tools = Tools([], "auto", {"shell__run": ClientName("run", "shell", is_custom=True)}, (), {})
        arguments = '{"input": "ls"}'
        parts = [chat_part(calls=[ToolCallDelta(0, "call_1", "shell__run", arguments)], reason="tool_calls")]
        last = events(sent(chat(demo, tools), parts))[-1]["choices"][0]["delta"]["tool_calls"][0]
        call = ToolCall.of("call_1", "shell__run", arguments)
        done = ChatCompletion(
            (ChatChoice(0, "", "", (call,), "tool_calls", 1, [7]),), 5, 2, Timings(None, 0.0)
        )
        whole = chat(demo, tools).whole(done, Counts(5, 2, 1))["choices"][0]["message"]["tool_calls"][0]
        assert whole == {"id": "call_1", "type": "custom", "custom": {"name": "shell__run", "input": "ls"}}
        assert last == {"index": 0, **whole}

    def test_token_ids_and_logprobs(self, demo: lp.Model) -> None:
        entry = TokenLogprob(7, -0.5, (), demo.vocab.piece(7))
        encoder = chat(demo, token_ids=True, tokens_as_ids=True)
        assert encoder.prompt_at == "begin"
        first, last = events(sent(encoder, [chat_part("a", reason="stop", logprobs=(entry,))]))
        assert first["choices"][0]["prompt_token_ids"] == [1, 2, 3, 4, 5]
        assert last["choices"][0]["token_ids"] == [7]
        (written,) = last["choices"][0]["logprobs"]["content"]
        assert (written["token"], written["logprob"]) == ("token_id:7", -0.5)


class TestCompletions:
    def encoder(self, demo: lp.Model, shown: Shown = Shown(), **form: bool) -> CompletionEncoder:  # noqa: B008
        prompts = Prompts(["Once"], [demo.tokenize("Once")], 2)
        return CompletionEncoder("cmpl-1", "m", 9, Format(**form), shown, prompts, demo.vocab, RequestTimes())

    def test_an_incomplete_character_has_no_event(self, demo: lp.Model) -> None:
        received = events(sent(self.encoder(demo), [text_part(""), text_part("é", "stop")], index=1))
        assert [event["choices"][0] for event in received] == [
            {"index": 1, "text": "é", "logprobs": None, "finish_reason": "stop"}
        ]

    def test_an_answer_without_tokens_is_empty(self, demo: lp.Model) -> None:
        (only,) = events(sent(self.encoder(demo, Shown(is_empty=True)), [text_part("x", "stop")]))
        assert only["choices"][0]["text"] == "" and only["choices"][0]["finish_reason"] == "length"

    def test_the_prompt_comes_first(self, demo: lp.Model) -> None:
        encoder = self.encoder(demo, Shown(echo=True, logprobs=0))
        tokens = demo.tokenize("Once")
        scores = [TokenLogprob(token, -1.0, (), demo.vocab.piece(token)) for token in tokens[1:]]
        data = encoder.echo(0, scores) + encoder.part(
            0, Delta(" a", (7,), (TokenLogprob(7, -2.0, (), b" a"),), "stop", None), Counts(5)
        )
        prompt, text = (event["choices"][0] for event in events(data))
        assert prompt["text"] == "Once" and text["text"] == " a"
        assert text["logprobs"]["text_offset"] == [len("Once")]

    def test_padding_hides_the_length(self, demo: lp.Model) -> None:
        lengths = {
            len(self.encoder(demo, padded=True).part(0, text_part(text), Counts(5)))
            for text in ("a", "abc", "abcdefgh")
        }
        assert len(lengths) == 1


class TestAnthropic:
    def test_one_block_is_open_at_a_time(self) -> None:
        parts = [
            chat_part(reasoning="hm"),
            chat_part("Hi"),
            chat_part(" you"),
            chat_part(calls=CALL),
            chat_part(reason="tool_calls"),
        ]
        received = events(sent(AnthropicEncoder("msg_1", "m", RequestTimes()), parts))
        assert [(event["type"], event.get("index")) for event in received] == [
            ("message_start", None),
            ("content_block_start", 0),
            ("content_block_delta", 0),
            ("content_block_stop", 0),
            ("content_block_start", 1),
            ("content_block_delta", 1),
            ("content_block_delta", 1),
            ("content_block_stop", 1),
            ("content_block_start", 2),
            ("content_block_delta", 2),
            ("content_block_delta", 2),
            ("content_block_stop", 2),
            ("message_delta", None),
            ("message_stop", None),
        ]
        usage = received[0]["message"]["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 0)
        assert received[-2]["delta"]["stop_reason"] == "tool_use" and received[-2]["usage"] == {
            "output_tokens": 5
        }
        assert received[-1]["timings"]["predicted_n"] == 5

    def test_events_are_named(self) -> None:
        data = sent(AnthropicEncoder("msg_1", "m", RequestTimes()), [chat_part(reason="stop", stop="END")])
        names = [
            row.removeprefix("event: ") for row in data.decode().splitlines() if row.startswith("event: ")
        ]
        assert names == [event["type"] for event in events(data)]
        assert events(data)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}

    def test_the_whole_answer(self) -> None:
        call = ToolCall.of("call_1", "add", '{"a": 1}')
        choice = ChatChoice(0, "Hi", "hm", (call,), "tool_calls", 1, [7])
        answer = AnthropicEncoder("msg_1", "m", RequestTimes()).whole(choice, Counts(5, 2, 3))
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
        assert answer["content"][2]["input"] == {"a": 1} and answer["usage"]["output_tokens"] == 3


class TestOllama:
    def encoder(self, demo: lp.Model, **options: bool) -> OllamaEncoder:
        return OllamaEncoder("m", options.pop("is_chat", True), demo.vocab, RequestTimes(), **options)

    def lines(self, data: bytes) -> list[Any]:
        return [json.loads(row) for row in data.splitlines()]

    def test_a_line_for_each_part_and_one_with_the_counts(self, demo: lp.Model) -> None:
        parts = [chat_part(reasoning="hm"), chat_part("Hi"), chat_part("", reason="length")]
        thought, text, last = self.lines(sent(self.encoder(demo), parts))
        assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
        assert text["message"]["content"] == "Hi" and not text["done"]
        assert last["done"] and last["done_reason"] == "length" and "context" not in last
        assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)

    def test_calls_come_whole(self, demo: lp.Model) -> None:
        parts = [chat_part(calls=CALL[:1]), chat_part(calls=CALL[1:]), chat_part(reason="tool_calls")]
        called, last = self.lines(sent(self.encoder(demo), parts))
        function = {"index": 0, "name": "add", "arguments": {"a": 1}}
        assert called["message"]["tool_calls"] == [{"id": "call_1", "function": function}]
        assert last["done_reason"] == "stop"

    @pytest.mark.parametrize("is_chat", [True, False])
    def test_one_object_has_what_the_lines_have(self, demo: lp.Model, is_chat: bool) -> None:
        parts = [chat_part(reasoning="hm"), chat_part("Hi"), chat_part(" you", reason="stop")]
        whole = json.loads(sent(self.encoder(demo, is_chat=is_chat, is_whole=True), parts))
        message = whole["message"] if is_chat else whole
        assert message["content" if is_chat else "response"] == "Hi you" and message["thinking"] == "hm"
        assert whole["done"] and whole["eval_count"] == 3

    def test_texts_and_the_context(self, demo: lp.Model) -> None:
        encoder = self.encoder(demo, is_chat=False, with_context=True)
        assert encoder.prompt_at == "end"
        text, last = self.lines(sent(encoder, [text_part("a"), text_part("", "stop")]))
        assert text["response"] == "a" and last["context"] == [1, 2, 3, 4, 5, 7, 7]

    def test_an_answer_without_tokens_is_empty(self, demo: lp.Model) -> None:
        (last,) = self.lines(sent(self.encoder(demo, is_empty=True), [chat_part("x", reason="stop")]))
        assert last["eval_count"] == 0 and last["done_reason"] == "length"


class Clock:
    """A second passes with each look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Running(NamedTuple):
    prompt_progress: PromptProgress | None = PromptProgress(5, 2, 5, 0.25)
    n_cached_tokens: int = 2


class TestLlamaServer:
    def encoder(self, demo: lp.Model, n: int = 1, max_tokens: int = 4, **form: Any) -> LlamaServerEncoder:
        params = lp.SamplingParams(max_tokens=max_tokens)
        prompts, texts = [[1, 2, 3, 4, 5]] * n, ["Once"] * n
        running = [Running()] * n
        return LlamaServerEncoder("m", Form(**form), params, prompts, texts, demo.vocab, running, Clock())

    def test_the_last_event_has_everything_but_the_text(self, demo: lp.Model) -> None:
        data = sent(
            self.encoder(demo, is_stream=True), [text_part("a"), text_part("b\n"), text_part("", "stop")]
        )
        first, second, third, last = events(data)
        assert [event["content"] for event in (first, second, third, last)] == ["a", "b\n", "", ""]
        assert [event["tokens_predicted"] for event in (first, second, third)] == [1, 2, 3]
        assert last["stop"] and last["stop_type"] == "eos" and last["has_new_line"]
        assert last["prompt"] == "Once" and last["generation_settings"]["n_predict"] == 4
        times = last["timings"]
        assert (times["cache_n"], times["prompt_n"], times["prompt_ms"]) == (2, 3, 250)
        assert times["predicted_ms"] == 2000 and not last["truncated"]  # from the first token to the last
        assert times["queue_ms"] == 750  # a second until the first token, of which the prompt took 250 ms

    @pytest.mark.parametrize(
        ("reason", "stop", "n_max", "expected"),
        [
            ("stop", None, 4, ("eos", "", False)),
            ("stop", "END", 4, ("word", "END", False)),
            ("length", None, 1, ("limit", "", False)),
            ("length", None, 4, ("limit", "", True)),  # the context is full
            (CUT, None, 4, ("limit", "", False)),
        ],
    )
    def test_why_a_text_ended(
        self, demo: lp.Model, reason: Any, stop: str | None, n_max: int, expected: tuple[str, str, bool]
    ) -> None:
        part = Delta("a", (7,), None, reason, stop)
        whole = json.loads(sent(self.encoder(demo, max_tokens=n_max), [part]))
        assert (whole["stop_type"], whole["stopping_word"], whole["truncated"]) == expected

    def test_several_choices_are_a_list(self, demo: lp.Model) -> None:
        encoder = self.encoder(demo, n=2, with_tokens=True)
        data = b""
        for index in (1, 0):
            data += encoder.begin(index, Counts(10), ()) + encoder.part(
                index, text_part("ab"[index], "stop"), Counts(10)
            )
        assert data == b""
        answers = json.loads(encoder.end(Counts(10), ()))
        assert [(answer["index"], answer["content"], answer["tokens"]) for answer in answers] == [
            (0, "a", [7]),
            (1, "b", [7]),
        ]

    def test_only_the_wanted_fields(self, demo: lp.Model) -> None:
        wanted = ("content", "timings/cache_n", "no/such")
        assert json.loads(sent(self.encoder(demo, wanted=wanted), [text_part("a", "stop")])) == {
            "content": "a",
            "timings/cache_n": 2,
        }

    def test_progress_is_told_once(self, demo: lp.Model) -> None:
        encoder = self.encoder(demo, is_stream=True, with_progress=True)
        told = [event["prompt_progress"]["processed"] for event in events(encoder.news())]
        assert told == [2, 5] and encoder.news() == b""


def test_filling_in_tells_the_role_once_and_the_usage_at_the_end() -> None:
    parts = [text_part(""), text_part("a"), text_part("b"), text_part("", "stop")]
    first, second, last = events(sent(FimEncoder("fim-1", "m", 9), parts))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert second["choices"][0]["delta"] == {"content": "b"} and "usage" not in second
    assert last["usage"]["completion_tokens"] == 4 and last["choices"][0]["finish_reason"] == "stop"


def not_ours(_: ClientName) -> None:
    """The item of a call that the client runs."""


class TestResponses:
    def encoder(self, demo: lp.Model, tools: Tools | None = None, **options: Any) -> ResponsesEncoder:
        known = tools or tools_of(None, None, is_flat=True)
        return ResponsesEncoder(
            "1",
            {"model": "m"},
            demo.vocab,
            known,
            RequestTimes(),
            options.pop("item_of", not_ours),
            **options,
        )

    def told(self, data: bytes) -> list[tuple[str, int | None]]:
        return [
            (event["type"].removeprefix("response."), event.get("output_index")) for event in events(data)
        ]

    def test_one_item_is_open_at_a_time(self, demo: lp.Model) -> None:
        parts = [
            chat_part(reasoning="hm"),
            chat_part("Hi"),
            chat_part(calls=CALL),
            chat_part(reason="tool_calls"),
        ]
        encoder = self.encoder(demo)
        data = sent(encoder, parts) + encoder.last(encoder.response(5, 2))
        assert self.told(data) == [
            ("created", None),
            ("in_progress", None),
            ("output_item.added", 0),
            ("content_part.added", 0),
            ("reasoning_text.delta", 0),
            ("reasoning_text.done", 0),
            ("content_part.done", 0),
            ("output_item.done", 0),
            ("output_item.added", 1),
            ("content_part.added", 1),
            ("output_text.delta", 1),
            ("output_text.done", 1),
            ("content_part.done", 1),
            ("output_item.done", 1),
            ("output_item.added", 2),
            ("function_call_arguments.delta", 2),
            ("function_call_arguments.delta", 2),
            ("function_call_arguments.done", 2),
            ("output_item.done", 2),
            ("completed", None),
        ]
        received = events(data)
        assert [event["sequence_number"] for event in received] == list(range(len(received)))
        assert received[0]["response"]["status"] == "in_progress" and received[0]["response"]["usage"] is None
        thought, message, call = received[-1]["response"]["output"]
        assert (thought["id"], message["id"], call["id"]) == ("rs_1_0", "msg_1_1", "fc_1_2")
        assert {thought["status"], message["status"], call["status"]} == {"completed"}
        assert message["content"] == [
            {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
        ]
        assert call["call_id"] == "call_1" and call["arguments"] == '{"a": 1}'
        usage = received[-1]["response"]["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 2 and usage["total_tokens"] == 5 + len(parts)
        assert usage["output_tokens_details"] == {"reasoning_tokens": 1}
        assert encoder.needs_client

    @pytest.mark.parametrize("reason", ["length", "timeout"])
    def test_a_text_that_was_cut(self, demo: lp.Model, reason: str) -> None:
        encoder = self.encoder(demo)
        assert (
            events(sent(encoder, [chat_part("Hi"), chat_part(reason=reason)]))[-1]["item"]["status"]
            == "incomplete"
        )
        response = encoder.response()
        assert response["status"] == "incomplete" and response["incomplete_details"] == {
            "reason": "max_output_tokens"
        }

    def test_an_error_is_the_end_of_the_response(self, demo: lp.Model) -> None:
        encoder = self.encoder(demo)
        encoder.error = {"code": "timeout", "message": "too slow"}
        (only,) = events(encoder.last(encoder.response()))
        assert only["type"] == "response.failed" and only["response"]["error"]["code"] == "timeout"

    def test_log_probabilities_grow_with_the_text(self, demo: lp.Model) -> None:
        entry = TokenLogprob(7, -0.5, (), demo.vocab.piece(7))
        encoder = self.encoder(demo)
        sent(encoder, [chat_part("a", logprobs=(entry,)), chat_part("b", logprobs=(entry,), reason="stop")])
        (part,) = encoder.output[0]["content"]
        assert part["text"] == "ab" and [entry["logprob"] for entry in part["logprobs"]] == [-0.5, -0.5]

    def test_the_input_of_a_custom_tool_comes_whole(self, demo: lp.Model) -> None:
        tools = Tools([], "auto", {"run": ClientName("run", "shell", is_custom=True)}, (), {})
        parts = [
            chat_part(calls=[ToolCallDelta(0, "call_1", "run", '{"input":')]),
            chat_part(calls=[ToolCallDelta(0, None, None, '"ls"}')]),
            chat_part(reason="tool_calls"),
        ]
        received = events(sent(self.encoder(demo, tools), parts))
        assert [event["type"].partition(".")[2] for event in received[2:]] == [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
        assert received[-1]["item"]["input"] == "ls" and received[-1]["item"]["namespace"] == "shell"

    def test_the_server_runs_a_call_and_the_model_continues(self, demo: lp.Model) -> None:
        def item_of(known: ClientName) -> dict[str, Any]:
            return {"type": "mcp_call", "name": known.name, "arguments": "", "output": None, "error": None}

        encoder = self.encoder(demo, item_of=item_of)
        data = sent(encoder, [chat_part(calls=CALL), chat_part(reason="tool_calls")])
        ((place, item),) = encoder.take_calls()
        assert item["arguments"] == '{"a": 1}' and not encoder.take_calls() and not encoder.needs_client
        item |= {"output": "1", "status": "completed"}
        data += encoder.end_call(place, item) + sent(encoder, [chat_part("One."), chat_part(reason="stop")])
        assert self.told(data)[2:] == [
            ("output_item.added", 0),
            ("mcp_call.in_progress", 0),
            ("mcp_call_arguments.delta", 0),
            ("mcp_call_arguments.delta", 0),
            ("mcp_call_arguments.done", 0),
            ("mcp_call.completed", 0),
            ("output_item.done", 0),
            ("output_item.added", 1),
            ("content_part.added", 1),
            ("output_text.delta", 1),
            ("output_text.done", 1),
            ("content_part.done", 1),
            ("output_item.done", 1),
        ]
        assert encoder.status == "completed" and encoder.n_output == 4

    def test_a_whole_answer_has_no_events(self, demo: lp.Model) -> None:
        encoder = self.encoder(demo, is_stream=False)
        assert sent(encoder, [chat_part("Hi", reason="stop")]) == b""
        assert encoder.response()["output"][0]["content"][0]["text"] == "Hi"
