"""Requests with different LoRAs in one engine: each text is what that adapter gives alone, and nobody starves."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from support.adapters import make_adapter, merged
from support.dflash_models import dflash_draft
from support.gguf_models import (
    hybrid_model,
    recurrent_model,
    sliding_window_model,
    tiny_architecture,
    tiny_model,
)

import llamapipe as lp
from llamapipe.errors import DecodeError, InvalidRequestError

PROMPT = [1, 40, 77, 103, 55, 61, 92, 38, 99, 120, 47, 88, 130, 42, 51, 66, 73, 81]
CHOICES: tuple[dict[str | lp.Adapter, float] | str | None, ...] = (
    None,
    "a",
    "b",
    {"a": -0.7},
    {"a": 0.5, "b": 1.5},
)


def params(adapter: object = None, **more: object) -> lp.SamplingParams:
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "adapter": adapter, **more}
    return lp.SamplingParams(**options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("adapters") / "tiny.gguf", type_name="f32")


@pytest.fixture(scope="module")
def files(path: Path) -> list[Path]:
    return [make_adapter(path.with_name(f"{name}.gguf"), path, seed=i, rank=4) for i, name in enumerate("ab")]


@pytest.fixture(scope="module", params=["auto", "ggml"])
def model(path: Path, files: list[Path], request: pytest.FixtureRequest) -> Iterator[lp.Model]:
    """With llamapipe's kernels requests with LoRAs share steps; with ggml's all sets take turns."""
    with lp.Model(path, kernels=request.param) as model:
        for file in files:
            model.load_adapter(file)
        yield model


def engine_of(model: lp.Model, **options: object) -> lp.Engine:
    # Rows must not depend on what else a step computes, and cells be as exact as weights.
    settings = {"n_ctx": 96, "n_seq_max": 4, "n_threads": 1, "type_k": "f32", "type_v": "f32", **options}
    return lp.Engine(model, **settings)  # type: ignore[arg-type]


def prompt_of(i: int) -> list[int]:
    return [*PROMPT[: 4 + i % 14], 33 + i]


def text(engine: lp.Engine, i: int, choice: object) -> list[int]:
    return list(engine.generate(prompt_of(i), params(choice)).token_ids)


@pytest.fixture(scope="module")
def alone(model: lp.Model) -> dict[tuple[int, int], list[int]]:
    """The tokens for each prompt and choice, in an engine that computes nothing else."""
    tokens = {}
    for c, choice in enumerate(CHOICES):
        with engine_of(model, n_seq_max=1, prefix_cache=False) as engine:
            for i in range(16):
                tokens[i, c] = text(engine, i, choice)
    assert len({tuple(tokens[3, c]) for c in range(len(CHOICES))}) == len(CHOICES), (
        "the adapters change nothing"
    )
    return tokens


def test_texts_are_those_of_the_merged_model(
    tmp_path: Path, path: Path, files: list[Path], model: lp.Model, alone: dict[tuple[int, int], list[int]]
) -> None:
    if not model.attends:
        pytest.skip("prompt 7 has a near tie with ggml's kernels")
    for c, used in ((1, [(files[0], 1.0)]), (4, [(files[0], 0.5), (files[1], 1.5)])):
        with lp.Model(merged(tmp_path / f"{c}.gguf", path, used)) as whole, engine_of(whole) as engine:
            assert [text(engine, i, None) for i in range(8)] == [alone[i, c] for i in range(8)]


@pytest.mark.parametrize(
    "options",
    [{}, {"n_cells": 128}, {"prefix_cache": False}, {"cache_bytes": 0}, {"max_itl_ms": 1},
     {"tuning": lp.EngineTuning(pipeline_depth=2)}, {"tuning": lp.EngineTuning(n_batch=16, n_ubatch=4)}],
    ids=["default", "few cells", "no cache", "no host memory", "short turns", "threaded", "small steps"],
)  # fmt: skip
def test_many_callers_with_five_sets(
    model: lp.Model, alone: dict[tuple[int, int], list[int]], options: dict[str, object]
) -> None:
    if not model.attends and "n_cells" in options:
        pytest.skip("prompt 6 has a near tie, and ggml's attention depends on the order of unified cells")
    wrong: list[object] = []
    with engine_of(model, **options) as engine:

        def calls(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(6):
                i, c = rng.randrange(16), rng.randrange(5)
                if rng.random() < 0.2:  # leaves in the middle
                    with engine.stream(prompt_of(i), params(CHOICES[c])) as stream:
                        got = [*next(stream).token_ids]
                    if got != alone[i, c][: len(got)]:
                        wrong.append((i, c, got))
                elif (tokens := text(engine, i, CHOICES[c])) != alone[i, c]:
                    wrong.append((i, c, tokens))

        threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.check_integrity()
    assert not wrong


def test_a_list_with_params_of_several_sets(model: lp.Model, alone: dict[tuple[int, int], list[int]]) -> None:
    pairs = [(i, c) for i in range(4) for c in range(5)]
    with engine_of(model) as engine:
        completions = engine.generate(
            [prompt_of(i) for i, _ in pairs], [params(CHOICES[c]) for _, c in pairs]
        )
    assert [list(completion.token_ids) for completion in completions] == [alone[pair] for pair in pairs]


def test_tasks_get_the_texts_of_their_sets(model: lp.Model, alone: dict[tuple[int, int], list[int]]) -> None:
    async def run() -> None:
        async with engine_of(model) as engine:
            completions = await asyncio.gather(
                *(engine.agenerate(prompt_of(2), params(choice)) for choice in CHOICES)
            )
        assert [list(completion.token_ids) for completion in completions] == [alone[2, c] for c in range(5)]

    asyncio.run(run())


def test_cells_of_one_set_are_never_anothers(model: lp.Model) -> None:
    with engine_of(model) as engine:
        assert engine.stats().n_adapter_changes == 0
        first: tuple[object, ...] = ("a", None, {"a": 0.5}, "b")
        for choice in first:
            assert engine.generate(PROMPT, params(choice)).n_cached_tokens == 0
        assert engine.stats().n_adapter_changes == (1 if model.attends else 4)
        for choice in (*first, {"a": 1}, {"b": 1.0, "a": 0}):
            assert engine.generate(PROMPT, params(choice)).n_cached_tokens == len(PROMPT) - 1


@pytest.mark.native
@pytest.mark.parametrize("make", [hybrid_model, recurrent_model])
def test_states_of_one_set_are_never_anothers(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """States are kept and copied for each set, as cells are; with a LoRA each text is the merged model's."""
    path = make(tmp_path / "model.gguf")
    matrices = (
        r"blk\.\d+\.(?:attn_.|attn_output|ffn_(?:gate|up|down)|shortconv\.\w+_proj|ssm_(?:in|out))\.weight"
    )
    lora = make_adapter(tmp_path / "lora.gguf", path, matrices=matrices)
    prompts = [[*(t % 120 + 5 for t in PROMPT * 3), *range(40, 40 + i % 7), 33 + i] for i in range(8)] * 2
    texts = {}
    for name, file in (("none", path), ("lora", merged(tmp_path / "merged.gguf", path, [(lora, 1.0)]))):
        with lp.Model(file) as model, engine_of(model, n_seq_max=1, prefix_cache=False) as engine:
            texts[name] = [engine.generate(prompt, params()).token_ids for prompt in prompts]
    assert texts["none"] != texts["lora"], "the adapter changes nothing"
    with lp.Model(path) as model:
        model.load_adapter(lora, name="lora")
        sets = ["none", "lora"] * len(prompts)
        with engine_of(model, n_seq_max=3) as engine:
            completions = engine.generate(
                [prompt for prompt in prompts for _ in range(2)],
                [params(None if name == "none" else name) for name in sets],
            )
            assert engine.stats().n_cache_hit_tokens > 0
    assert [c.token_ids for c in completions[::2]] == texts["none"]
    assert [c.token_ids for c in completions[1::2]] == texts["lora"]


def test_requests_with_loras_share_steps(model: lp.Model, alone: dict[tuple[int, int], list[int]]) -> None:
    """Also those with several."""
    if not model.attends:
        pytest.skip("sets take turns")
    with engine_of(model) as engine:
        completions = engine.generate([prompt_of(3)] * 4, [params(choice) for choice in CHOICES[1:]])
        assert [list(completion.token_ids) for completion in completions] == [
            alone[3, c] for c in range(1, 5)
        ]
        stats = engine.stats()
        assert stats.n_adapter_changes == 1
        assert stats.steps <= 13


@pytest.mark.native
@pytest.mark.parametrize("ring", ["auto", "off"])
def test_prompts_longer_than_a_ubatch_beside_windows(tmp_path: Path, ring: Literal["auto", "off"]) -> None:
    """Rows are told apart where batches are cut here, and else the sets take turns."""
    path = sliding_window_model(tmp_path / "model.gguf")
    prompt = [3 + (i * 7 + i * i) % 120 for i in range(150)]
    with lp.Model(path) as model:
        for i, name in enumerate("ab"):
            matrices = r"blk\.\d+\.attn_(?:q|k|v|output)\.weight"
            model.load_adapter(make_adapter(tmp_path / f"{name}.gguf", path, seed=i, matrices=matrices), name)
        tuning = lp.EngineTuning(n_ubatch=32, ring=ring)
        choices = [params(choice, max_tokens=6) for choice in ("a", "b", None)]
        with lp.Engine(model, n_ctx=256, n_seq_max=4, n_threads=1, tuning=tuning) as engine:
            together = engine.generate([prompt] * 3, choices)
            n_changes = engine.stats().n_adapter_changes
            alone = [engine.generate(prompt, choice) for choice in choices]
            assert [completion.token_ids for completion in together] == [
                completion.token_ids for completion in alone
            ]
            assert len({tuple(completion.token_ids) for completion in alone}) == 3
            if model.attends:
                assert (n_changes == 1) == (ring == "auto")


@pytest.mark.native
@pytest.mark.parametrize("type_name", ["F32", "F16"])
def test_paths_differ_by_the_rounding_of_ggml(tmp_path: Path, type_name: str) -> None:
    """Without a ring, ggml multiplies by a LoRA, and rounds activations to its F16. Nothing else makes a difference.

    The reference has the LoRA merged into weights of F32.
    """
    path = tiny_architecture(tmp_path / "model.gguf", "gemma3-270m", type_name="f32")
    file = make_adapter(tmp_path / "a.gguf", path, type_name=type_name, strength=0.7)
    merged(whole := tmp_path / "whole.gguf", path, [(file, 1.0)])
    prompt = np.random.default_rng(5).integers(20, 400, 120).tolist()

    def logprobs(kernels: Literal["auto", "ggml"], which: Path, **options: object) -> npt.NDArray[np.float64]:
        with lp.Model(which, kernels=kernels) as model:
            adapter = None if which == whole else model.load_adapter(file, "a").name
            with engine_of(model, n_ctx=256, prefix_cache=False, **options) as engine:
                return np.array(engine.score_tokens(prompt, adapter=adapter).logprobs[1:], np.float64)

    def error(rows: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
        return float(np.abs(rows - other).mean())

    options: tuple[dict[str, object], ...] = (
        {},
        {"tuning": lp.EngineTuning(ring="off")},
        {"tuning": lp.EngineTuning(swa_full=False)},
    )
    ring, off, window = (logprobs("ggml", path, **settings) for settings in options)
    assert (ring == off).all() and (off == window).all()
    ring, off, window = (logprobs("auto", path, **settings) for settings in options)
    right = logprobs("auto", whole)
    assert (off == window).all()
    assert error(ring, right) < error(off, right) + 1e-3  # the ring's path is the more exact one
    assert error(off, right) < (0.005 if type_name == "F32" else 0.05)


def test_adapters_that_nobody_uses_are_dropped(
    model: lp.Model, alone: dict[tuple[int, int], list[int]]
) -> None:
    """At once where sets take turns; where they share steps, after so many that changes take little of the time."""
    with engine_of(model, n_ctx=4096) as engine:
        assert text(engine, 3, "a") == alone[3, 1]
        changes = engine.stats().n_adapter_changes
        with engine.stream(PROMPT, params(max_tokens=4000)) as stream:
            for _ in stream:
                if engine.stats().n_adapter_changes > changes:
                    break
        assert engine.stats().n_adapter_changes == changes + 1


def test_forks_and_snapshots_keep_their_set(model: lp.Model, alone: dict[tuple[int, int], list[int]]) -> None:
    def rest(generation: lp.Generation) -> list[int]:
        return [token.id for token in generation]

    with engine_of(model) as engine, engine_of(model, n_seq_max=2) as other:
        for c in (1, 0, 4):
            generation = engine.start(prompt_of(5), params(CHOICES[c]))
            begin = [generation.next().id for _ in range(4)]  # type: ignore[union-attr]
            fork, snapshot = generation.fork(), generation.snapshot()
            engine.generate(prompt_of(9), params("b"))  # another turn
            for _ in range(2):
                assert [*begin, *rest(fork)] == alone[5, c]
                fork = other.restore(snapshot, params(CHOICES[c], max_tokens=8))
            assert [*begin, *rest(fork)] == alone[5, c]
            assert [*begin, *rest(generation)] == alone[5, c]
            wrong = params(CHOICES[(c + 1) % 5])
            with pytest.raises(InvalidRequestError, match=r"restore it with the SamplingParams\.adapter"):
                other.restore(snapshot, wrong)


def test_an_adapter_may_be_closed_while_requests_use_it(
    path: Path, files: list[Path], alone: dict[tuple[int, int], list[int]]
) -> None:
    with lp.Model(path) as model, engine_of(model) as engine:
        adapter = model.load_adapter(files[0])
        with engine.stream(prompt_of(3), params(adapter)) as stream:
            got = [*next(stream).token_ids]
            adapter.close()
            got += [token for delta in stream for token in delta.token_ids]
        assert got == alone[3, 1]
        with pytest.raises(InvalidRequestError, match="no adapter 'a'; loaded are: none"):
            engine.generate(PROMPT, params("a"))
        with pytest.raises(InvalidRequestError, match="'a' is closed"):
            engine.generate(PROMPT, params(adapter))
        model.load_adapter(files[1], "a")  # another file with the same name shares no cells
        assert text(engine, 3, "a") == alone[3, 2]


@pytest.mark.native
def test_loads_while_steps_run(
    path: Path, files: list[Path], alone: dict[tuple[int, int], list[int]]
) -> None:
    with lp.Model(path) as model, engine_of(model) as engine:
        model.load_adapter(files[0], "a")
        stop = threading.Event()
        wrong: list[object] = []

        def work() -> None:
            while not stop.is_set():
                wrong.extend(c for c in (0, 1) if text(engine, 3, CHOICES[c]) != alone[3, c])

        thread = threading.Thread(target=work)
        thread.start()
        for i in range(10):
            with model.load_adapter(files[1], f"b{i}") as adapter:
                assert text(engine, 4, adapter) == alone[4, 2]
        stop.set()
        thread.join()
        assert not wrong


def test_which_adapters_requests_may_name(model: lp.Model, path: Path, files: list[Path]) -> None:
    a, b = model.adapters.loaded()
    with engine_of(model, adapters=[a]) as engine:
        engine.generate(PROMPT, params("a"))
        for choice, message in (("b", "no adapter 'b'; loaded are: 'a'"), (b, "is not one of Engine")):
            for scaled in (choice, {choice: 0}):  # one that is scaled by 0 must be there, too
                with pytest.raises(InvalidRequestError, match=message):
                    engine.generate(PROMPT, params(scaled))
    with lp.Model(path) as second, second.load_adapter(files[0]) as foreign, engine_of(model) as engine:
        for scale in (0, 1):
            with pytest.raises(InvalidRequestError, match="loaded for another model"):
                engine.generate(PROMPT, params({foreign: scale}))
        with pytest.raises(InvalidRequestError, match="loaded for another model"):
            engine.generate(PROMPT, params(foreign))
        for scale in (0, 1):
            with pytest.raises(InvalidRequestError, match="twice"):
                engine.generate(PROMPT, params({"a": scale, a: 2}))
    for wrong, error in (
        ("a", TypeError),
        ([3], TypeError),
        (None, TypeError),
        (["no"], InvalidRequestError),
    ):
        with pytest.raises(error, match="adapter"):
            engine_of(model, adapters=wrong)


def test_a_scale_that_is_too_large_is_named(tmp_path: Path, model: lp.Model, path: Path) -> None:
    file = make_adapter(tmp_path / "huge.gguf", path, strength=1e18)
    with model.load_adapter(file, "huge"), engine_of(model) as engine:
        with pytest.raises(DecodeError, match=r"or the scale of an adapter is too large$"):
            engine.generate(PROMPT, params({"huge": 1000}))
        assert engine.generate(PROMPT, params()).token_ids
        engine.check_integrity()


@pytest.mark.parametrize(
    ("value", "error"),
    [(3, TypeError), ("", ValueError), ({}, ValueError), ({"a": float("nan")}, ValueError), ({"a": 2000}, ValueError),
     ({"a": "1"}, TypeError), ({3: 1.0}, TypeError), (["a"], TypeError)],
)  # fmt: skip
def test_wrong_choices_are_refused(value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        params(value)


def test_a_prefix_of_an_adapter(model: lp.Model) -> None:
    with engine_of(model) as engine, engine.cache_prefix(PROMPT):
        assert engine.generate([*PROMPT, 44], params()).n_cached_tokens == len(PROMPT)
        assert engine.generate([*PROMPT, 44], params("a")).n_cached_tokens == 0
    with engine_of(model) as engine, engine.cache_prefix(PROMPT, adapter="a"):
        assert engine.generate([*PROMPT, 44], params("a")).n_cached_tokens == len(PROMPT)
        assert engine.generate([*PROMPT, 44], params()).n_cached_tokens == 0


def test_scores_with_an_adapter(tmp_path: Path, model: lp.Model, path: Path, files: list[Path]) -> None:
    whole = merged(tmp_path / "whole.gguf", path, [(files[0], 0.5), (files[1], 1.5)])
    with lp.Model(whole) as other, engine_of(other) as engine:
        expected = engine.score(PROMPT[:6], [PROMPT[6:10], PROMPT[8:]])
        expected_tokens = engine.score_tokens(PROMPT)
        expected_ppl = engine.perplexity(PROMPT * 4, n_window=16)
    adapter: dict[str | lp.Adapter | lp.ControlVector, float] = {"a": 0.5, "b": 1.5}
    with engine_of(model) as engine:
        base = engine.score(PROMPT[:6], [PROMPT[6:10], PROMPT[8:]])
        scores = engine.score(PROMPT[:6], [PROMPT[6:10], PROMPT[8:]], adapter=adapter)
        for score, right, wrong in zip(scores, expected, base, strict=True):
            assert score.logprobs == pytest.approx(right.logprobs, abs=3e-3)
            assert score.total != pytest.approx(wrong.total, abs=0.1)
        tokens = engine.score_tokens(PROMPT, adapter=adapter)
        assert tokens.logprobs == pytest.approx(expected_tokens.logprobs, abs=3e-3)
        assert engine.perplexity(PROMPT * 4, n_window=16, adapter=adapter) == pytest.approx(
            expected_ppl, rel=1e-3
        )
        for call in (engine.score, engine.cache_prefix):
            with pytest.raises(InvalidRequestError, match="no adapter 'c'"):
                call(PROMPT, *([PROMPT] * (call == engine.score)), adapter="c")
        with pytest.raises(TypeError, match="adapter must be a name"):
            engine.score_tokens(PROMPT, adapter=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["model", "DFlash"])
def test_a_draft_model_changes_no_text(
    path: Path, model: lp.Model, alone: dict[tuple[int, int], list[int]], kind: str, tmp_path: Path
) -> None:
    """Drafts come from a model without adapters: they are guesses, which the adapter's rows accept or not."""
    pairs = [(i, c) for i in range(4) for c in range(5)]
    draft = path if kind == "model" else dflash_draft(tmp_path / "d.gguf", path, None, layers=(0, 1))
    with engine_of(model, draft=draft) as engine:
        completions = engine.generate(
            [prompt_of(i) for i, _ in pairs], [params(CHOICES[c], speculate="draft") for _, c in pairs]
        )
        engine.check_integrity()
    assert [list(completion.token_ids) for completion in completions] == [alone[pair] for pair in pairs]
