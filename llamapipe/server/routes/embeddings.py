"""Answers requests for embeddings, reranking and scores.

Embeddings have OpenAI's or llama-server's format. ``/v1/rerank`` has the format of Jina, Cohere and vLLM, or of Text
Embeddings Inference; ``/v1/score`` has vLLM's.
"""

from __future__ import annotations

import asyncio
import base64
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from starlette.responses import Response

from llamapipe._messages import shown
from llamapipe.embedding import Embedder, Ranked
from llamapipe.server._fields import Only, Unused
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError, code_of
from llamapipe.server.requests.generation import (
    AnyPrompt,
    plain_prompts,
)
from llamapipe.server.requests.vectors import (
    embed_texts,
    refuse_long_text,
    refuse_many,
    vectors_of,
)
from llamapipe.work.long_work import size_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from llamapipe.embedding import Embedder


_AS_GIVEN = "scores are as the model gives them"
_MOST_P = 1024  # of a norm, which is then close to the largest number
_FEW = 64  # vectors are written on it
_PAIRS = 64  # of texts, each with its own query, that are scored at the same time


Texts = AnyPrompt  # as in llama-server, a list with a token id is one text


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``. ``truncate``: cut texts that are too long for the model."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate: bool = False
    embd_normalize: int | None = None
    user: Annotated[str | None, Unused()] = None
    priority: Annotated[int | None, Only(0)] = None
    # The rest of vLLM's fields; -1 cuts texts to the context, as truncate does.
    truncate_prompt_tokens: Annotated[int | None, Only(-1, instead="-1 and truncate cut to the context")] = (
        None
    )
    truncation_side: Annotated[str | None, Only("right")] = None
    add_special_tokens: Annotated[bool | None, Only(True)] = None
    padding: Annotated[str | None, Only("do_not_pad")] = None
    use_activation: Annotated[
        bool | None, Only(True, instead="embd_normalize: -1 leaves vectors as they are")
    ] = None
    embed_dtype: Annotated[str | None, Only("float32")] = None
    endianness: Annotated[str | None, Only("native", "little")] = None
    request_id: Annotated[str | None, Unused()] = None
    cache_salt: Annotated[str | None, Unused()] = None
    mm_processor_kwargs: Annotated[Any, Unused({})] = None


class LlamaEmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /embedding``, in llama-server's format.

    ``embd_normalize``: the p of the norm by which vectors are divided; 0 scales their largest number to 32,760, -1
    leaves them as they are.
    """

    content: Texts | None = None
    input: Texts | None = None
    model: str | None = None
    embd_normalize: int | None = None


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/rerank``. ``truncate``: cut documents that are too long together with the query.

    ``texts`` and ``return_text``: Text Embeddings Inference's names for ``documents`` and ``return_documents``. With
    ``texts``, the answer is in that server's format.
    """

    query: str
    documents: list[str | dict[str, str]] | None = None
    texts: list[str] | None = None
    return_text: bool = False
    raw_scores: Annotated[bool | None, Only(True, instead=_AS_GIVEN)] = None
    truncation_direction: Annotated[str | None, Only("right", "Right")] = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    truncate: bool = False
    priority: Annotated[int | None, Only(0)] = None
    max_tokens_per_doc: Annotated[
        int | None, Only(instead="truncate: true cuts documents to the context")
    ] = None
    user: Annotated[str | None, Unused()] = None
    use_activation: Annotated[bool | None, Only(False, instead=_AS_GIVEN)] = None
    activation: Annotated[bool | None, Only(False, instead=_AS_GIVEN)] = None
    softmax: Annotated[bool | None, Only(False, instead=_AS_GIVEN)] = None
    request_id: Annotated[str | None, Unused()] = None
    mm_processor_kwargs: Annotated[Any, Unused({})] = None
    truncate_prompt_tokens: Annotated[int | None, Only(-1, instead="-1 and truncate cut to the context")] = (
        None
    )


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/score``: scores pairs of texts, or one text against several.

    ``queries``, ``documents``: other names for ``text_1`` and ``text_2``.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    truncate: bool = False
    priority: Annotated[int | None, Only(0)] = None
    user: Annotated[str | None, Unused()] = None
    truncate_prompt_tokens: Annotated[int | None, Only(-1, instead="-1 and truncate cut to the context")] = (
        None
    )
    use_activation: Annotated[bool | None, Only(False, instead=_AS_GIVEN)] = None
    activation: Annotated[bool | None, Only(False, instead=_AS_GIVEN)] = None
    softmax: Annotated[bool | None, Only(False, instead=_AS_GIVEN)] = None
    request_id: Annotated[str | None, Unused()] = None
    mm_processor_kwargs: Annotated[Any, Unused({})] = None


async def embeddings(exchange: Exchange, request: EmbeddingRequest) -> Response:
    """Embed one or several inputs, given as text or as tokens."""
    embedder, model = exchange.server.check_embedder(request.model)
    if request.input == []:
        raise ApiError(400, "input is empty; give at least one text", "input")
    p = _checked_norm(request.embd_normalize)
    vectors, n_tokens = await embed_texts(
        exchange,
        embedder,
        "input",
        plain_prompts(request.input),
        request.dimensions,
        _truncates(request),
        normalize=p == 2,
    )
    vectors = _scaled(vectors, p)
    as_text = request.encoding_format == "base64"

    def answer() -> Response:
        data = [
            {"object": "embedding", "index": i, "embedding": _base64(row) if as_text else row.tolist()}
            for i, row in enumerate(vectors)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        name = f"embd-{exchange.id}"  # Mistral's client needs it, and vLLM has it, too
        return JsonResponse({"id": name, "object": "list", "data": data, "model": model, "usage": usage})

    return answer() if len(vectors) < _FEW else await exchange.server.in_thread(answer)


async def llama_embedding(exchange: Exchange, request: LlamaEmbeddingRequest) -> Response:
    """``POST /embedding``: returns a list of vectors, each inside another list, as llama-server does."""
    embedder, _ = exchange.server.check_embedder(request.model)
    name = "input" if request.content is None else "content"
    texts = request.input if request.content is None else request.content
    if texts is None or texts == []:
        raise ApiError(400, "content is empty; give at least one text", "content")
    if request.input is not None and request.content is not None:
        raise ApiError(400, "content and input are the same; give one", "input")
    p = _checked_norm(request.embd_normalize)
    vectors, _ = await embed_texts(
        exchange, embedder, name, plain_prompts(texts), None, False, normalize=p == 2
    )
    vectors = _scaled(vectors, p)

    def answer() -> Response:
        return JsonResponse([{"index": i, "embedding": [row.tolist()]} for i, row in enumerate(vectors)])

    return answer() if len(vectors) < _FEW else await exchange.server.in_thread(answer)


def _truncates(request: EmbeddingRequest | RerankRequest | ScoreRequest) -> bool:
    return request.truncate or request.truncate_prompt_tokens is not None


def _checked_norm(p: int | None) -> int:
    """Return the checked ``embd_normalize``. Raises ApiError 400."""
    if p is None:
        return 2
    if not -1 <= p <= _MOST_P:
        raise ApiError(
            400, f"embd_normalize is {shown(p)}; it must be from -1 to {_MOST_P}", "embd_normalize"
        )
    return p


def _scaled(vectors: npt.NDArray[np.float32], p: int) -> npt.NDArray[np.float32]:
    """Return the vectors divided by their p-norm; with 0, scaled to numbers of at most 32,760, as in llama-server.

    Vectors are not changed with -1, and with 2, for which ``embed`` normalizes them.
    """
    if p in (-1, 2):
        return vectors
    sizes = np.abs(vectors.astype(np.float64))
    most = np.maximum(sizes.max(axis=1, keepdims=True), 1e-300)  # powers of larger numbers could overflow
    norms = most / 32760 if p == 0 else most * ((sizes / most) ** p).sum(axis=1, keepdims=True) ** (1 / p)
    scaled: npt.NDArray[np.float32] = (vectors / norms).astype(np.float32)
    return scaled


async def rerank(exchange: Exchange, request: RerankRequest) -> Response:
    """Rank documents for a query."""
    embedder, model = exchange.server.check_embedder(request.model)
    name, passages = ("documents", request.documents) if request.texts is None else ("texts", request.texts)
    if passages is None:
        raise ApiError(400, "missing required field: documents", "documents", "missing_field")
    if request.texts is not None and request.documents is not None:
        raise ApiError(400, "texts and documents are the same; give one", "texts")
    refuse_many(exchange, name, len(passages))
    documents = [_text(document, i) for i, document in enumerate(passages)]
    refuse_long_text(exchange, "query", request.query)
    refuse_long_text(exchange, name, documents)
    if request.top_n is not None and request.top_n < 0:
        raise ApiError(400, f"top_n is {request.top_n}; it must be 1 or more, or 0 for all", "top_n")
    top_n = request.top_n or None
    try:
        ranked = await embedder.arerank(request.query, documents, truncate=_truncates(request))
    except (TypeError, ValueError) as e:
        field = "query" if str(e).startswith("the query") else name
        raise ApiError(400, str(e), field, code_of(e)) from None
    n_tokens = sum(rank.n_tokens for rank in ranked)
    exchange.count(n_tokens, 0)
    returns_text = request.return_text or request.return_documents
    if request.texts is not None:
        scored = [{"index": rank.index, "score": rank.score} for rank in ranked[:top_n]]
        for entry, rank in zip(scored, ranked, strict=False):
            if returns_text:
                entry["text"] = documents[rank.index]  # type: ignore[assignment]
        return JsonResponse(scored)
    results: list[dict[str, Any]] = []
    for rank in ranked[:top_n]:
        result: dict[str, Any] = {"index": rank.index, "relevance_score": rank.score}
        if returns_text:
            result["document"] = {"text": documents[rank.index]}
        results.append(result)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return JsonResponse({"id": f"rerank-{exchange.id}", "model": model, "results": results, "usage": usage})


async def score(exchange: Exchange, request: ScoreRequest) -> Response:
    """Score pairs of texts: rerankers as in ``/v1/rerank``, other models by the cosine of the two vectors."""
    embedder, model = exchange.server.check_embedder(request.model)
    first = _texts("text_1", request.text_1, "queries", request.queries)
    second = _texts("text_2", request.text_2, "documents", request.documents)
    if len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"there are {len(first)} first texts and {len(second)} second ones; give one for all, or one for each",
            "text_1",
        )
    refuse_many(exchange, "text_1", len(first))
    refuse_many(exchange, "text_2", len(second))
    refuse_long_text(exchange, "text_1", first)
    refuse_long_text(exchange, "text_2", second)
    try:
        if embedder.pooling == "rank":
            scores, n_tokens = await _ranks(embedder, first, second, _truncates(request))
        elif embedder.pooling == "none":
            raise ApiError(400, "this model has pooling 'none'; it has no single vector for a text", "model")
        else:
            scores, n_tokens = await _cosines(exchange, embedder, first, second, _truncates(request))
    except (TypeError, ValueError) as e:
        raise ApiError(400, str(e), "text_2", code_of(e)) from None
    exchange.count(n_tokens, 0)
    return JsonResponse(
        {
            "id": f"score-{exchange.id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


def _texts(name: str, texts: str | list[str] | None, newer: str, also: str | list[str] | None) -> list[str]:
    if (texts is None) == (also is None):
        raise ApiError(400, f"give {name} or {newer}", name)
    chosen = texts if also is None else also
    if not chosen and chosen != "":
        raise ApiError(400, f"{name if also is None else newer} is empty; give at least one text", name)
    return [chosen] if isinstance(chosen, str) else list(chosen or ())


async def _ranks(
    embedder: Embedder, queries: list[str], documents: list[str], truncate: bool
) -> tuple[list[float], int]:
    if len(queries) == 1:
        groups = [(queries[0], documents)]
    else:
        groups = [(query, [document]) for query, document in zip(queries, documents, strict=True)]
    passages: list[Ranked] = []
    for start in range(0, len(groups), _PAIRS):
        ranked = await asyncio.gather(
            *(embedder.arerank(*group, truncate=truncate) for group in groups[start : start + _PAIRS])
        )
        passages += [
            passage for group in ranked for passage in sorted(group, key=lambda passage: passage.index)
        ]
    return [passage.score for passage in passages], sum(passage.n_tokens for passage in passages)


async def _cosines(
    exchange: Exchange, embedder: Embedder, first: list[str], second: list[str], truncate: bool
) -> tuple[list[float], int]:
    texts = [*first, *second]
    tokens = await exchange.server.in_thread(
        partial(embedder.tokens, truncate=truncate), texts, size=size_of(texts)
    )
    rows = await vectors_of(embedder, tokens, True)
    scores = (rows[: len(first)] * rows[len(first) :]).sum(axis=1)
    return [float(score) for score in scores], sum(map(len, tokens))


def _text(document: str | dict[str, str], index: int) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if text is None or len(document) > 1:
        raise ApiError(400, f"documents.{index} must be text or an object with text", f"documents.{index}")
    return text


def _base64(row: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
