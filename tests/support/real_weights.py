"""The real models that tools/real_models.py knows, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from support.gguf_models import TOOLS, finish

_WANTED = os.environ.get("LLAMAPIPE_REAL_MODELS", "").split(",")

needs_all = pytest.mark.skipif("all" not in _WANTED, reason="takes minutes: nox -s real_models")


def real_model(name: str) -> Path:
    """The path of a model; the test is skipped where LLAMAPIPE_REAL_MODELS names neither it nor ``all``."""
    if name not in _WANTED and "all" not in _WANTED:
        pytest.skip("fetches models of 2 GB: nox -s real_models")
    done = subprocess.run(
        [sys.executable, TOOLS / "real_models.py", name], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout.strip().splitlines()[-1])


def write_minilm(path: Path) -> Path:
    """Writes all-MiniLM-L6-v2 as a GGUF file of F32 weights."""
    data = np.fromfile(real_model("minilm"), dtype=np.uint8)
    n = int(data[:8].view("<u8")[0])
    described = json.loads(data[8 : 8 + n].tobytes())
    weights = {
        name: data[8 + n + of["data_offsets"][0] : 8 + n + of["data_offsets"][1]]
        .view("<f4")
        .reshape(of["shape"])
        for name, of in described.items()
        if name != "__metadata__" and of["dtype"] == "F32"
    }
    pieces = json.loads(real_model("minilm-tokenizer").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = sorted(pieces, key=pieces.__getitem__)
    special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
    assert {token: pieces[token] for token in special} == special

    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_block_count(6)
    writer.add_context_length(512)
    writer.add_embedding_length(384)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(12)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    # A piece that begins a word is marked in the file, one that continues a word is not: the reverse of vocab.txt.
    writer.add_token_list(
        [
            t if t.startswith("[") and t.endswith("]") else t[2:] if t.startswith("##") else f"\u2581{t}"
            for t in tokens
        ]
    )
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_type_count(2)
    writer.add_bos_token_id(special["[CLS]"])
    writer.add_sep_token_id(special["[SEP]"])
    writer.add_unk_token_id(special["[UNK]"])
    writer.add_pad_token_id(special["[PAD]"])
    writer.add_mask_token_id(special["[MASK]"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 6)
    for name, values in weights.items():
        if not name.startswith("pooler."):
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            writer.add_tensor(stored, np.ascontiguousarray(values))
    finish(writer)
    return path
