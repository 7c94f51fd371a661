"""Images whose rows have a height and a width (M-RoPE): llama.cpp's numbers, whatever happens to the cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.eager_gate import EagerGate
from support.gguf_document import Document
from support.media_models import model_with_grids, picture, qwen2vl_projector, qwen3vl_projector
from support.mtmd_reference import MARKER, Reference

import llamapipe as lp
from llamapipe._engine.policy.core import MediaRows
from llamapipe._engine.runtime.disk_cache import MIN_GAIN
from llamapipe._engine.runtime.executor import StepExecutor
from llamapipe.errors import ContextFullError
from llamapipe.llama.context import Context
from llamapipe.llama.native_pipeline import engine_pipeline
from llamapipe.llama.projector import MediaChunk
from llamapipe.media.decode import Given

ONE = lp.SamplingParams(max_tokens=1, logprobs=20, temperature=0, ignore_eos=True)
# ggml's flash attention rounds otherwise where a batch has many rows.
CELLS: Any = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
SIZES = [(200, 120), (64, 320), (320, 64), (96, 96)]


PROJECTORS = {"qwen2vl": qwen2vl_projector, "qwen3vl": qwen3vl_projector}


@pytest.fixture(scope="module", params=PROJECTORS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """Weights of 32 bits: what differs is wrong, and no rounding."""
    folder = tmp_path_factory.mktemp("grids")
    document = Document.read(model_with_grids(folder / "q8.gguf", request.param))
    for i, tensor in enumerate(document.tensors):
        kind = gguf.GGMLQuantizationType(tensor.kind)
        if kind != gguf.GGMLQuantizationType.F32:
            n = int(np.prod(tensor.dims))
            n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
            raw = np.frombuffer(tensor.data, np.uint8, n // n_block * n_bytes).reshape(-1, n_bytes)
            values = gguf.dequantize(raw, kind).astype(np.float32)
            document.tensors[i] = tensor.__class__(tensor.name, tensor.dims, 0, values.tobytes())
    path = folder / "f32.gguf"
    document.write(path)
    mmproj = PROJECTORS[request.param](folder / "mmproj.gguf")
    with lp.Model(path, mmproj=mmproj, kernels="ggml") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference(model: lp.Model) -> Iterator[Reference]:
    assert model.projector is not None
    libmtmd = Reference(model, model.projector.path, **CELLS)
    yield libmtmd
    libmtmd.close()


def question(*seeds: int, text: str = "Look: ") -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with an image for each seed, whose sizes differ; and the images."""
    images = [picture(*SIZES[seed % len(SIZES)], seed) for seed in seeds]
    content: list[Any] = [text]
    for image in images:
        content += [{"type": "image", "image": image}, " and then "]
    return [{"role": "user", "content": content}], images


def expected(model: lp.Model, reference: Reference, messages: list[dict[str, Any]]) -> Any:
    """llama.cpp's log-probabilities after the prompt."""
    shown = [
        {**message, "content": [MARKER if isinstance(p, dict) else p for p in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    images = [
        p["image"]
        for m in messages
        for p in (m["content"] if isinstance(m["content"], list) else ())
        if isinstance(p, dict)
    ]
    return reference.logprobs(model.render_chat(shown), images)[1]


def check(completion: lp.ChatCompletion, wanted: Any) -> None:
    """The first token's probabilities are those."""
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    for entry in logprobs[0].top:
        assert abs(float(wanted[entry.id]) - entry.logprob) < 1e-4


@pytest.mark.parametrize("seeds", [(0,), (1,), (2, 3), (0, 1, 2, 3)])
def test_images_give_the_probabilities_of_libmtmd(
    model: lp.Model, reference: Reference, seeds: tuple[int, ...]
) -> None:
    messages, _ = question(*seeds)
    with lp.Engine(model, **CELLS, n_ctx=512, n_seq_max=1) as engine:
        check(engine.chat(messages, ONE), expected(model, reference, messages))
        engine.check_integrity()


@pytest.mark.parametrize(
    ("options", "tuning"),
    [
        ({}, {}),
        ({}, {"pipeline_depth": 2}),
        ({"n_cells": 2048}, {}),
        ({"n_cells": 2048}, {"n_batch": 16, "n_ubatch": 16}),
        ({}, {"n_batch": 16, "n_ubatch": 8}),
    ],
)
def test_many_beside_each_other(
    model: lp.Model, reference: Reference, options: dict[str, Any], tuning: dict[str, Any]
) -> None:
    asked = [question(i, i + 1, text="The same text before, as long as it may be: ")[0] for i in range(6)]
    asked += [[{"role": "user", "content": f"No image {i}"}] for i in range(3)]
    with lp.Engine(
        model, **CELLS, n_ctx=512, n_seq_max=3, tuning=lp.EngineTuning(**tuning), **options
    ) as engine:
        for again in (False, True):
            n_cached = 0
            for messages, completion in zip(asked, engine.chat(asked, ONE), strict=True):
                check(completion, expected(model, reference, messages))
                n_cached += completion.n_cached_tokens
            assert n_cached > (300 if again else 0)
            engine.check_integrity()


@pytest.mark.parametrize("options", [{}, {"n_cells": 1024}])
def test_turns_continue_the_cells_of_the_turn_before(
    model: lp.Model, reference: Reference, options: dict[str, Any]
) -> None:
    messages, _ = question(0, 3)
    params = lp.SamplingParams(max_tokens=9, logprobs=20, temperature=0, ignore_eos=True)
    with lp.Engine(model, **CELLS, n_ctx=512, n_seq_max=2, **options) as engine:
        for turn in range(3):
            completion = engine.chat(messages, params)
            assert turn == 0 or completion.n_cached_tokens > 50
            check(completion, expected(model, reference, messages))
            messages = [
                *messages,
                {"role": "assistant", "content": completion.content},
                question(turn + 1)[0][0],
            ]
        engine.check_integrity()


def test_cells_that_were_saved_come_back_with_their_positions(model: lp.Model, reference: Reference) -> None:
    asked = [question(i, i + 1, text=f"{i} pictures of " * 4)[0] for i in range(5)]
    # One slot: the cells of each request make room for the next one's.
    with lp.Engine(model, **CELLS, n_ctx=512, n_seq_max=1) as engine:
        for again in (False, True):
            for messages in asked:
                completion = engine.chat(messages, ONE)
                check(completion, expected(model, reference, messages))
                assert completion.n_cached_tokens > 50 or not again
        engine.check_integrity()


def test_images_in_part(model: lp.Model, reference: Reference) -> None:
    """A request that is cancelled while a long image is computed leaves cells that cannot be divided."""
    messages, _ = question(0)
    tuning = lp.EngineTuning(n_batch=8, n_ubatch=8)
    with lp.Engine(model, **CELLS, n_ctx=512, n_seq_max=2, tuning=tuning) as engine:
        for i in range(12):
            other, _ = question(4 + i)
            before = engine.stats().steps
            stream = engine.stream_chat(other, ONE)
            while (stats := engine.stats()).steps < before + i % 6 and stats.n_active + stats.n_queued:
                pass
            stream.close()
            check(engine.chat(other, ONE), expected(model, reference, other))
        check(engine.chat(messages, ONE), expected(model, reference, messages))
        engine.check_integrity()


def test_guesses_after_an_image(model: lp.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamapipe._engine.assembly.Gate", EagerGate)
    messages, _ = question(0, 1)
    plain = lp.SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, speculate="off")
    with lp.Engine(model, **CELLS, n_ctx=512, n_seq_max=2) as engine:
        said = engine.chat(messages, plain)
        guessed = engine.chat(
            messages,
            lp.SamplingParams(
                max_tokens=60,
                temperature=0,
                ignore_eos=True,
                prediction=said.content[:40] + "?" + said.content[41:],
            ),
        )
        assert guessed.content == said.content
        assert engine.stats().n_accepted > 0
        engine.check_integrity()


def test_the_saved_cache_leaves_images_out(model: lp.Model, tmp_path: Path) -> None:
    text = "A text that is long enough to be kept, word by word by word, until there are enough words. " * 3
    messages, _ = question(0, text="Look at this, and say what it is: ")
    options: Any = {**CELLS, "n_ctx": 512, "n_seq_max": 4, "cache_dir": tmp_path / "cache"}
    with lp.Engine(model, **options) as engine:
        n_image = engine.chat(messages, ONE).n_prompt_tokens
        n_prompt = engine.generate(text, ONE).n_prompt_tokens
    assert min(n_image, n_prompt) > MIN_GAIN
    assert len([*tmp_path.glob("cache/*/*")]) == 1
    with lp.Engine(model, **options) as engine:
        assert engine.generate(text, ONE).n_cached_tokens >= n_prompt - 2
        assert engine.chat(messages, ONE).n_cached_tokens < 10


def test_a_launch_that_was_refused_leaves_no_positions_behind(model: lp.Model) -> None:
    """The next request in its slot is text, which has a position for each token."""
    assert model.projector is not None
    (image,) = (
        part
        for part in model.projector.media(Given("image", picture(200, 120), "here")).parts
        if isinstance(part, MediaChunk)
    )
    model.projector.encode(image, 1)
    context = Context(model, n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
    with closing(StepExecutor(engine_pipeline(context, "auto", 1))) as executor:

        def launch(begin: int, n: int, media: Sequence[MediaRows] = ()) -> None:
            executor.launch([5] * n, range(begin, begin + n), [0] * n, [0] * n, media=media)

        n_left = image.n - 1
        launch(0, context.n_cells - n_left)
        begin = executor.sequence_end(0)
        with pytest.raises(ContextFullError):
            launch(begin, image.n, [MediaRows(0, image.n, image, 0)])
        assert executor.sequence_end(0) == begin
        launch(begin, n_left)
        assert executor.sequence_end(0) == context.n_cells
