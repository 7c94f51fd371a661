"""The plain decode loop of one sequence with a guide, with which tests compare the engine's guided output."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamapipe.errors import DecodeError
from llamapipe.llama import Context, DecodeBatch, Model, SamplerChain
from llamapipe.structured._guide import Guide


def allowed_ids(guide: Guide, n_vocab: int) -> list[int]:
    """Return the tokens of a guide's mask, and check its form."""
    mask = guide.mask()
    assert mask.dtype == np.uint32 and mask.shape == ((n_vocab + 31) // 32,)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[n_vocab:].any()
    return [int(i) for i in np.flatnonzero(bits[:n_vocab])]


def accepts(model: Model, guide: Guide, text: str) -> bool:
    """Return whether a guide at its start allows the bytes of a text one by one, and then the end."""
    byte = _byte_tokens(model)
    try:
        for value in text.encode():
            guide.accept(byte[value])
    except DecodeError:
        return False
    return guide.may_end


@lru_cache(4)
def _byte_tokens(model: Model) -> dict[int, int]:
    pieces = {model.piece(token): token for token in range(model.n_vocab)}
    return {byte: pieces[bytes([byte])] for byte in range(256) if bytes([byte]) in pieces}


def forbid(row: npt.NDArray[np.float32], guide: Guide) -> None:
    """Set the logits of all tokens that are not allowed to minus infinity."""
    bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")[: len(row)]
    row[bits == 0] = -np.inf


def guided(
    context: Context,
    prompt: list[int],
    guide: Guide,
    sampler: SamplerChain,
    max_tokens: int,
) -> tuple[list[int], bool]:
    """Return the continuation of a prompt, without the end of generation, and whether it was complete."""
    context.clear()
    context.decode(DecodeBatch.of_tokens(prompt, 0))
    tokens: list[int] = []
    at = len(prompt) - 1
    while len(tokens) < max_tokens:
        if guide.finished:
            return tokens, True
        row = context.logits(at)
        forbid(row, guide)
        token = sampler.sample(row)
        guide.accept(token)
        if context.model.vocab.is_eog(token):
            return tokens, True
        tokens.append(token)
        context.decode(DecodeBatch.of_tokens([token], len(prompt) + len(tokens) - 1))
        at = 0
    return tokens, False


def text_of(model: Model, tokens: list[int]) -> str:
    """Return the tokens' bytes as text. Raises UnicodeDecodeError for invalid bytes."""
    return b"".join(map(model.piece, tokens)).decode()
