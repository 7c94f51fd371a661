"""Limits of an image's tokens: how many it has, who may set them, and that nobody takes rows of other limits."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.media_models import (
    gemma3_projector,
    idefics3_projector,
    model_with_grids,
    model_with_tile_tokens,
    picture,
    qwen2vl_projector,
    ultravox_projector,
)
from support.mtmd_reference import MARKER, Reference
from support.run_script import environment

import llamapipe as lp
from llamapipe.cli._models_file import entries_of
from llamapipe.cli.parser import UsageError
from llamapipe.gguf.mmproj import ImageTokens, check_mmproj
from llamapipe.llama.projector import MediaChunk
from llamapipe.media.decode import Given

ONE = lp.SamplingParams(max_tokens=1, logprobs=20, temperature=0, ignore_eos=True)
CELLS: Any = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model whose images have a token for each 32 × 32 pixels, from 8 to 64 of them; and its projector."""
    return model_with_grids(tmp_path / "text.gguf"), qwen2vl_projector(tmp_path / "mmproj.gguf")


def chunks(model: lp.Model, width: int, height: int) -> list[MediaChunk]:
    assert model.projector is not None
    parts = model.projector.media(Given("image", picture(width, height), "image")).parts
    return [part for part in parts if isinstance(part, MediaChunk)]


def n_tokens(model: lp.Model, width: int, height: int) -> int:
    return sum(chunk.n for chunk in chunks(model, width, height))


def question() -> list[dict[str, Any]]:
    return [{"role": "user", "content": ["Look: ", {"type": "image", "image": picture(200, 120)}, " What?"]}]


def test_an_image_has_as_many_tokens_as_the_limits_say(files: tuple[Path, Path]) -> None:
    text, mmproj = files
    assert check_mmproj(mmproj).image_tokens == ImageTokens(8, 64, 32 * 32, True)
    with lp.Model(text, mmproj=mmproj) as model:
        assert [n_tokens(model, *size) for size in [(32, 32), (200, 120), (2000, 2000)]] == [9, 24, 64]
    with lp.Model(text, mmproj=mmproj, image_max_tokens=12) as model:
        assert [n_tokens(model, *size) for size in [(32, 32), (200, 120), (2000, 2000)]] == [9, 8, 9]
    with lp.Model(text, mmproj=mmproj, image_min_tokens=30, image_max_tokens=100) as model:
        assert [n_tokens(model, *size) for size in [(32, 32), (200, 120), (2000, 2000)]] == [36, 40, 100]


@pytest.mark.parametrize("limits", [(8, 12), (30, 64)])
def test_logits_are_those_of_libmtmd_with_the_same_limits(
    files: tuple[Path, Path], limits: tuple[int, int]
) -> None:
    text, mmproj = files
    least, most = limits
    with lp.Model(
        text, mmproj=mmproj, kernels="ggml", image_min_tokens=least, image_max_tokens=most
    ) as model:
        reference = Reference(model, mmproj, image_tokens=limits, **CELLS)
        shown = model.render_chat([{"role": "user", "content": ["Look: ", MARKER, " What?"]}])
        n, wanted = reference.logprobs(shown, [picture(200, 120)])
        reference.close()
        with lp.Engine(model, **CELLS, n_ctx=512, n_seq_max=1) as engine:
            completion = engine.chat(question(), ONE)
        assert completion.n_prompt_tokens == n
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        # The model's weights are of 8 bits: what is another image differs by more.
        assert max(abs(float(wanted[entry.id]) - entry.logprob) for entry in logprobs[0].top) < 0.05


def test_rows_of_other_limits_have_other_numbers(files: tuple[Path, Path]) -> None:
    text, mmproj = files
    ids: list[Any] = []
    for most in (None, 63, 64):
        with lp.Model(text, mmproj=mmproj, image_max_tokens=most) as model:
            parts = chunks(model, 200, 120)
            assert [chunk.n for chunk in parts] == [24]
            ids.append(tuple(parts[0].ids))
    assert len(set(ids)) == 3


def test_saved_caches_do_not_mix_images_of_other_limits(files: tuple[Path, Path], tmp_path: Path) -> None:
    text, mmproj = files
    story = "Once upon a time there was a fox who lived in a wood. " * 8
    asked = [{"role": "user", "content": [story, *question()[0]["content"]]}]
    options: Any = {**CELLS, "n_ctx": 512, "n_seq_max": 2}
    answers = []
    told = [{"role": "user", "content": story}]
    for most, folder in ((64, tmp_path / "cache"), (12, tmp_path / "cache"), (12, None)):
        with (
            lp.Model(text, mmproj=mmproj, image_max_tokens=most) as model,
            lp.Engine(model, **options, cache_dir=folder) as engine,
        ):
            if most == 12 and folder is not None:
                assert engine.chat(told, ONE).n_cached_tokens > 100
                assert engine.stats().n_disk_reads == 1
            answers.append(engine.chat(asked, ONE))
            assert engine.chat(asked, ONE).n_cached_tokens > 140
            if most == 64:
                engine.chat(told, ONE)
    first, second, alone = answers
    assert first.n_prompt_tokens > second.n_prompt_tokens == alone.n_prompt_tokens
    assert 0 < second.n_cached_tokens < second.n_prompt_tokens - 8  # the text before the image, at most
    top = [answer.choices[0].logprobs[0].top for answer in (second, alone) if answer.choices[0].logprobs]
    for entry, other in zip(*top, strict=True):
        assert entry.id == other.id and abs(entry.logprob - other.logprob) < 1e-3


@pytest.mark.parametrize(
    ("least", "most", "message"),
    [
        (9, 8, "image_min_tokens is 9 and image_max_tokens 8"),
        (65, None, "at least 65 tokens and at most 64; the projector's own image_max_tokens is 64: set it"),
        (None, 7, "at least 8 tokens and at most 7; the projector's own image_min_tokens is 8: set it"),
    ],
)
def test_wrong_limits_are_refused(
    files: tuple[Path, Path], least: int | None, most: int | None, message: str
) -> None:
    text, mmproj = files
    with pytest.raises(ValueError, match=message):
        lp.Model(text, mmproj=mmproj, image_min_tokens=least, image_max_tokens=most)


def test_limits_of_a_wrong_type(files: tuple[Path, Path]) -> None:
    for wrong in (True, "8", 8.0):
        with pytest.raises(TypeError, match="image_max_tokens must be an integer"):
            lp.Model(files[0], image_max_tokens=wrong)  # type: ignore[arg-type]


def test_projectors_with_one_number_for_all_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = model_with_tile_tokens(tmp_path / "text.gguf")
    for make in (gemma3_projector, ultravox_projector):
        mmproj = make(tmp_path / "mmproj-text.gguf")
        assert check_mmproj(mmproj).image_tokens is None
        with pytest.raises(ValueError, match="keep an image's proportions"):
            lp.Model(text, mmproj=mmproj, image_max_tokens=8)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "llamapipe"), lp.Model(text, image_max_tokens=8) as model:
            assert model.projector is not None and model.projector.limits == (None, None)
        assert "mmproj-text.gguf has its own limits" in caplog.text
    with lp.Model(text, mmproj=None, image_min_tokens=8) as model:
        assert model.projector is None


def test_tiles_are_fewer_with_a_smaller_limit(tmp_path: Path) -> None:
    text = model_with_tile_tokens(tmp_path / "text.gguf")
    mmproj = idefics3_projector(tmp_path / "p.gguf")
    with pytest.raises(ValueError, match="the projector has no maximum: give image_max_tokens, too"):
        lp.Model(text, mmproj=mmproj, image_min_tokens=4)
    with lp.Model(text, mmproj=mmproj) as model, lp.Model(text, mmproj=mmproj, image_max_tokens=8) as less:
        assert n_tokens(less, 200, 120) < n_tokens(model, 200, 120)


def test_commands_and_lists(files: tuple[Path, Path], tmp_path: Path) -> None:
    text, mmproj = files
    (tmp_path / "models.toml").write_text(
        f"[models.a]\nfile = '{text}'\nimage-min-tokens = 4\nimage_max_tokens = 12\n"
    )
    (entry,) = entries_of([str(tmp_path / "models.toml")])
    assert entry.options == {"image_min_tokens": 4, "image_max_tokens": 12}
    (tmp_path / "models.toml").write_text(f"[models.a]\nfile = '{text}'\nimage_max_tokens = 'x'\n")
    with pytest.raises(UsageError, match="image_max_tokens must be a number"):
        entries_of([str(tmp_path / "models.toml")])

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llamapipe", *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment(), stdin=subprocess.DEVNULL
        )

    done = run("doctor", "-m", text)
    assert "an image has at least 8 and at most 64 tokens (--image-min-tokens" in done.stdout
    assert json.loads(run("doctor", "-m", text, "--json").stdout)["model"]["image_tokens"] == [8, 64]
    done = run("serve", "-m", text, "--mmproj", mmproj, "--image-min-tokens", 9, "--image-max-tokens", 8)
    assert done.returncode == 2
    assert "--image-min-tokens" in done.stderr or "image_min_tokens is 9" in done.stderr
