"""``t_max_predict_ms``: the first line that is complete after a time ends a text, on every route that has the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from itertools import count
from typing import Any

import httpx
import pytest
from support.served import http_client

import llamapipe as lp
from llamapipe.chat.results import ToolCallDelta
from llamapipe.results import ChatDelta, Delta
from llamapipe.server.requests import job
from llamapipe.server.requests.time_limit import chat_choice, text_choice, until_line

LINES = 'root ::= ([a-z] "\\n")*'
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = {"max_tokens": 60, "grammar": LINES, "temperature": 0}


@pytest.fixture(scope="module")
def client(demo: lp.Model) -> Iterator[httpx.Client]:
    with (
        lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine,
        http_client(engine) as http,
    ):
        yield http


def told(texts: list[str], most_ms: int, each_s: float = 0.01) -> list[Delta]:
    """What is left of a text whose parts come one after another."""

    async def parts() -> AsyncGenerator[Delta | None, None]:
        yield None
        for i, text in enumerate(texts):
            yield Delta(text, (i,), None, "stop" if i == len(texts) - 1 else None, None)

    async def read() -> list[Delta]:
        times = iter(range(len(texts)))
        limited = until_line(parts(), most_ms, clock=lambda: next(times) * each_s)
        return [part async for part in limited if part is not None]

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("text", "most_ms", "left", "reason"),
    [
        ("ab\ncd\nef\ngh\n", 50, "ab\ncd\nef\n", "length"),
        ("abcdefgh", 5, "abcdefgh", "stop"),  # no line
        ("a\nb\n", 50, "a\nb\n", "stop"),
        ("abc\n", 5, "abc\n", "stop"),  # it has ended anyway
    ],
)
def test_time_ends_a_text_with_a_line(text: str, most_ms: int, left: str, reason: str) -> None:
    parts = told(list(text), most_ms)
    assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (left, reason)


def test_an_answer_is_put_together_from_parts() -> None:
    choice = text_choice(1, [Delta("a", (5,), None, None), Delta("b\n", (6, 7), None, "length")])
    assert (choice.index, choice.text, choice.token_ids, choice.finish_reason) == (
        1,
        "ab\n",
        [5, 6, 7],
        "length",
    )
    assert choice.logprobs is None
    call = (ToolCallDelta(0, "call_1", "add", '{"a":'), ToolCallDelta(0, None, None, " 1}"))
    answer = chat_choice(
        0,
        [
            ChatDelta("", "hm", (), (1,), (), None),
            ChatDelta("Hi", "", call[:1], (2,), (), None),
            ChatDelta("", "", call[1:], (3,), (), "tool_calls"),
        ],
    )
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Hi", "hm", "tool_calls")
    assert (
        answer.tool_calls[0].arguments == {"a": 1} and answer.token_ids == [1, 2, 3] and answer.logprobs == []
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "Once"}), ("/v1/chat/completions", CHAT)]
)
def test_a_time_that_is_never_over_changes_nothing(
    client: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Of two choices, too: those that are put together are those that the engine makes."""

    def choices(**more: Any) -> list[tuple[str, str]]:
        asked = {
            **body,
            **LONG,
            "max_tokens": 12,
            "n": 2,
            "seed": 7,
            **more,
            "stream": stream,
        }
        answer = client.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        if not stream:
            return [_text(choice) for choice in answer.json()["choices"]]
        results = [("", "")] * 2
        for row in answer.text.splitlines():
            if row.startswith("data: {"):
                for choice in json.loads(row[6:])["choices"]:
                    text, reason = _text(choice)
                    results[choice["index"]] = results[choice["index"]][0] + text, reason
        return results

    assert choices(t_max_predict_ms=10**9) == choices() == choices(t_max_predict_ms=-1)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "Once"}), ("/v1/chat/completions", CHAT)]
)
def test_a_request_ends_there(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Each look at the clock is a second later: the second part is too late."""
    monkeypatch.setattr(job, "until_line", partial(until_line, clock=count().__next__))
    answer = client.post(path, json={**body, **LONG, "t_max_predict_ms": 500}).json()
    text, reason = _text(answer["choices"][0])
    assert text.endswith("\n") and reason == "length" and 0 < answer["usage"]["completion_tokens"] < 10
    assert answer["timings"]["predicted_n"] == answer["usage"]["completion_tokens"]


def _text(choice: dict[str, Any]) -> tuple[str, str]:
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return message.get("content") or "", choice["finish_reason"] or ""


def test_what_is_refused(client: httpx.Client) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        error = client.post(path, json={**body, "t_max_predict_ms": -2}).json()["error"]
        assert error["param"] == "t_max_predict_ms" and "from -1 to" in error["message"]
    asked = {"prompt": "a", "best_of": 2, "n": 1, "t_max_predict_ms": 5}
    assert client.post("/v1/completions", json=asked).json()["error"]["param"] == "best_of"
