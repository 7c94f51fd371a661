"""Tiny Gemma 4 models that write the next token of their vocabulary, and assistants that are right or wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.gguf_models import ARCHITECTURES, TOOLS, make_model

sys.path.append(str(TOOLS))

from draft_files import n_tokens
from make_assistant import AssistantShape, random_tensors, right_tensors, shape_for, write_assistant

WINDOWS = (True, True, True, False)


def assistant_target(path: Path, vocab: str = "builtin-bpe", n_layers: int = 10) -> Path:
    """A model that writes the next token of the vocabulary after each, with little effect of its layers."""
    shape = ARCHITECTURES["gemma4-e2b"].shrunk().cut(n_layers)
    shape = replace(shape, tied=False, mtp_noise=0.0, scales_embedding=False)
    return make_model(path, shape=shape, type_name="f32", vocab=vocab)


def assistant(
    path: Path,
    target: Path,
    noise: float | None = 0.0,
    windows: Sequence[bool] = WINDOWS,
    added: float = 1.0,
    **sizes: Any,
) -> Path:
    """An assistant for the model. ``noise``: 0: it is right; None: it is random, with layers that add ``added``.

    ``sizes``: other ones of its shape.
    """
    shape: AssistantShape = replace(shape_for(target, windows=windows), **sizes)
    if noise is None:
        tensors = random_tensors(shape, n_tokens(target), added=added)
    else:
        tensors = right_tensors(shape, target, noise)
    return write_assistant(path, target, shape, tensors, type_name="f32")
