"""What an Executor promises: the real one, on attention and on recurrent models, and the fake one keep it alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.backends import BOUND, FEW, ON_DEVICE
from support.chains import Chain
from support.control import Worker
from support.fakes import FakeContext, FakeSampler, next_token
from support.gguf_models import BROKEN, PRESETS, damaged_model, make_model, recurrent_model

import llamapipe as lp
from llamapipe._engine.policy.core import Copy, Forget, Remove, Restore, Save
from llamapipe._engine.runtime.executor import Executor, StepExecutor
from llamapipe.errors import ContextFullError, EngineClosedError, NoToken
from llamapipe.llama import Context, DecodeBatch, Model
from llamapipe.llama.native_pipeline import engine_pipeline, ring_slots

N_CTX, N_SEQ, N_BATCH = 256, 4, 64
# Where the two best logits are closer than this, rounding may choose; it is about 1e-5 and logits about 1.
CLOSE = BOUND if ON_DEVICE else 1e-3
RECURRENT_CLOSE = 1e-2  # without attention, whose keys are half-precision: at most 3e-3 on a device


@dataclass
class Kit:
    """An executor of 4 sequences of 256 positions, 64 tokens a batch, and what is true of it."""

    executor: Executor
    new_sampler: Callable[[], Any]  # greedy
    says: Callable[[Sequence[int]], int | None]  # after these tokens alone; None: too close to tell
    recurrent: bool = False

    def launch(self, *runs: tuple[int, int, Sequence[int], bool]) -> None:
        """Launches runs of tokens: sequence, first position, tokens, whether the last is an output."""
        tokens: list[int] = []
        positions: list[int] = []
        seq_ids: list[int] = []
        outputs: list[int] = []
        for seq_id, first, run, output in runs:
            tokens += run
            positions += range(first, first + len(run))
            seq_ids += [seq_id] * len(run)
            outputs += [0] * (len(run) - 1) + [int(output)]
        self.step = self.executor.launch(tokens, positions, seq_ids, outputs)
        self.rows = [i for i, output in enumerate(outputs) if output]

    def remove(self, seq_id: int, position: int) -> bool:
        return not self.executor.change_cells([Remove(seq_id, position)]).lost

    def copy(self, source: int, seq_id: int, n: int) -> bool:
        return not self.executor.change_cells([Copy(source, seq_id, n)]).lost

    def save(self, seq_id: int, max_bytes: int) -> int | None:
        """The bytes that are saved, under key 0."""
        ((key, n_bytes),) = self.executor.change_cells([Save(seq_id, 0, max_bytes)]).saved
        assert key == 0
        return n_bytes

    def restore(self, seq_id: int, n: int) -> bool:
        return not self.executor.change_cells([Restore(0, seq_id, n)]).lost

    def sample(self) -> list[int]:
        """The greedy tokens of the last launch's outputs."""
        with ExitStack() as stack:
            samplers = [stack.enter_context(closing(self.new_sampler())) for _ in self.rows]
            return self.executor.sample(self.step, self.rows, samplers)

    def launch_and_sample(self, *runs: tuple[int, int, Sequence[int], bool]) -> None:
        """For errors: a launch may raise them only when it is sampled."""
        self.launch(*runs)
        self.sample()

    def assert_says(self, *sequences: Sequence[int]) -> None:
        """The rows of the last launch continue these sequences."""
        for said, tokens in zip(self.sample(), sequences, strict=True):
            assert said == self.says(tokens) or self.says(tokens) is None


def prompt_of(n: int, which: int = 0) -> list[int]:
    """`n` tokens every vocabulary here has; other numbers give other prompts."""
    return [(31 * which + 7 * i + 5) % 95 for i in range(n)]


# ---- models
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    folder = tmp_path_factory.mktemp("contract")
    attention = make_model(folder / "attention.gguf", shape=PRESETS["tiny"].shape, type_name="f32")
    with (
        Model(attention) as model,
        Model(recurrent_model(folder / "recurrent.gguf")) as recurrent,
        Model(damaged_model(folder / "damaged.gguf")) as damaged,
    ):
        yield {"attention": model, "recurrent": recurrent, "damaged": damaged}


class Alone:
    """What a model says after tokens that are alone in a context; asked once for each."""

    def __init__(self, model: Model, close: float = CLOSE) -> None:
        self.context = Context(model, n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, n_threads=1)
        self.close = close
        self.known: dict[tuple[int, ...], int | None] = {}

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *arguments: object) -> None:
        self.context.close()

    def __call__(self, tokens: Sequence[int]) -> int | None:
        key = tuple(tokens)
        if key not in self.known:
            self.context.clear()
            self.context.decode(DecodeBatch.of_tokens(key))
            logits = np.nan_to_num(self.context.logits(len(key) - 1), nan=-np.inf)
            second, first = np.sort(logits)[-2:]
            self.known[key] = int(np.argmax(logits)) if first - second > self.close else None
        return self.known[key]


# ---- executors
@contextmanager
def fake(models: dict[str, Model], **options: Any) -> Iterator[Kit]:
    context = FakeContext(N_SEQ, N_CTX, n_batch=N_BATCH, **options)
    yield Kit(context, FakeSampler, next_token, context.recurrent)
    context.close()


@contextmanager
def steps(
    models: dict[str, Model], name: str = "attention", ring: str = "auto", depth: int = 1, **options: Any
) -> Iterator[Kit]:
    model = models[name]
    context = Context(
        model,
        N_CTX,
        N_SEQ,
        n_batch=N_BATCH,
        n_ubatch=32,
        n_outputs_max=N_SEQ,
        n_threads=1,
        n_ring_slots=ring_slots(model, ring, depth + 1),
        **options,
    )
    with closing(StepExecutor(engine_pipeline(context, ring, depth))) as executor, Alone(model) as alone:
        yield Kit(executor, partial(greedy, model), alone, model.is_recurrent)


def greedy(model: Model) -> Chain:
    return Chain(model.vocab).add_temperature(0.0)


KITS: dict[str, Callable[[dict[str, Model]], AbstractContextManager[Kit]]] = {
    "fake": fake,
    "fake, few cells": partial(fake, n_cells=N_CTX),
    "fake, recurrent": partial(fake, recurrent=True, has_cells=False),
    "streams": steps,
    "unified": partial(steps, kv_unified=True),
    "few cells": partial(steps, kv_unified=True, n_cells=N_CTX),
    "recurrent": partial(steps, name="recurrent"),
    "streams, a thread of its own": partial(steps, depth=2),
    "unified, a thread of its own": partial(steps, kv_unified=True, depth=2),
    "few cells, a thread of its own": partial(steps, kv_unified=True, n_cells=N_CTX, depth=2),
    "direct, streams": partial(steps, ring="off"),
    "direct, unified": partial(steps, ring="off", kv_unified=True),
    "direct, few cells": partial(steps, ring="off", kv_unified=True, n_cells=N_CTX),
    "direct, a thread of its own": partial(steps, ring="off", depth=2),
    "sync, streams": partial(steps, ring="sync"),
}
SCARCE = {name: kit for name, kit in KITS.items() if "few cells" in name}
if ON_DEVICE:  # each step takes long there: the ways that differ
    ways = ["unified", "sync, streams"]
    KITS = {n: KITS[n] for n in ways + ([] if FEW else ["streams", "recurrent", "direct, streams"])}
DAMAGED: dict[str, Callable[[dict[str, Model]], AbstractContextManager[Kit]]] = {
    "fake": partial(fake, broken=[BROKEN]),
    "streams": partial(steps, name="damaged"),
    "unified": partial(steps, name="damaged", kv_unified=True),
    "direct": partial(steps, name="damaged", ring="off"),
}
if ON_DEVICE:  # whose arithmetic may make a number of what is none
    DAMAGED = {"fake": DAMAGED["fake"]}


@pytest.fixture(params=KITS)
def kit(request: pytest.FixtureRequest, models: dict[str, Model]) -> Iterator[Kit]:
    with KITS[request.param](models) as kit:
        yield kit


@pytest.fixture(params=SCARCE)
def scarce(request: pytest.FixtureRequest, models: dict[str, Model]) -> Iterator[Kit]:
    with SCARCE[request.param](models) as kit:
        yield kit


@pytest.mark.device
class TestLaunch:
    def test_a_prompt_continues_as_alone(self, kit: Kit) -> None:
        for which, n in enumerate((1, 2, 17, N_BATCH)):
            kit.launch((which, 0, prompt_of(n, which), True))
            kit.assert_says(prompt_of(n, which))

    def test_sequences_know_nothing_of_each_other(self, kit: Kit) -> None:
        sequences = [prompt_of(n, n) for n in (5, 9, 13, 7)]
        kit.launch(*((i, 0, tokens, True) for i, tokens in enumerate(sequences)))
        kit.assert_says(*sequences)
        for step in range(3):
            for tokens in sequences:
                tokens.append((11 * step + len(tokens)) % 90)
            kit.launch(*((i, len(tokens) - 1, tokens[-1:], True) for i, tokens in enumerate(sequences)))
            kit.assert_says(*sequences)

    def test_a_prompt_in_parts_is_the_same_prompt(self, kit: Kit) -> None:
        tokens = prompt_of(40)
        for first, last in ((0, 20), (20, 21), (21, 39)):
            kit.launch((0, first, tokens[first:last], False))
            assert kit.sample() == []
        kit.launch((0, 39, tokens[39:], True))
        kit.assert_says(tokens)

    def test_rows_are_those_of_the_outputs(self, kit: Kit) -> None:
        """Decoding and prompts in one batch, in any order of sequences, some without output."""
        kit.launch((2, 0, prompt_of(6, 2), True), (0, 0, prompt_of(3), False), (3, 0, prompt_of(4, 3), True))
        kit.assert_says(prompt_of(6, 2), prompt_of(4, 3))
        kit.launch(
            (0, 3, [8], True), (3, 4, [9], True), (1, 0, prompt_of(20, 1), False), (2, 6, prompt_of(5), True)
        )
        kit.assert_says([*prompt_of(3), 8], [*prompt_of(4, 3), 9], prompt_of(6, 2) + prompt_of(5))

    def test_a_whole_batch(self, kit: Kit) -> None:
        sequences = [prompt_of(N_BATCH // N_SEQ, i) for i in range(N_SEQ)]
        kit.launch(*((i, 0, tokens, True) for i, tokens in enumerate(sequences)))
        kit.assert_says(*sequences)

    def test_to_the_end_of_the_context(self, kit: Kit) -> None:
        tokens = prompt_of(N_CTX)
        for first in range(0, N_CTX, N_BATCH):
            kit.launch((1, first, tokens[first : first + N_BATCH], first + N_BATCH == N_CTX))
        kit.assert_says(tokens)


class TestAgain:
    @pytest.mark.device
    def test_every_sequence_goes_on_with_what_was_sampled(self, kit: Kit) -> None:
        sequences = [prompt_of(n, n) for n in (5, 9, 13)]
        kit.launch(*((i, 0, tokens[:-1], True) for i, tokens in enumerate(sequences)))
        with ExitStack() as stack:
            samplers = [stack.enter_context(closing(kit.new_sampler())) for _ in sequences]
            kit.launch(*((i, len(tokens) - 1, tokens[-1:], True) for i, tokens in enumerate(sequences)))
            sampled = kit.executor.sample(kit.step, kit.rows, samplers)
            for _ in range(4):
                for said, tokens in zip(sampled, sequences, strict=True):
                    assert said == kit.says(tokens) or kit.says(tokens) is None
                    tokens.append(said)
                kit.step = kit.executor.launch_repeat()
                sampled = kit.executor.sample_repeat(kit.step)
            # and afterwards as if it had been said at length
            for said, tokens in zip(sampled, sequences, strict=True):
                tokens.append(said)
            kit.launch(*((i, len(tokens) - 1, tokens[-1:], True) for i, tokens in enumerate(sequences)))
            kit.assert_says(*sequences)

    def test_nothing_is_changed_when_no_cells_are_left(self, scarce: Kit) -> None:
        first, second, rest = prompt_of(30), prompt_of(30, 1), prompt_of(N_CTX - 62, 2)  # two cells are left
        scarce.launch((0, 0, first, False), (1, 0, second, False))
        for start in range(0, len(rest), N_BATCH):
            scarce.launch((2, start, rest[start : start + N_BATCH], False))
        with closing(scarce.new_sampler()) as a, closing(scarce.new_sampler()) as b:
            scarce.launch((0, len(first), [5], True), (1, len(second), [6], True))
            scarce.executor.sample(scarce.step, scarce.rows, [a, b])
            with pytest.raises(ContextFullError):
                scarce.executor.sample_repeat(scarce.executor.launch_repeat())
        assert scarce.remove(2, 0)
        scarce.launch((0, len(first) + 1, [8], True), (1, len(second) + 1, [9], True))
        scarce.assert_says([*first, 5, 8], [*second, 6, 9])


@pytest.mark.device
class TestRemove:
    def test_a_tail_is_forgotten(self, kit: Kit) -> None:
        tokens, other = prompt_of(12), prompt_of(9, 1)
        kit.launch((0, 0, tokens, True), (1, 0, other, True))
        changed = [*tokens[:8], 77, 78]
        if kit.remove(0, 8):
            assert not kit.recurrent
            kit.launch((0, 8, changed[8:], True), (1, 9, [5], True))
        else:  # then all of it is gone
            assert kit.recurrent
            kit.launch((0, 0, changed, True), (1, 9, [5], True))
        kit.assert_says(changed, [*other, 5])

    def test_a_whole_sequence_is_forgotten(self, kit: Kit) -> None:
        kit.launch((0, 0, prompt_of(12), True), (1, 0, prompt_of(9, 1), True))
        assert kit.remove(0, 0)
        kit.launch((0, 0, prompt_of(7, 5), True), (1, 9, [5], True))
        kit.assert_says(prompt_of(7, 5), [*prompt_of(9, 1), 5])

    def test_nothing_is_there_to_forget(self, kit: Kit) -> None:
        assert kit.remove(3, 0)
        assert kit.remove(3, 5)
        kit.launch((0, 0, prompt_of(12), True))
        assert kit.remove(0, 12)
        kit.launch((0, 12, [7], True))
        kit.assert_says([*prompt_of(12), 7])

    def test_a_filler_is_forgotten(self, kit: Kit) -> None:
        """As the scheduler does to gaps between sequences, where the memory can."""
        if kit.recurrent:
            assert kit.remove(1, 0)
            return
        kit.launch(*((i, 0, prompt_of(6, i), True) for i in (0, 1, 3)))
        kit.launch((0, 6, [4], True), (1, 6, [0], False), (2, 0, [0], False), (3, 6, [4], True))
        kit.assert_says([*prompt_of(6), 4], [*prompt_of(6, 3), 4])
        assert kit.remove(1, 6)
        assert kit.remove(2, 0)
        kit.launch((1, 6, [8], True), (2, 0, prompt_of(5), True))
        kit.assert_says([*prompt_of(6, 1), 8], prompt_of(5))


class TestFull:
    def test_nothing_is_changed_when_no_cells_are_left(self, scarce: Kit) -> None:
        tokens = prompt_of(220)
        for first in range(0, 192, N_BATCH):
            scarce.launch((0, first, tokens[first : first + N_BATCH], False))
        scarce.launch((0, 192, tokens[192:], True))
        for _ in range(2):
            with pytest.raises(ContextFullError, match="cells"):
                scarce.launch_and_sample((1, 0, prompt_of(37, 1), True))
        scarce.launch((0, 220, [6], True), (2, 0, prompt_of(9, 2), True))
        scarce.assert_says([*tokens, 6], prompt_of(9, 2))
        assert scarce.remove(0, 0)
        scarce.launch((1, 0, prompt_of(37, 1), True))
        scarce.assert_says(prompt_of(37, 1))

    def test_every_cell_can_be_used(self, scarce: Kit) -> None:
        for i in range(N_SEQ):
            scarce.launch((i, 0, prompt_of(N_CTX // N_SEQ, i), True))
        with pytest.raises(ContextFullError):
            scarce.launch_and_sample((2, N_CTX // N_SEQ, [1], True))
        assert scarce.remove(0, N_CTX // N_SEQ - 1)
        scarce.launch((2, N_CTX // N_SEQ, [1], True))
        scarce.assert_says([*prompt_of(N_CTX // N_SEQ, 2), 1])


@pytest.mark.device
class TestCopies:
    def test_a_copy_goes_its_own_way(self, kit: Kit) -> None:
        tokens = prompt_of(40)
        kit.launch((1, 0, tokens, True))
        kit.sample()
        n = 40 if kit.recurrent else 33
        assert kit.copy(1, 3, n)
        kit.launch((3, n, [*tokens[n:], 8], True), (1, 40, [9], True))
        kit.assert_says([*tokens, 8], [*tokens, 9])

    def test_saved_cells_outlive_their_sequence(self, kit: Kit) -> None:
        tokens = prompt_of(40)
        kit.launch((1, 0, tokens, True))
        kit.sample()
        assert (kit.save(1, 2**30) or 0) >= 40
        kit.remove(1, 0)
        kit.launch((1, 0, prompt_of(17, 5), True), (0, 0, prompt_of(9, 6), True))
        kit.assert_says(prompt_of(17, 5), prompt_of(9, 6))
        for slot, n in ((2, 40), (3, 40 if kit.recurrent else 21)):  # as often as wanted, whole or in part
            assert kit.restore(slot, n)
            kit.launch((slot, n, [*tokens[n:], 8], True))
            kit.assert_says([*tokens, 8])
        kit.executor.change_cells([Forget(0), Remove(1, 0)])
        assert not kit.restore(1, 40)

    def test_a_sequence_that_is_too_large_is_not_saved(self, kit: Kit) -> None:
        kit.launch((0, 0, prompt_of(40), True))
        kit.sample()
        assert kit.save(0, 39) is None
        kit.launch((0, 40, [8], True))
        kit.assert_says([*prompt_of(40), 8])

    def test_no_cells_are_left_for_saved_ones(self, scarce: Kit) -> None:
        kit = scarce
        tokens = prompt_of(64)
        kit.launch((0, 0, tokens, True))
        kit.sample()
        assert kit.save(0, 2**30) is not None
        for slot in (1, 2):
            kit.launch((slot, 0, prompt_of(60, slot), True))
            kit.sample()
            kit.launch((slot, 60, prompt_of(30, 7), True))
            kit.sample()
        assert not kit.restore(3, 64)  # 12 cells are free
        kit.launch((3, 0, prompt_of(5), True), (0, 64, [8], True), (1, 90, [7], True))
        kit.assert_says(prompt_of(5), [*tokens, 8], [*prompt_of(60, 1), *prompt_of(30, 7), 7])
        kit.remove(3, 0)
        kit.remove(0, 0)
        assert kit.restore(3, 64)
        kit.launch((3, 64, [8], True))
        kit.assert_says([*tokens, 8])


class TestSample:
    @pytest.mark.parametrize("make", DAMAGED)
    def test_a_row_without_a_finite_logit_gives_none(self, models: dict[str, Model], make: str) -> None:
        with DAMAGED[make](models) as kit:
            kit.launch((0, 0, prompt_of(4), True), (1, 0, [3, BROKEN], True), (2, 0, prompt_of(5, 2), True))
            first, second, third = kit.sample()
            assert second == NoToken.NO_FINITE_LOGIT
            assert (first, third) == (kit.says(prompt_of(4)), kit.says(prompt_of(5, 2)))
            assert kit.remove(1, 0)
            kit.launch((0, 4, [3], True), (1, 0, prompt_of(9), True))
            kit.assert_says([*prompt_of(4), 3], prompt_of(9))

    def test_the_sampler_is_told_of_its_token(self, models: dict[str, Model]) -> None:
        """With a penalty that forbids what was said, a second look at the row says something else."""
        with steps(models) as kit, greedy(models["attention"]) as sampler:
            sampler.set_penalties(8, presence=1000.0)
            kit.launch((0, 0, prompt_of(4), True))
            said = [kit.executor.sample(kit.step, kit.rows, [sampler])[0] for _ in range(4)]
        assert len(set(said)) == 4

    @pytest.mark.device
    def test_each_row_goes_through_its_own_sampler(self, models: dict[str, Model]) -> None:
        model = models["attention"]
        with steps(models) as kit, greedy(model) as plain, greedy(model) as biased:
            biased.set_bias({33: 1000.0})
            kit.launch(*((i, 0, prompt_of(4), True) for i in range(3)))
            said = kit.executor.sample(kit.step, kit.rows, [plain, biased, plain])
            assert said == [kit.says(prompt_of(4)), 33, kit.says(prompt_of(4))]

    def test_a_row_that_is_none_is_refused(self, models: dict[str, Model]) -> None:
        with steps(models) as kit:
            kit.launch((0, 0, prompt_of(4), True))
            kit.rows = [1]
            with pytest.raises(RuntimeError, match="is not an output"):
                kit.sample()


class TestOwner:
    def test_one_thread_uses_it(self, kit: Kit) -> None:
        kit.launch((0, 0, prompt_of(4), True))
        for use in (lambda: kit.launch((0, 4, [1], True)), lambda: kit.remove(0, 0)):
            with pytest.raises(RuntimeError, match="belongs to another thread"):
                Worker(use).result()
        kit.assert_says(prompt_of(4))

    def test_nothing_works_after_close(self, kit: Kit) -> None:
        kit.launch((0, 0, prompt_of(4), True))
        kit.executor.close()
        kit.executor.close()
        for use in (lambda: kit.launch((0, 4, [1], True)), kit.sample, lambda: kit.remove(0, 0)):
            with pytest.raises(EngineClosedError, match="the context is closed"):
                use()


@pytest.mark.device
class TestWalk:
    @pytest.mark.parametrize("seed", range(1 if ON_DEVICE else 3))
    def test_whatever_is_launched_and_removed(self, kit: Kit, seed: int) -> None:
        """Many steps of random runs and removals: each row continues what its sequence then holds."""
        chance = random.Random(seed)
        sequences: list[list[int]] = [[] for _ in range(N_SEQ)]
        for _ in range(60):
            if chance.random() < 0.3:
                i = chance.randrange(N_SEQ)
                keep = chance.randint(0, len(sequences[i]))
                if kit.remove(i, keep):
                    del sequences[i][keep:]
                else:
                    sequences[i].clear()
            chosen = [i for i in range(N_SEQ) if chance.random() < 0.7 and len(sequences[i]) < 50]
            if not chosen:
                continue
            chance.shuffle(chosen)
            runs, rows = [], []
            for i in chosen:
                run = [chance.randrange(95) for _ in range(chance.choice([1, 1, 1, 2, 5, 14]))]
                output = chance.random() < 0.8
                runs.append((i, len(sequences[i]), run, output))
                sequences[i] += run
                if output:
                    rows.append(list(sequences[i]))
            kit.launch(*runs)
            kit.assert_says(*rows)


class TestRecurrentModel:
    """An engine on a memory that cannot forget a part: what is cut is computed again."""

    @pytest.fixture
    def engine(self, models: dict[str, Model]) -> Iterator[lp.Engine]:
        with lp.Engine(models["recurrent"], n_ctx=N_CTX, n_seq_max=3, n_threads=1) as engine:
            yield engine
            engine.check_integrity()

    def greedy_alone(self, model: Model, tokens: Sequence[int], n: int) -> list[int]:
        """Up to `n` tokens after `tokens`, up to the end of generation or where rounding may choose."""
        generated: list[int] = []
        with Alone(model, RECURRENT_CLOSE) as alone:
            while len(generated) < n:
                token = alone([*tokens, *generated])
                if token is None or model.is_eog(token):
                    break
                generated.append(token)
        return generated

    @pytest.mark.device
    def test_many_at_once_are_as_alone(self, engine: lp.Engine, models: dict[str, Model]) -> None:
        prompts = [prompt_of(n, n) for n in (1, 4, 9, 33, 70)]
        params = lp.SamplingParams(temperature=0, max_tokens=12)
        for prompt, out in zip(prompts, engine.generate(prompts, params), strict=True):
            expected = self.greedy_alone(models["recurrent"], prompt, 12)
            assert len(expected) > 3
            assert out.token_ids[: len(expected)] == expected

    def test_a_generation_can_be_cut_and_lengthened(
        self, engine: lp.Engine, models: dict[str, Model]
    ) -> None:
        params = lp.SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
        with engine.start(prompt_of(20), params) as generation:
            for _ in range(6):
                assert generation.next() is not None
            generation.trim(11)
            generation.append([3, 4])
            expected = self.greedy_alone(models["recurrent"], [*prompt_of(20)[:11], 3, 4], 5)
            assert len(expected) > 1
            tokens = [generation.next() for _ in expected]
            assert [token and token.id for token in tokens] == expected
