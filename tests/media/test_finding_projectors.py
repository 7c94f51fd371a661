"""The projector that belongs to a model: beside it, on the hub, and what text-only use pays for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gguf_models import recurrent_model, tiny_model
from support.media_models import (
    gemma3_projector,
    idefics3_projector,
    model_with_grids,
    model_with_tile_tokens,
    picture,
)
from support.ollama_store import put_model
from support.run_script import environment, run_script

import llamapipe as lp
from llamapipe.cli._models_file import entries_of
from llamapipe.errors import InvalidRequestError, ModelLoadError

QUESTION = [{"role": "user", "content": [{"type": "image", "image": picture()}, "What is this?"]}]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return model_with_tile_tokens(tmp_path / "text-Q8_0.gguf")


def projector_of(model: Path, mmproj: Any = "auto") -> str | None:
    with lp.Model(model, mmproj=mmproj) as loaded:
        assert loaded.supports_images is (loaded.projector is not None)
        return None if loaded.projector is None else loaded.projector.path.name


def test_the_only_projector_of_a_folder_is_found_and_loaded_with_the_first_image(text: Path) -> None:
    assert projector_of(text) is None
    idefics3_projector(text.with_name("mmproj-any-f16.gguf"))
    assert projector_of(text) == "mmproj-any-f16.gguf"
    off: list[Any] = [None, False, "off"]
    assert [projector_of(text, value) for value in off] == [None] * 3
    script = """
    import sys
    import llamapipe as lp
    from llamapipe.native.load import LIB_DIR
    def is_loaded():
        return "libllamapipe-mtmd" in open("/proc/self/maps").read()
    with lp.Model(sys.argv[1]) as model, lp.Engine(model, n_ctx=512, n_seq_max=2) as engine:
        engine.generate("Once", lp.SamplingParams(max_tokens=2))
        engine.chat("Hello", lp.SamplingParams(max_tokens=2))
        print(model.supports_images, is_loaded(), "PIL" in sys.modules)
        import numpy
        image = {"type": "image", "image": numpy.zeros((64, 64, 3), numpy.uint8)}
        answer = engine.chat([{"role": "user", "content": [image, "What?"]}], lp.SamplingParams(max_tokens=2))
        print(answer.n_prompt_tokens > 20, is_loaded())
    """
    import textwrap

    assert run_script(textwrap.dedent(script), text).split() == ["True", "False", "False", "True", "True"]


def test_others_do_not_fit(text: Path) -> None:
    gemma3_projector(text.with_name("mmproj-wide.gguf"), n_embd=256)
    text.with_name("mmproj-damaged.gguf").write_bytes(b"GGUF damaged")
    text.with_name("mmproj-folder.gguf").mkdir()
    assert projector_of(text) is None
    with (
        lp.Model(text) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=1) as engine,
        pytest.raises(InvalidRequestError, match="has no projector beside it: give Model"),
    ):
        engine.chat(QUESTION)
    with pytest.raises(
        ModelLoadError, match=r"has no projector \(mmproj\*.gguf\) of the same model beside it"
    ):
        projector_of(text, True)


def test_in_a_folder_of_several_models_names_decide(text: Path) -> None:
    tiny_model(text.with_name("other.gguf"))
    any_name = idefics3_projector(text.with_name("mmproj-f16.gguf"))
    assert projector_of(text) is None  # of which model?
    any_name.unlink()
    idefics3_projector(text.with_name("mmproj-f16.gguf"), title="Llamapipe-Demo")
    assert projector_of(text) == "mmproj-f16.gguf"
    idefics3_projector(text.with_name("mmproj-Text-BF16.gguf"))
    with (
        lp.Model(text) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=1) as engine,
        pytest.raises(InvalidRequestError, match="has 2 projectors beside it, 'mmproj-Text"),
    ):
        engine.chat(QUESTION)
    with pytest.raises(ModelLoadError, match="give mmproj the path of one"):
        projector_of(text, True)
    text.with_name("mmproj-f16.gguf").unlink()
    assert projector_of(text) == projector_of(text, True) == "mmproj-Text-BF16.gguf"


def test_a_projector_that_changes_before_the_first_image(text: Path) -> None:
    path = idefics3_projector(text.with_name("mmproj.gguf"))
    with lp.Model(text) as model, lp.Engine(model, n_ctx=512, n_seq_max=2) as engine:
        path.unlink()
        gemma3_projector(path)
        with pytest.raises(ModelLoadError, match="after the model was loaded; load it again"):
            engine.chat(QUESTION)
        assert engine.chat("Hello", lp.SamplingParams(max_tokens=2)).n_completion_tokens


def test_what_has_positions_with_a_height_and_a_width(tmp_path: Path) -> None:
    with lp.Model(model_with_grids(tmp_path / "model.gguf")) as loaded:
        assert loaded.has_mrope
    with lp.Model(recurrent_model(tmp_path / "other.gguf")) as loaded:  # has no rotated positions
        assert not loaded.has_mrope


def test_wrong_projectors_are_refused(text: Path) -> None:
    with pytest.raises(TypeError, match="mmproj must be a path, a bool or None, not int"):
        lp.Model(text, mmproj=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no model on the hub"):
        lp.Model(text, mmproj="hf:nothing")
    with lp.Model(text, vocab_only=True) as model:
        assert not model.supports_images


def test_a_folder_of_models_lists_no_projector_and_no_adapter(text: Path) -> None:
    idefics3_projector(text.with_name("encoder-of-images.gguf"))
    idefics3_projector(text.with_name("MMPROJ-text.gguf"))
    shutil.copy(lp.demo_model_path().with_name("letters.gguf"), text.with_name("letters.gguf"))
    text.with_name("empty.gguf").touch()
    text.with_name("cut.gguf").write_bytes(text.read_bytes()[:100])
    assert [entry.name for entry in entries_of([str(text.parent)])] == ["cut", "empty", "text-Q8_0"]


def test_the_doctor_says_what_messages_may_have(text: Path) -> None:
    def doctor() -> str:
        command = [sys.executable, "-m", "llamapipe", "doctor", "-m", str(text), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
        report = json.loads(done.stdout)
        finding: str = next(entry["detail"] for entry in report["findings"] if entry["name"] == "images")
        return f"{finding} {report['model']['images']} {report['model']['audio']}"

    assert doctor().startswith("no: no projector")
    idefics3_projector(text.with_name("mmproj.gguf"))
    assert doctor().startswith("takes images with mmproj.gguf, ")
    assert doctor().endswith(
        "loads; an image's tokens can be limited (--image-min-tokens, --image-max-tokens) True False"
    )
    idefics3_projector(text.with_name("mmproj-2.gguf"))
    assert doctor() == "no: 2 projectors are beside it, 'mmproj-2.gguf', 'mmproj.gguf' False False"


def test_a_model_of_ollama_has_the_projector_of_its_manifest(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    projector = idefics3_projector(tmp_path / "projector.gguf").read_bytes()
    wider = gemma3_projector(tmp_path / "wider.gguf", n_embd=384).read_bytes()
    store = tmp_path / "store"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    place = "registry.ollama.ai/library"
    put_model(store, f"{place}/sees/latest", text.read_bytes(), projector=projector)
    put_model(store, f"{place}/other/latest", lp.demo_model_path().read_bytes(), projector=wider)
    with lp.Model("ollama:sees") as model, lp.Engine(model, n_ctx=512, n_seq_max=1) as engine:
        assert engine.chat(QUESTION, lp.SamplingParams(max_tokens=2)).n_prompt_tokens > 20
    with lp.Model("ollama:other") as model:
        assert not model.supports_images
