"""Lists of thousands of prompts: they are submitted in portions, and behave as short lists do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.control import Worker, held, until
from support.inside import loop_of, thread_of

import llamapipe as lp
from llamapipe._engine.calls.prompts import PORTION
from llamapipe.errors import EngineClosedError, InvalidRequestError, QueueFullError

N = 5 * PORTION + 7
ONE = lp.SamplingParams(max_tokens=1, temperature=0)
MakeEngine = Callable[..., lp.Engine]


def prompts(n: int = N) -> list[list[int]]:
    return [[3 + i % 500] for i in range(n)]


@pytest.fixture
def engine(make_engine: MakeEngine) -> lp.Engine:
    return make_engine(n_ctx=32, n_seq_max=16, prefix_cache=False)


@pytest.fixture(params=["threads", "asyncio"])
def generate(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``engine.generate``, or ``agenerate`` in an event loop of its own."""
    if request.param == "threads":
        return lambda engine, *args, **options: engine.generate(*args, **options)
    return lambda engine, *args, **options: asyncio.run(engine.agenerate(*args, **options))


@pytest.fixture
def queue_lengths(engine: lp.Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests the scheduler had after each command that added some."""
    lengths: list[int] = []
    loop = loop_of(engine)
    add = loop.add

    def noting(*requests: object) -> None:
        add(*requests)  # type: ignore[arg-type]
        lengths.append(len(loop.open))

    monkeypatch.setattr(loop, "add", noting)
    return lengths


def expected(engine: lp.Engine) -> dict[int, str]:
    """The text after each first token of ``prompts``."""
    return {token: engine.generate([token], ONE).text for (token,) in prompts(500)}


def test_prompts_are_asked_in_portions(
    engine: lp.Engine, queue_lengths: list[int], generate: Callable[..., Any]
) -> None:
    texts = expected(engine)
    queue_lengths.clear()
    completions = generate(engine, prompts(), ONE)
    assert [out.text for out in completions] == [texts[token] for (token,) in prompts()]
    assert len(queue_lengths) == 6 and max(queue_lengths) < 3 * PORTION


def test_portions_count_choices(engine: lp.Engine, queue_lengths: list[int]) -> None:
    completions = engine.generate(prompts(60), lp.SamplingParams(max_tokens=1, n=PORTION // 8))
    assert len(completions) == 60 and all(len(out.choices) == PORTION // 8 for out in completions)
    assert len(queue_lengths) == 8  # portions of eight prompts


def test_scores_are_asked_in_portions(engine: lp.Engine, queue_lengths: list[int]) -> None:
    pairs = [[3 + i % 500, 4 + i // 500, 5] for i in range(N)]
    scores = engine.score_tokens(pairs)
    assert [list(score.token_ids) for score in scores] == [pair[1:] for pair in pairs]
    assert max(queue_lengths) < 3 * PORTION


def test_a_text_that_is_too_long_is_refused_before_any_is_scored(
    engine: lp.Engine, queue_lengths: list[int]
) -> None:
    with pytest.raises(InvalidRequestError, match="n_ctx is 32"):
        engine.score_tokens([*prompts_to_score(2 * PORTION), [3] * 100])
    assert not queue_lengths


def prompts_to_score(n: int) -> list[list[int]]:
    return [[3 + i % 500, 4 + i // 500] for i in range(n)]


def test_a_timeout_answers_every_prompt(engine: lp.Engine, generate: Callable[..., Any]) -> None:
    params = lp.SamplingParams(max_tokens=20, ignore_eos=True)
    completions = generate(engine, prompts(), params, timeout=0.05, on_timeout="return")
    assert len(completions) == N
    reasons = [out.finish_reason for out in completions]
    assert set(reasons) <= {"length", "timeout"} and reasons[-1] == "timeout"
    assert engine.stats().n_queued == engine.stats().n_active == 0


def test_a_timeout_cancels_what_was_submitted(engine: lp.Engine, generate: Callable[..., Any]) -> None:
    params = lp.SamplingParams(max_tokens=20, ignore_eos=True)
    with pytest.raises(TimeoutError):
        generate(engine, prompts(), params, timeout=0.05)
    assert engine.generate([3], ONE).n_completion_tokens == 1
    assert engine.stats().n_queued == engine.stats().n_active == 0


def test_without_waiting_all_are_accepted_or_none(
    make_engine: MakeEngine, generate: Callable[..., Any]
) -> None:
    engine = make_engine(n_ctx=32, n_seq_max=16, max_queue=2 * PORTION, prefix_cache=False)
    before = engine.stats().n_requests
    with pytest.raises(QueueFullError, match=f"{N} requests"):
        generate(engine, prompts(), ONE, block=False)
    assert engine.stats().n_requests == before
    assert len(generate(engine, prompts(2 * PORTION), ONE, block=False)) == 2 * PORTION
    assert len(generate(engine, prompts(), ONE)) == N  # waits for room


def test_errors_keep_their_places(engine: lp.Engine) -> None:
    bad = {0, PORTION - 1, PORTION, N - 1}
    inputs = [[3] * 100 if i in bad else [3 + i % 500] for i in range(N)]
    results = engine.generate(inputs, ONE, on_error="return")
    assert {i for i, out in enumerate(results) if isinstance(out, Exception)} == bad


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("kind", ["generate", "score"])
def test_closing_ends_a_list_as_a_whole(engine: lp.Engine, kind: str, drain: bool) -> None:
    """It may not lose the results of a list because a part of it is not submitted yet."""
    with held(engine):
        if kind == "generate":
            worker = Worker(engine.generate, prompts(), ONE)
        else:
            worker = Worker(engine.score_tokens, prompts_to_score(N))
        while not thread_of(engine)._lists:
            assert worker.is_alive()
        closer = Worker(engine.close, drain)
        while not thread_of(engine)._stopped:
            pass
    closer.result()
    if kind == "generate":
        reasons = [out.finish_reason for out in worker.result()]
        assert len(reasons) == N and set(reasons) <= ({"length"} if drain else {"length", "cancelled"})
    elif drain:
        assert len(worker.result()) == N
    else:
        with pytest.raises(EngineClosedError):
            worker.result()
    assert not thread_of(engine)._lists


def test_closing_on_the_event_loop_ends_a_list_as_a_whole(engine: lp.Engine) -> None:
    async def main() -> list[lp.Completion]:
        task = asyncio.ensure_future(engine.agenerate(prompts(), ONE))
        await until(lambda: thread_of(engine)._lists)
        engine.close()  # blocks the loop that the task needs
        return await task

    assert [out.finish_reason for out in asyncio.run(main())] == ["length"] * N


def test_an_interrupted_close_leaves_no_caller_waiting(
    engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(engine):
        worker = Worker(engine.generate, prompts(), ONE)
        while not thread_of(engine)._lists:
            assert worker.is_alive()
        with monkeypatch.context() as patch:
            submit = thread_of(engine).submit

            def interrupt(*requests: Any, **options: Any) -> None:
                if threading.current_thread() is threading.main_thread():
                    raise KeyboardInterrupt
                submit(*requests, **options)

            patch.setattr(thread_of(engine), "submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        worker.result()
