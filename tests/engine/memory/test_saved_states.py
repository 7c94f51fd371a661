"""States of memories that cannot go back, in snapshots: used by another engine, or refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.forgeries import CHECK, HEAD, PLACE, forged, parts, signed
from support.gguf_models import tiny_architecture
from support.plain import PlainLoop, greedy

import llamapipe as lp
from llamapipe import cache_file
from llamapipe.errors import DecodeError, InvalidRequestError

MakeEngine = Callable[..., lp.Engine]
WINDOW, RECURRENT, HYBRID, LATENT = "gemma3-270m", "rwkv7-0.4b", "qwen3.5-0.8b", "glm-4.7-flash"
COMMON, PROMPT = 100, 140


@pytest.fixture(scope="module", params=[WINDOW, RECURRENT, HYBRID, LATENT])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A window, states alone, states and cells with positions of several kinds, and keys without values."""
    with lp.Model(
        tiny_architecture(tmp_path_factory.mktemp("models") / f"{request.param}.gguf", request.param)
    ) as loaded:
        yield loaded


def prompt_of(which: int, n: int = PROMPT) -> list[int]:
    """Prompts that share their first tokens."""
    return [20 + (i * 11 + i * i + (which * 37 if i >= COMMON else 0)) % 150 for i in range(n)]


def tokens_of(snapshot: bytes) -> list[int]:
    """The tokens of a snapshot."""
    n_tokens, _, _, _, n_states = struct.unpack_from("<5I", snapshot, 44)
    return list(struct.unpack_from(f"<{n_tokens}i", snapshot, HEAD + PLACE * n_states))


def n_computed(engine: lp.Engine, prompt: list[int], plain: PlainLoop) -> int:
    """The tokens that an engine computes of a prompt whose answer is right."""
    before = engine.stats().n_prompt_tokens
    assert plain.agrees(prompt, engine.generate(prompt, greedy(6)).token_ids)
    return engine.stats().n_prompt_tokens - before


OTHERS: list[dict[str, Any]] = [{"n_seq_max": 2}, {"n_seq_max": 5}, {"kv_unified": True}]


@pytest.mark.parametrize("there", OTHERS, ids=str)
def test_a_snapshot_has_the_states(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, there: dict[str, Any]
) -> None:
    """It continues in a context of another form, and goes back there."""
    first = make_engine(model, n_seq_max=3, cache_bytes=2**26)
    with (
        first.start([30] * 20, greedy(4)) as other,
        first.start(prompt_of(1), greedy(30)) as generation,
    ):
        assert next(other)  # the sequence is not in the first slot
        begun = [next(generation).id for _ in range(6)]
        snapshot = generation.snapshot()
    engine = make_engine(model, cache_bytes=2**26, **there)
    with engine.restore(snapshot, greedy(30)) as restored:
        tokens = prompt_of(1) + begun
        assert plain.agrees(tokens, [next(restored).id for _ in range(6)])
        assert engine.stats().n_prompt_tokens == 0
        restored.trim(PROMPT - 2)
        restored.append([40, 41])
        assert plain.agrees(restored.token_ids, [next(restored).id for _ in range(4)])
    assert engine.stats().n_prompt_tokens <= 4
    engine.check_integrity()


class TestForged:
    """With a right checksum. llama.cpp would end the process for some, and believe others."""

    @pytest.fixture
    def snapshot(self, make_engine: MakeEngine, model: lp.Model) -> bytes:
        engine = make_engine(model, n_seq_max=2, cache_bytes=2**26)
        with engine.start(prompt_of(1), greedy(6)) as generation:
            assert next(generation)
            return generation.snapshot()

    @staticmethod
    def refused(engine: lp.Engine, body: bytes, why: str) -> None:
        with pytest.raises(InvalidRequestError, match=f"the snapshot is damaged: .*{why}"):
            engine.restore(signed(body))

    def test_counts_positions_and_sizes(
        self, make_engine: MakeEngine, model: lp.Model, snapshot: bytes
    ) -> None:
        engine = make_engine(model, n_seq_max=2)
        body = snapshot[:-CHECK]
        table, state = parts(snapshot)

        self.refused(engine, body[:-1], "lengths contradict")
        self.refused(engine, body + b"\0", "lengths contradict")
        for size in (0, 2**31, 2**32 - 1):  # of the whole state, and numbers of states and cells
            self.refused(engine, forged(body, 64, size), "lengths contradict")
            self.refused(engine, forged(body, 60, size or 7), "lengths contradict")
        self.refused(engine, forged(body, 52, 2**31), "lengths contradict")
        first = state + 8  # after its magic and sequence
        if model.has_only_states:
            for count in (0, 2, 2**31, 2**32 - 1):
                self.refused(engine, forged(body, first, count), "recurrent states and should have 1")
            for position in (0, PROMPT - 2, PROMPT, 2**31, 2**32 - 1):
                self.refused(engine, forged(body, first + 4, position), "recurrent state is of position")
            for place in (
                first + 12,
                first + 16,
                first + 20,
                first + 24,
            ):  # its form, layers, type and size of a row
                self.refused(engine, forged(body, place, 7), "from another architecture")
        else:
            for n_streams in (0, 2, 2**31):
                self.refused(engine, forged(body, first, n_streams), "streams and should have 1")
            for count in (1, 2, PROMPT - 1, PROMPT + 1, 2**31, 2**32 - 1):
                self.refused(engine, forged(body, first + 4, count), "")
            self.refused(engine, forged(body, first + 4, 0), "no cells for its 140 tokens")
            for position in (1, PROMPT, 2**20, 2**31 - 1, 2**31, 2**32 - 1):
                self.refused(engine, forged(body, first + 8, position), "not those of 140 tokens")
            self.refused(engine, forged(body, first + 12, 2), "several sequences")
        if model.is_recurrent:
            (n, n_bytes) = struct.unpack_from("<IQ", body, table)
            assert (n, len(body) > n_bytes > 100) == (PROMPT - 4, True)
            for place in (0, n + 1, PROMPT - 5, 2**31):  # a state of another place; none is there
                self.refused(engine, forged(body, table, place), "")
            last = len(body) - n_bytes + 8
            for count in (0, 2, 2**32 - 1):
                self.refused(engine, forged(body, last, count), "recurrent states and should have 1")
            self.refused(engine, forged(body, last + 4, n), "of position")
            self.refused(engine, forged(body, last + 16, 9), "from another architecture")

    def test_random_changes_are_refused_or_harmless(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, snapshot: bytes
    ) -> None:
        """Refused, or the cells are not taken, or they hold other numbers."""
        engine = make_engine(model, n_seq_max=2, cache_bytes=2**26)
        chance, ids = random.Random(7), prompt_of(1)
        _, state = parts(snapshot)
        for i in range(150):
            changed = bytearray(snapshot[:-CHECK])
            begin, end = ((HEAD - 44, HEAD + 36), (state, state + 400), (state, len(changed)))[i % 3]
            for _ in range(chance.choice((1, 1, 4))):
                changed[chance.randrange(begin, end)] = chance.choice((0, 1, 127, 255, chance.randrange(256)))
            if i % 9 == 0:
                del changed[chance.randrange(60, len(changed)) :]
            try:
                restored = engine.restore(signed(bytes(changed)), greedy(3))
            except InvalidRequestError:
                continue
            with restored, suppress(DecodeError):  # no logit is finite
                restored.next()
                restored.trim(PROMPT - 2)
                restored.next()
        engine.reset_prefix_cache()  # forged states count as those of their tokens
        assert plain.agrees(ids, engine.generate(ids, greedy(6)).token_ids)
        engine.check_integrity()

    def test_states_of_others(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, snapshot: bytes
    ) -> None:
        """The states of another sequence, in each other's places, cut or longer: refused, or other numbers."""
        engine = make_engine(model, n_seq_max=3, cache_bytes=2**26)
        with engine.start(prompt_of(2, 61), greedy(6)) as generation:
            assert next(generation)
            others = [snapshot, generation.snapshot()]
        engine.reset_prefix_cache()
        chance = random.Random(11)
        for i in range(120):
            whole, other = others[i % 2], others[i // 2 % 2]
            changed, (table, first), states = bytearray(whole[:-CHECK]), parts(whole), []
            for _, begin, end in self.states(whole):
                their = chance.choice(self.states(other))
                states.append(
                    bytearray(other[their[1] : their[2]] if chance.random() < 0.7 else whole[begin:end])
                )
                if chance.random() < 0.2:
                    del states[-1][chance.randrange(len(states[-1])) :]
                elif chance.random() < 0.2:
                    states[-1] += bytes(chance.choice((1, 4, 64)))
            struct.pack_into("<Q", changed, 64, len(states[0]))
            for at, state in enumerate(states[1:]):
                struct.pack_into("<Q", changed, table + PLACE * at + 4, len(state))
            try:
                restored = engine.restore(signed(bytes(changed[:first]) + b"".join(states)), greedy(3))
            except InvalidRequestError:
                continue
            with restored, suppress(DecodeError):
                restored.next()
                restored.trim(chance.randrange(1, 60))
                restored.next()
        engine.reset_prefix_cache()
        ids = prompt_of(1)
        assert plain.agrees(ids, engine.generate(ids, greedy(6)).token_ids)
        engine.check_integrity()

    @classmethod
    def states(cls, snapshot: bytes) -> list[tuple[int, int, int]]:
        """The states of a snapshot, the whole one first: its tokens, and where it begins and ends."""
        _, _, n_cells, _, n_states = struct.unpack_from("<5I", snapshot, 44)
        table, end = parts(snapshot)
        sizes = [(n_cells, *struct.unpack_from("<Q", snapshot, 64))]
        sizes += [struct.unpack_from("<IQ", snapshot, table + PLACE * i) for i in range(n_states)]
        places = []
        for n, n_bytes in sizes:
            places.append((n, end, end + n_bytes))
            end += n_bytes
        return places

    def test_a_state_of_another_architecture(
        self, make_engine: MakeEngine, model: lp.Model, snapshot: bytes, recurrent: lp.Model, tiny: lp.Model
    ) -> None:
        """With its own model's fingerprint in the place of the other's."""
        for other in (recurrent, tiny):
            engine = make_engine(other, n_seq_max=2)
            with engine.start([5, 6, 7] * 10, greedy(4)) as generation:
                assert next(generation)
                own = generation.snapshot()
            body = snapshot[:-CHECK]
            tokens = bytes(4 * struct.unpack_from("<I", body, 44)[0])  # in every vocabulary
            _, state = parts(snapshot)
            forged = body[:8] + own[8:24] + body[24 : state - len(tokens)] + tokens + body[state:]
            self.refused(engine, forged, "")

    def test_an_older_version(self, make_engine: MakeEngine, model: lp.Model, snapshot: bytes) -> None:
        old = b"llpsnap4" + snapshot[8:]
        with pytest.raises(InvalidRequestError, match="has version 4 of its format, this llamapipe reads 5"):
            make_engine(model).restore(old)

    def test_in_a_cache_file(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, tmp_path: Path
    ) -> None:
        """The file is deleted, its tokens are computed; the other one is used."""
        options: dict[str, Any] = {"n_seq_max": 2, "cache_bytes": 2**26, "cache_dir": tmp_path}
        other = [*range(30, 130)]
        with make_engine(model, **options) as engine:
            for prompt in (prompt_of(1), other):
                n_computed(engine, prompt, plain)
        (path,) = (path for path in tmp_path.glob("*/*.kv") if tokens_of(snapshot_in(path))[0] != other[0])
        whole = snapshot_in(path)
        head = path.read_bytes()[: -len(whole)]
        body = whole[:-CHECK]
        _, state = parts(whole)
        for at in (state + 8, state + 12, 64):  # counts, positions and sizes
            path.write_bytes(head + signed(forged(body, at, 7)))
            with make_engine(model, **options) as engine:
                assert n_computed(engine, prompt_of(1), plain) == PROMPT
                assert not path.exists()
                assert n_computed(engine, other, plain) <= 4
                assert engine.stats().n_disk_reads == 1
                engine.set_cache_writes("never")
                engine.check_integrity()


def snapshot_in(path: Path) -> bytes:
    """The snapshot in a file of the prefix cache."""
    with cache_file.open_private(path) as file:
        cache_file.read_head(file)
        return file.readall()
