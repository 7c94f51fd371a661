"""DFlash and DSpark drafts for the models of ``eagle3_models``, which are right or wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.gguf_models import TOOLS

sys.path.append(str(TOOLS))

from draft_files import n_tokens, rows_of
from make_dflash import Right, dflash_shape, random_tensors, right_shape, right_tensors, write_dflash

SIZES: dict[str, Any] = {"heads": 4, "heads_kv": 2, "head": 32}


def dflash_draft(
    path: Path,
    target: Path,
    noise: float | None = 0.0,
    right: Right = "states",
    tokens: Sequence[int] | None = None,
    lent: Sequence[str] = (),
    **sizes: Any,
) -> Path:
    """A draft for the model. ``noise``, ``right``: see ``right_tensors``; without noise the draft is random.

    ``tokens``: those that it can guess. ``lent``: tensors that the model lends. ``sizes``: of ``DFlashShape``.
    """
    shape = dflash_shape(target, 64, **SIZES | sizes)
    if noise is None:
        n_vocab = n_tokens(target)
        tensors = random_tensors(shape, n_vocab, None if tokens is None else len(tokens))
        tensors["token_embd.weight"] = rows_of(target, "token_embd.weight")
    else:
        shape = right_shape(shape, right)
        tensors = right_tensors(shape, target, tokens, noise, right)
    for name in lent:
        del tensors[name]
    return write_dflash(path, target, shape, tensors, tokens, type_name="f32")
