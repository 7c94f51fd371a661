"""Loads mutants of projectors' files and encodes an image with those that load: ``FOLDER KIND FIRST N``.

Prints the number of each mutant before it is tried, so that the last line names the one that ended the process.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import llamapipe as lp
from llamapipe.errors import LlamapipeError
from llamapipe.gguf.mmproj import check_mmproj
from llamapipe.llama.projector import MediaChunk, Projector
from llamapipe.media.decode import Given
from llamapipe.native.load import native
from support.media_models import (
    gemma3_projector,
    idefics3_projector,
    model_with_grids,
    model_with_tile_tokens,
    picture,
    qwen2vl_projector,
    qwen3vl_projector,
    ultravox_projector,
)

MAKERS: dict[str, Callable[[Path], Path]] = {
    "gemma3": gemma3_projector,
    "idefics3": idefics3_projector,
    "qwen2vl": qwen2vl_projector,
    "qwen3vl": qwen3vl_projector,
    "ultravox": ultravox_projector,
}
_NUMBERS = (0, 1, 2, 3, 5, 7, 31, 33, 255, 1000, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def mutant(data: bytes, head: int, chance: random.Random) -> bytes:
    """A copy with one to three changes, most of them in the first ``head`` bytes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        end = head if chance.random() < 0.9 else len(changed)
        i = chance.randrange(24, end - 8)
        kind = chance.randrange(5)
        if kind == 0:
            changed[i] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[i : i + 4] = struct.pack("<I", chance.choice(_NUMBERS))
        elif kind == 2:
            changed[i : i + 8] = struct.pack("<Q", chance.choice(_NUMBERS))
        elif kind == 3:  # a number that is there, a little larger or smaller
            (value,) = struct.unpack_from("<I", changed, i)
            changed[i : i + 4] = struct.pack("<I", (value + chance.choice((-1, 1, 8, -8))) % 2**32)
        else:
            changed[i] = chance.randrange(256)
    return bytes(changed)


def main(folder: Path, kind: str, first: int, n: int) -> None:
    """Tries ``n`` mutants."""
    text = folder / "text.gguf"
    if kind in ("qwen2vl", "qwen3vl"):
        model_with_grids(text, kind)
    else:
        model_with_tile_tokens(text)
    path = MAKERS[kind](folder / f"{kind}.gguf")
    data = path.read_bytes()
    head = data.rfind(b".weight") + 64
    path = folder / "mutant.gguf"
    n_loaded = n_encoded = 0
    with lp.Model(text) as model:
        for number in range(first, first + n):
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
            path.unlink(missing_ok=True)
            path.write_bytes(mutant(data, head, random.Random(number)))
            try:
                projector = Projector(native(), model, model.handle, check_mmproj(path), False)
                projector.open()
            except LlamapipeError:
                continue
            n_loaded += 1
            try:
                image, sound = picture(200, 120), picture(8000, 1)[0, :, 0].astype("f4") / 256
                for media in (Given("image", image, "image"), Given("sound", sound, "sound", 16000)):
                    if projector.sees if media.kind == "image" else projector.hears:
                        for part in projector.media(media).parts:
                            if isinstance(part, MediaChunk):
                                projector.encode(part, 1)
                                n_encoded += 1
            except LlamapipeError:
                continue
            finally:
                projector.close()
    sys.stdout.write(f"loaded {n_loaded} encoded {n_encoded}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
