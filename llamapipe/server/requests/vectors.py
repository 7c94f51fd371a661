"""Computes the vectors of texts, within the limits of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llamapipe.embedding import Embedder
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError, code_of
from llamapipe.server.requests.generation import (
    Prompt,
    given_prompts,
    mixed_tokens,
    n_prompts,
)
from llamapipe.work.long_work import size_of

if TYPE_CHECKING:
    import numpy.typing as npt

MANY = 1024  # texts or tokens; with more of them the event loop is kept free


async def embed_texts(
    exchange: Exchange,
    embedder: Embedder,
    name: str,
    texts: Any,
    dimensions: int | None,
    truncate: bool,
    normalize: bool = True,
) -> tuple[npt.NDArray[np.float32], int]:
    """Return the vectors of texts, and their total number of tokens. Raises ApiError 400.

    ``name``: the field that holds the texts. ``dimensions``: the length to which the vectors are cut.
    """
    n = embedder.n_embd
    wanted = n if dimensions is None else dimensions
    if not 1 <= wanted <= n:
        raise ApiError(400, f"dimensions is {wanted}; this model has {n}", "dimensions")
    if embedder.pooling in ("none", "rank"):
        raise ApiError(
            400, f"this model has pooling {embedder.pooling!r}; it has no single vector for a text", "model"
        )

    refuse_many(exchange, name, n_prompts(texts))

    def checked_size() -> int:
        refuse_long_text(exchange, name, texts)
        return size_of(texts)

    in_thread = exchange.server.in_thread
    size = checked_size() if isinstance(texts, str) or len(texts) < MANY else await in_thread(checked_size)
    try:
        tokens = await in_thread(tokens_of, embedder, texts, truncate, size=size)
        vectors = await vectors_of(embedder, tokens, normalize and wanted == n)
    except (TypeError, ValueError) as e:
        raise ApiError(400, str(e), name, code_of(e)) from None
    if wanted < n:
        vectors = vectors[:, :wanted]
        if normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    n_tokens = sum(map(len, tokens))
    exchange.count(n_tokens, 0)
    return vectors, n_tokens


def tokens_of(embedder: Embedder, texts: Prompt, truncate: bool) -> list[list[int]]:
    """Return the tokens of each text. Raises as ``Embedder.embed`` does."""
    items = given_prompts(texts)
    is_single = isinstance(texts, str) or items[0] is texts
    plain = [
        item
        if isinstance(item, str)
        else mixed_tokens(embedder.model.vocab, "the text" if is_single else f"text {i}", item)
        for i, item in enumerate(items)
    ]
    return embedder.tokens(plain[0] if is_single else plain, truncate=truncate)


async def vectors_of(embedder: Embedder, tokens: list[list[int]], normalize: bool) -> npt.NDArray[np.float32]:
    """Return a row for each text. Computes the rows in parts, so that the event loop can serve others in between."""
    parts = [
        np.asarray(await embedder.aembed(tokens[i : i + MANY], normalize=normalize))
        for i in range(0, len(tokens), MANY)
    ]
    return np.concatenate(parts)


def refuse_many(exchange: Exchange, name: str, n: int) -> None:
    """Raise ApiError 400 for more texts than the server allows."""
    most = exchange.server.settings.max_messages
    if n > most:
        raise ApiError(
            400,
            f"{name} has {n} texts; the limit of this server is {most} (--max-messages): send several requests",
            name,
        )


def refuse_long_text(exchange: Exchange, name: str, texts: Any) -> None:
    """Raise ApiError 400 for a text that is longer than the server allows, before it is tokenized."""
    most = exchange.server.settings.max_text_characters
    for text in [texts] if isinstance(texts, str) else texts:
        n = len(text) if isinstance(text, str) else 0
        if isinstance(text, list) and str in set(map(type, text)):
            n = sum(len(part) for part in text if isinstance(part, str))
        if n > most:
            raise ApiError(
                400,
                f"{name}: a text has {n} characters; the limit of this server is {most} "
                "(--max-text-characters): split it",
                name,
            )
