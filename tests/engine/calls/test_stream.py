"""Streams for threads: deltas as they come, readers that are slow, stop, or go away."""

from __future__ import annotations

import codecs
import gc
import threading
from collections.abc import Callable, Sequence

import pytest
from support.control import Gate, Worker, all_results, held, wait_until
from support.plain import PlainLoop, greedy, plain_loop

import llamapipe as lp
from llamapipe.errors import EngineClosedError
from llamapipe.llama.native_pipeline import on_gpu
from llamapipe.streams import BUFFER_TOKENS

MakeEngine = Callable[..., lp.Engine]
Ending = Callable[[lp.Stream], object]

PROMPT = "Once upon a time there was"
OTHER = "In a house near the mill"


def tokens_of(deltas: Sequence[lp.Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: Sequence[lp.Delta]) -> str:
    return "".join(delta.text for delta in deltas)


class TestDeltas:
    def test_join_to_the_completion(self, engine: lp.Engine) -> None:
        out = engine.generate(PROMPT, greedy(40))
        deltas = list(engine.stream(PROMPT, greedy(40)))
        assert (text_of(deltas), tokens_of(deltas)) == (out.text, out.token_ids)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert all(len(delta.token_ids) <= 1 for delta in deltas)

    def test_same_seed_same_deltas(self, engine: lp.Engine) -> None:
        params = lp.SamplingParams(max_tokens=40, temperature=1.5, seed=11)
        assert list(engine.stream(PROMPT, params)) == list(engine.stream(PROMPT, params))

    def test_stop_token(self, engine: lp.Engine, loop: PlainLoop) -> None:
        expected = loop.greedy(engine.model.tokenize(PROMPT), 12)
        n = next(i for i in range(3, 12) if expected[i] not in expected[:i])
        deltas = list(engine.stream(PROMPT, greedy(40, stop_token_ids=[expected[n]])))
        assert tokens_of(deltas) == expected[:n]
        assert deltas[-1].finish_reason == "stop"

    def test_end_of_generation_at_once(self, engine: lp.Engine) -> None:
        eos = engine.model.eos
        assert eos is not None
        params = lp.SamplingParams(temperature=0, logit_bias={eos: 1000.0})
        assert list(engine.stream(PROMPT, params)) == [lp.Delta("", (), None, "stop")]

    def test_characters_are_whole(self, engine: lp.Engine) -> None:
        """Only the bytes C3 and A9 can be drawn: characters are split between tokens, and many are broken."""
        model = engine.model
        ids = [next(t for t in range(512) if model.piece(t) == byte) for byte in (b"\xc3", b"\xa9")]
        params = lp.SamplingParams(max_tokens=200, logit_bias=dict.fromkeys(ids, 1000.0), seed=5, top_k=2)
        deltas = list(engine.stream(PROMPT, params))
        data = [b"".join(map(model.piece, delta.token_ids)) for delta in deltas]
        assert set(b"".join(data)) == {0xC3, 0xA9}
        assert "é" in text_of(deltas)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert [delta.text for delta in deltas] == [decoder.decode(d, i == 199) for i, d in enumerate(data)]
        assert engine.generate(PROMPT, params).text == text_of(deltas)

    def test_stop_strings_are_never_partly_shown(self, engine: lp.Engine) -> None:
        """Every part of the text of up to four characters as the stop string: they span tokens, begin inside them."""
        text = engine.generate(PROMPT, greedy(24)).text
        for first in range(len(text) - 1):
            for n in (1, 2, 4):
                stop = text[first : first + n]
                expected = text[: text.index(stop)]
                out = engine.generate(PROMPT, greedy(24, stop=[stop]))
                deltas = list(engine.stream(PROMPT, greedy(24, stop=[stop])))
                assert (out.text, out.finish_reason) == (expected, "stop")
                assert (text_of(deltas), deltas[-1].finish_reason) == (expected, "stop")
                assert tokens_of(deltas) == out.token_ids

    def test_what_could_become_a_stop_string_comes_at_the_end(self, engine: lp.Engine) -> None:
        text = engine.generate(PROMPT, greedy(24)).text
        stops = [text[-3:] + "\N{SNOWMAN}", text[5:9] + "\N{SNOWMAN}"]
        deltas = list(engine.stream(PROMPT, greedy(24, stop=stops)))
        assert (text_of(deltas), deltas[-1].finish_reason) == (text, "length")
        assert deltas[-1].text.endswith(text[-3:])

    def test_after_the_end(self, engine: lp.Engine) -> None:
        stream = engine.stream(PROMPT, greedy(3))
        assert len(list(stream)) == 3
        assert list(stream) == []
        steps = engine.stats().steps
        stream.close()
        stream.cancel()
        assert (list(stream), engine.stats().steps) == ([], steps)


def close(stream: lp.Stream) -> None:
    stream.close()


def leave_with(stream: lp.Stream) -> None:
    with stream:
        pass


def leave_with_error(stream: lp.Stream) -> None:
    try:
        with stream:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def cancel_elsewhere(stream: lp.Stream) -> None:
    Worker(stream.cancel).result()


ENDINGS = [close, leave_with, leave_with_error, cancel_elsewhere]


class TestFirstTokens:
    def test_need_not_wait_for_all_prompts(self, make_engine: MakeEngine) -> None:
        """Where fewer tokens take less time, a step has two prompts of 128, and not the four that fit into a ubatch."""
        engine = make_engine(n_seq_max=4, prefix_cache=False)
        prompts = [[1 + i] * 128 for i in range(4)]
        with Gate(engine) as gate:
            gate.open()
            with held(engine):
                streams = [engine.stream(prompt, greedy(1)) for prompt in prompts]
            assert [len(tokens_of(list(stream))) for stream in streams] == [1] * 4
            together = [512]
            assert [len(launch.tokens) for launch in gate.launches] == (
                together if on_gpu(engine.model) else [256] * 2
            )
            gate.launches.clear()
            engine.generate(prompts, greedy(1))  # whole completions: nobody reads their first tokens
            assert [len(launch.tokens) for launch in gate.launches] == together


class TestCancel:
    @pytest.mark.parametrize("end", [*ENDINGS, None])
    @pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 4, 5])
    def test_within_one_step(self, make_engine: MakeEngine, end: Ending | None, n_steps: int) -> None:
        """The prompt takes three steps; without an ending it is dropped. The step that runs is the last one."""
        engine = make_engine(n_batch=8, n_ubatch=8)
        ids = engine.model.tokenize(PROMPT)[:20]
        with Gate(engine) as gate:
            stream = engine.stream(ids, greedy(None))
            gate.wait()
            gate.step(n_steps)
            deltas = [next(stream) for _ in range(n_steps - 2)]
            if end is None:
                del stream
                gc.collect()
            else:
                end(stream)
                assert list(stream) == []
            gate.open()
            stats = engine.stats()
            assert (stats.steps, stats.n_active, stats.n_queued) == (n_steps + 1, 0, 0)
            assert len(tokens_of(deltas)) == max(n_steps - 2, 0)
        engine.check_integrity()

    @pytest.mark.parametrize("end", [*ENDINGS, None])
    def test_in_the_queue(self, make_engine: MakeEngine, end: Ending | None) -> None:
        """It never gets a step, and the others never notice."""
        engine = make_engine(n_seq_max=1, max_queue=2)
        with Gate(engine) as gate:
            busy = Worker(engine.generate, OTHER, greedy(5))
            gate.wait()
            stream = engine.stream(PROMPT, greedy(None))
            last = Worker(engine.generate, PROMPT, greedy(1))
            if end is None:
                del stream
                gc.collect()
            else:
                end(stream)
            gate.open()
            assert len(busy.result().token_ids) == 5
            assert len(last.result().token_ids) == 1
            assert engine.stats().steps == 6
        assert "n_queued=0" in repr(engine)

    def test_timeout(self, make_engine: MakeEngine) -> None:
        """It passes while a step runs, however long that takes."""
        engine = make_engine()
        with Gate(engine) as gate:
            stream = engine.stream(PROMPT, greedy(None), timeout=0.01)
            gate.wait()
            with pytest.raises(TimeoutError, match="timeout"):
                next(stream)
            assert list(stream) == []
            gate.open()
            stats = engine.stats()
            assert (stats.steps, stats.n_active) == (1, 0)

    def test_timeout_of_a_slow_reader(self, engine: lp.Engine) -> None:
        """What came in time but was not read does not put the end off."""
        stream = engine.stream(PROMPT, greedy(None), timeout=0)
        wait_until(lambda: engine.stats().n_completion_tokens >= 10)
        with pytest.raises(TimeoutError):
            next(stream)
        assert list(stream) == []
        assert engine.stats().n_active == 0

    def test_timeout_after_the_end(self, engine: lp.Engine) -> None:
        """What was finished in time can be read at leisure."""
        stream = engine.stream(PROMPT, greedy(10), timeout=0)
        wait_until(lambda: engine.stats().n_completion_tokens == 10)
        deltas = list(stream)
        assert (len(tokens_of(deltas)), deltas[-1].finish_reason) == (10, "length")

    def test_reader_that_waits_is_told(self, engine: lp.Engine) -> None:
        with Gate(engine) as gate:
            stream = engine.stream(PROMPT, greedy(None))
            reader = Worker(list, stream)
            gate.wait()
            stream.cancel()
            gate.open()
            deltas = reader.result()
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] in (["cancelled"], [])

    def test_beside_others(self, engine: lp.Engine) -> None:
        """One of three ends at each possible step; the two beside it go on as alone."""
        alone = engine.generate(PROMPT, greedy(12)).token_ids
        for n in range(1, 11):
            with held(engine):
                streams = [engine.stream(PROMPT, greedy(12)) for _ in range(3)]
            for _ in range(n):
                next(streams[1])
            streams[1].close()
            assert tokens_of(list(streams[0])) == alone
            assert tokens_of(list(streams[2])) == alone
            engine.check_integrity()


class TestSlowReader:
    def test_pauses_its_own_sequence_only(self, engine: lp.Engine, loop: PlainLoop) -> None:
        slow = engine.stream(PROMPT, greedy(200))
        fast = engine.generate([OTHER] * 3, greedy(200))
        assert len({out.text for out in fast}) == 1
        stats = engine.stats()
        assert stats.n_completion_tokens == 600 + BUFFER_TOKENS
        assert stats.n_active == 1
        expected = loop.greedy(engine.model.tokenize(PROMPT), 200)
        for n_read in range(1, 201):
            assert next(slow).token_ids == (expected[n_read - 1],)
            assert engine.stats().n_completion_tokens - 600 <= min(n_read + BUFFER_TOKENS, 200)
        assert list(slow) == []

    def test_gives_its_slot_up_and_comes_back(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        slow = engine.stream(PROMPT, greedy(200))
        assert next(slow).token_ids
        assert len(engine.generate(OTHER, greedy(20)).token_ids) == 20
        stats = engine.stats()
        assert (stats.n_preempted, stats.n_active, stats.n_queued) == (1, 0, 0)
        tokens = tokens_of(list(slow))
        assert tokens == loop.greedy(engine.model.tokenize(PROMPT), 200)[1:]

    def test_read_in_turns_in_one_slot(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """The reader wants a token of each in turn; none may wait for another to be read first."""
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        texts = [PROMPT, OTHER, "The owl"]
        streams = [engine.stream(text, greedy(150)) for text in texts]
        outputs = [tokens_of(deltas) for deltas in zip(*zip(*streams, strict=True), strict=True)]
        assert outputs == [loop.greedy(engine.model.tokenize(text), 150) for text in texts]

    def test_cancelled_while_paused(self, engine: lp.Engine) -> None:
        stream = engine.stream(PROMPT, greedy(None))
        wait_until(lambda: engine.stats().n_completion_tokens == BUFFER_TOKENS)
        steps = engine.stats().steps
        stream.close()
        stats = engine.stats()
        assert (stats.steps, stats.n_active) == (steps, 0)

    def test_cancelled_after_it_gave_way(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=1)
        stream = engine.stream(PROMPT, greedy(None))
        next(stream)
        engine.generate(OTHER, greedy(3))
        del stream
        gc.collect()
        engine.close()  # hangs when something is left

    def test_drained_by_close(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """The reader finds all of it afterwards."""
        stream = engine.stream(PROMPT, greedy(150))
        first = next(stream)
        engine.close()
        deltas = [first, *stream]
        assert tokens_of(deltas) == loop.greedy(engine.model.tokenize(PROMPT), 150)
        assert deltas[-1].finish_reason == "length"

    def test_drained_while_it_is_read(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        """Readers raise their limits in the moment the engine lifts them."""
        with plain_loop(demo, n_ubatch=32) as loop:
            expected = loop.greedy([1, *range(300, 310)], 200)
        for _ in range(20):
            engine = make_engine(demo, n_seq_max=4, n_ubatch=32)
            barrier = threading.Barrier(5)

            def read(engine: lp.Engine = engine, barrier: threading.Barrier = barrier) -> list[int]:
                stream = engine.stream([1, *range(300, 310)], greedy(200))
                tokens = list(next(stream).token_ids)
                barrier.wait()
                return tokens + tokens_of(list(stream))

            readers = [Worker(read) for _ in range(4)]
            barrier.wait()
            engine.close()
            assert all_results(readers) == [expected] * 4

    def test_cut_off_by_close(self, engine: lp.Engine) -> None:
        stream = engine.stream(PROMPT, greedy(None))
        first = next(stream)
        engine.close(drain=False)
        deltas = [first, *stream]
        assert deltas[-1].finish_reason == "cancelled"
        assert len(tokens_of(deltas)) <= BUFFER_TOKENS + 1
        with pytest.raises(EngineClosedError):
            engine.stream(PROMPT)


class TestOwnership:
    def test_dropped_in_another_thread(self, engine: lp.Engine) -> None:
        """The collector runs wherever it likes: here in threads that allocate, while the engine thread works."""
        box = [[engine.stream(PROMPT, greedy(None))] for _ in range(8)]
        for stream in box:
            stream.append(stream)  # type: ignore[arg-type]  # a cycle: only the collector frees it
        del stream
        box.clear()
        all_results([Worker(gc.collect) for _ in range(4)])
        assert engine.stats().n_active == 0
        engine.check_integrity()

    def test_breaking_out_of_a_loop_ends_it(self, engine: lp.Engine) -> None:
        for delta in engine.stream(PROMPT, greedy(None)):
            assert delta.token_ids
            break
        gc.collect()
        assert engine.stats().n_active == 0

    def test_one_reader_after_another(self, engine: lp.Engine, loop: PlainLoop) -> None:
        stream = engine.stream(PROMPT, greedy(100))
        deltas: list[lp.Delta] = []
        for _ in range(4):
            deltas += Worker(lambda: [next(stream) for _ in range(25)]).result()
        assert tokens_of(deltas) == loop.greedy(engine.model.tokenize(PROMPT), 100)

    def test_repr(self, engine: lp.Engine) -> None:
        with engine.stream(PROMPT, greedy(3)) as stream:
            assert "<Stream open <Request" in repr(stream)
        assert "<Stream done <Request" in repr(stream)
