"""Damaged images, sounds and projectors end in errors, and harm nobody else."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import wave
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.media_models import idefics3_projector, model_with_tile_tokens, picture, ultravox_projector
from support.media_mutants import mutant, wav, whole
from support.run_script import environment

import llamapipe as lp
from llamapipe.errors import InvalidRequestError, LlamapipeError
from llamapipe.media.decode import Given

SUPPORT = Path(__file__).resolve().parents[1] / "support"
N_FILES = 67  # a campaign of thousands: tests/support/mmproj_fuzz_worker.py
N_MUTANTS = int(os.environ.get("LLAMAPIPE_MEDIA_MUTANTS", "500"))  # `nox -s fuzz`: 5,000


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "qwen2vl", "qwen3vl", "ultravox"])
def test_mutants_of_projectors_never_end_the_process(tmp_path: Path, kind: str) -> None:
    worker = [sys.executable, str(SUPPORT / "mmproj_fuzz_worker.py"), str(tmp_path), kind, "0", str(N_FILES)]
    done = subprocess.run(worker, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    assert "loaded" in done.stdout


@pytest.mark.filterwarnings("ignore")  # Pillow warns of damage
def test_mutated_files_are_decoded_or_refused() -> None:
    outcomes: Counter[tuple[str, bool]] = Counter()
    messages = []
    for number in range(N_MUTANTS):
        name, data = mutant(number)
        media = Given("sound" if name.startswith("sound") else "image", data, "here")
        try:
            values = media.samples(16000) if media.kind == "sound" else media.pixels()
        except InvalidRequestError as error:
            messages.append(str(error))
        else:
            assert values.size and np.isfinite(values).all(), name
            outcomes[media.kind, True] += 1
            continue
        outcomes[media.kind, False] += 1
    assert all(message.startswith("here: ") for message in messages)
    # Pillow's own texts may have an object's address, which tells where things are in memory.
    assert not [message for message in messages if " at 0x" in message]
    assert (
        min(outcomes[kind, is_read] for kind in ("image", "sound") for is_read in (True, False))
        > N_MUTANTS / 25
    )
    for name, data in whole().items():
        if name in ("sound as mp3", "sound as flac", "sound as ogg"):
            with pytest.raises(InvalidRequestError, match=f"(?i)is {name[9:]}, and only WAV files .*ffmpeg"):
                Given("sound", data, "here").samples(16000)


def test_sounds_of_all_widths_and_rates(tmp_path: Path) -> None:
    stereo = whole()["sound of 16 bits"]
    assert Given("sound", stereo, "here").samples(8000).shape == (2000,)
    assert Given("sound", stereo, "here").samples(16000).shape == (4000,)
    for width in (1, 2, 3, 4):
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(width)
            writer.setframerate(16000)
            value = (2 ** (8 * width) - 1).to_bytes(width + 1, "little")[:width] if width == 1 else None
            half = (2 ** (8 * width - 2)).to_bytes(width, "little")
            writer.writeframes((value or half) * 16)
        samples = Given("sound", file.getvalue(), "here").samples(16000)
        assert samples.tolist() == pytest.approx([127 / 128 if width == 1 else 0.5] * 16)
    for kind, bits in ((3, 32), (3, 64), (65534, 24)):
        samples = Given("sound", wav(bits, 2, 16000, kind), "here").samples(16000)
        assert samples.shape == (4000,) and 0.5 < abs(samples).max() <= 1
    piped = bytearray(wav())
    piped[4:8] = piped[40:44] = b"\xff\xff\xff\xff"  # by a program that did not know the length
    assert (
        Given("sound", bytes(piped), "here").samples(16000) == Given("sound", wav(), "h").samples(16000)
    ).all()
    with pytest.raises(InvalidRequestError, match="not finite"):
        Given("sound", np.array([np.nan], np.float32), "here").samples(16000)
    with pytest.raises(InvalidRequestError, match="at most 1800 s"):
        Given("sound", np.zeros(2000 * 1800, np.float32), "here", 1000).samples(16000)


def test_odd_sizes_are_encoded_or_refused(tmp_path: Path) -> None:
    text = model_with_tile_tokens(tmp_path / "text.gguf")
    sizes = [(1, 1), (1, 200), (200, 1), (3, 5), (63, 65), (64, 64), (129, 127), (2000, 11), (1024, 768)]
    params = lp.SamplingParams(max_tokens=2)
    with (
        lp.Model(text, mmproj=idefics3_projector(tmp_path / "p.gguf")) as model,
        lp.Engine(model, n_ctx=1024, n_seq_max=2) as engine,
    ):
        for width, height in sizes:
            part = {"type": "image", "image": picture(width, height)}
            with suppress(LlamapipeError):
                engine.chat([{"role": "user", "content": ["What?", part, "Why?"]}], params)
        engine.check_integrity()
    with (
        lp.Model(text, mmproj=ultravox_projector(tmp_path / "u.gguf")) as model,
        lp.Engine(model, n_ctx=2048, n_seq_max=2) as engine,
    ):
        for n in (1, 2, 159, 160, 400, 16000, 31 * 16000):
            part = {"type": "audio", "audio": np.zeros(n, np.float32)}
            with suppress(LlamapipeError):
                engine.chat([{"role": "user", "content": ["What?", part, "Why?"]}], params)
        engine.check_integrity()
