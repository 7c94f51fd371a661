"""A tiny Qwen 3.5 with a layer that predicts the token after the next (MTP), whose share of right drafts is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from support.gguf_models import ARCHITECTURES, make_model

_SMALL = 0.05  # what layers add to the token's own embedding


def mtp_model(path: Path, wrong: float | None, n_layers: int = 1) -> Path:
    """Writes the model. ``wrong``: the noise in its MTP layer, 0: all drafts are right; None: it is random.

    The embeddings of tokens 0, 1, 2… are powers of one rotation, and the model mostly writes the next token. The MTP
    layer rotates the hidden state that it reads and ignores its token: with the state of another token it is wrong.
    """
    shape = replace(ARCHITECTURES["qwen3.5-0.8b"].shrunk(), tied=False, mtp=n_layers)
    make_model(path, shape=shape, type_name="f32", vocab="builtin-bpe")
    reader = GGUFReader(path, "r+")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    embeddings, output = tensors["token_embd.weight"], tensors["output.weight"]
    n_vocab, width = embeddings.shape
    rng = np.random.default_rng(5)
    angles = rng.uniform(0, 2 * np.pi, width // 2)
    turned = np.arange(n_vocab)[:, None] * angles
    embeddings[:] = np.sqrt(2) * np.concatenate([np.cos(turned), np.sin(turned)], axis=1)
    output[:] = np.roll(embeddings, 1, axis=0) / np.sqrt(width)
    for name, data in tensors.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            np.multiply(data, _SMALL, out=data)
        elif wrong is not None and name.endswith("nextn.eh_proj.weight"):
            cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
            data[:, :width] = 0
            data[:, width:] = np.block([[cos, -sin], [sin, cos]])
            data[:, width:] += wrong * rng.standard_normal((width, width)) / np.sqrt(width)
        elif name.endswith("shared_head_norm.weight"):
            data[:] = tensors["output_norm.weight"]
    reader.data.flush()
    return path
