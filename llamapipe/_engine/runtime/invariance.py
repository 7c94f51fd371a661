"""Checks whether the logits of a row are bitwise the same, whatever else is in the batch.

Open this file when ``batch_invariant=True`` refuses a model that it should accept, or accepts one that it should not.

The principle: report known causes of differences first, then measure. The same tokens are computed in differently
divided batches, and their logits must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.llama.batch import DecodeBatch
from llamapipe.llama.context import Context
from llamapipe.llama.model import Model
from llamapipe.native.load import native

_N_TOKENS = 80  # from 64 tokens onward, ggml's attention uses a different loop
_N_SEQ = 5


def check_invariance(
    model: Model, unified: bool, flash_attn: str, new_context: Callable[..., Context]
) -> None:
    """Raise ValueError if the text that this model generates could depend on other requests.

    Known reasons are checked first. Then the same token is computed in several ways, and its logits are compared. The
    comparison detects matrix products and other operations that ggml computes differently for one row than for several.
    """
    reason = _known_reason(model, unified, flash_attn)
    if reason is None and not _is_invariant(new_context):
        reason = (
            "ggml computes one of its operations differently for several rows, such as products of a format "
            "that llamapipe has no kernel for"
        )
    if reason is not None:
        raise ValueError(
            f"batch_invariant=True, but {reason}: texts of {model.path.name} may depend on the load"
        )


def _known_reason(model: Model, unified: bool, flash_attn: str) -> str | None:
    module = native()
    if not module.lib.lp_kernels_attend():
        return "llamapipe has no attention kernels for this processor"
    if not model.attends:
        return "the model was loaded with kernels='ggml'"
    if any(device.type != "cpu" for device in model.devices):
        return "devices compute the model; n_gpu_layers=0 computes it on the CPU"
    if unified:
        return "requests share one KV cache; leave n_cells and kv_unified out"
    if flash_attn == "off":
        return "flash_attn is 'off'"
    return None


def _is_invariant(new_context: Callable[..., Context]) -> bool:
    tokens = np.arange(_N_TOKENS) % 50 + 5
    with new_context(
        n_ctx=_N_TOKENS + 1, n_cells=None, n_seq_max=_N_SEQ, n_batch=512, n_ubatch=512
    ) as context:
        ways: list[list[list[int]]] = [
            [[_N_TOKENS]],  # parts: the number of tokens of each sequence, from sequence 0
            [[_N_TOKENS - 1], [1]],
            [[_N_TOKENS - 2] * 2, [2, 1]],
            [[30] * _N_SEQ, [_N_TOKENS - 31] * _N_SEQ, [1] * _N_SEQ],
        ]
        rows = []
        for way in ways:
            context.clear()
            rows.append(_last_logits(context, tokens, way))
        return all(np.array_equal(logits, rows[0]) for logits in rows)


def _last_logits(
    context: Context, tokens: npt.NDArray[np.int64], parts: list[list[int]]
) -> npt.NDArray[np.float32]:
    """Return the logits after all tokens of sequence 0. Each further sequence starts one token later."""
    n_past = 0
    for part in parts:
        entries = list(_entries(tokens, n_past, part))
        context.decode(DecodeBatch(*zip(*entries, strict=True)))
        n_past += part[0]
    assert n_past == len(tokens)
    return context.logits(parts[-1][0] - 1).copy()


def _entries(
    tokens: npt.NDArray[np.int64], done: int, part: list[int]
) -> Iterator[tuple[Any, int, int, bool]]:
    for seq_id, n in enumerate(part):
        for i in range(done, done + n):
            yield tokens[(i + seq_id) % len(tokens)], i, seq_id, i == done + n - 1
