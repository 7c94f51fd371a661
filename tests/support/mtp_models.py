"""A tiny Qwen 3.5 with a layer that predicts the token after the next (MTP), whose share of right drafts is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.gguf_models import ARCHITECTURES, make_model


def mtp_model(path: Path, noise: float | None, n_layers: int = 1, type_name: str = "f32") -> Path:
    """Writes the model. ``noise``: in its MTP layer, 0: nearly all drafts are right; None: the model is random."""
    shape = replace(ARCHITECTURES["qwen3.5-0.8b"].shrunk(), tied=noise is None, mtp=n_layers, mtp_noise=noise)
    return make_model(path, shape=shape, type_name=type_name, vocab="builtin-bpe")
