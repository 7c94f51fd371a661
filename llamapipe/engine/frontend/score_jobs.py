"""From texts and tokens to what is scored behind what, and back to one score for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np

from llamapipe.arguments import check_int, check_tokens
from llamapipe.engine.delivery.mailbox import Mailbox
from llamapipe.engine.frontend.request_builder import Prompt, RequestBuilder, split
from llamapipe.engine.results import Score
from llamapipe.engine.scheduler.logprob_targets import TokenScore
from llamapipe.engine.scheduler.request import Request
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model

Pair = tuple[list[int], list[int]]  # a context and what is scored behind it


class ScoreJob:
    """Pairs to be scored, those of one context together, and the shape in which their scores are given back."""

    def __init__(self, pairs: Sequence[Pair], shape: Callable[[list[Score]], Any]) -> None:
        self._pairs = pairs
        self._shape = shape
        self._groups: dict[tuple[int, ...], list[int]] = {}
        for i, (context, _) in enumerate(pairs):
            self._groups.setdefault(tuple(context), []).append(i)

    @property
    def n_requests(self) -> int:
        """Contexts, each of which is computed once."""
        return len(self._groups)

    def requests(self, request_builder: RequestBuilder, mailbox: Mailbox) -> list[Request]:
        """One for each context. Raises InvalidRequestError."""
        return [
            request_builder.scores(context, [self._pairs[i][1] for i in members], mailbox, index)
            for index, (context, members) in enumerate(self._groups.items())
        ]

    def result(self, answers: Sequence[list[list[TokenScore]]]) -> Any:
        """The scores of the requests' answers, as they were asked for."""
        scores: list[Any] = [None] * len(self._pairs)
        for members, answer in zip(self._groups.values(), answers, strict=True):
            for i, found in zip(members, answer, strict=True):
                scores[i] = Score(
                    np.array(self._pairs[i][1], np.int32),
                    np.array([score.logprob for score in found], np.float32),
                    all(score.is_greedy for score in found),
                )
        return self._shape(scores)


def score_job(model: Model, prompt: Any, continuation: Any) -> ScoreJob:
    """What ``Engine.score`` is asked for. Raises TypeError, ValueError, InvalidRequestError."""
    prompts, single = split(prompt, empty_ok=True)
    if single:
        continuations, one = split(continuation, "continuation")
        pairs = [_pair(model, prompts[0], c) for c in continuations]
        return ScoreJob(pairs, (lambda scores: scores[0]) if one else list)
    if (
        isinstance(continuation, (str, bytes))
        or not isinstance(continuation, Sized)
        or not hasattr(continuation, "__getitem__")
    ):
        raise TypeError(
            "prompt is a list of prompts, so continuation must be a list with one item, or one list of items, for each"
        )
    each: Sequence[Any] = continuation  # type: ignore[assignment]
    if len(each) != len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts and {len(each)} continuations; give one item, or one list of "
            "items, for each"
        )
    pairs, lengths = [], []
    for p, c in zip(prompts, list(each), strict=True):
        items, one = split(c, "continuation")
        pairs += [_pair(model, p, item) for item in items]
        lengths.append(None if one else len(items))

    def shape(scores: list[Score]) -> list[Any]:
        left = iter(scores)
        return [next(left) if n is None else [next(left) for _ in range(n)] for n in lengths]

    return ScoreJob(pairs, shape)


def tokens_job(model: Model, tokens: Any) -> ScoreJob:
    """What ``Engine.score_tokens`` is asked for: every token but the first behind those before it."""
    if isinstance(tokens, str):
        raise TypeError(
            "tokens must be token ids; for text use model.tokenize(text), or score(prompt, continuation)"
        )
    items, single = split(tokens, "tokens")
    pairs: list[Pair] = []
    for item in items:
        ids = check_tokens("tokens", item, model.n_vocab)
        if len(ids) < 2:
            raise InvalidRequestError("there is one token, which follows nothing; give at least two")
        pairs.append((ids[:1], ids[1:]))
    return ScoreJob(pairs, (lambda scores: scores[0]) if single else list)


def perplexity_job(model: Model, tokens: Any, n_window: int | None, n_ctx: int) -> ScoreJob:
    """What ``Engine.perplexity`` is asked for: the second halves of the windows behind the first ones."""
    window = n_ctx if n_window is None else check_int("n_window", n_window, 4, n_ctx)
    if window < 4:
        raise InvalidRequestError(
            f"n_ctx is {n_ctx} and a window needs 4 tokens; make the engine with a larger n_ctx"
        )
    ids = check_tokens("tokens", tokens, model.n_vocab)
    if len(ids) < window:
        raise InvalidRequestError(
            f"there are {len(ids)} tokens and a window has {window}; give more, or a smaller n_window"
        )
    first = window // 2
    pairs: list[Pair] = []
    for begin in range(0, len(ids) - window + 1, window):
        part = ids[begin : begin + window]
        if model.vocab.add_bos and model.bos is not None:
            part[0] = model.bos
        pairs.append((part[: first + 1], part[first + 1 :]))

    def shape(scores: list[Score]) -> float:
        total = math.fsum(score.total for score in scores)
        return math.exp(-total / sum(len(score.logprobs) for score in scores))

    return ScoreJob(pairs, shape)


def _tokens(model: Model, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenize(prompt)
    return check_tokens("prompt", prompt, model.n_vocab)


def _pair(model: Model, prompt: Prompt, continuation: Prompt) -> Pair:
    """Both as tokens. Text behind text is tokenized together with it, as it would be read."""
    context = _tokens(model, prompt)
    if isinstance(continuation, str) and isinstance(prompt, str):
        whole = model.tokenize(prompt + continuation)
        context, rest = whole[: len(context)], whole[len(context) :]
    elif isinstance(continuation, str):
        rest = model.tokenize(continuation, add_special=False)
    else:
        rest = check_tokens("continuation", continuation, model.n_vocab)
    if not rest:
        raise InvalidRequestError(
            "the continuation adds no token to the prompt, so there is nothing to score; give at least one"
        )
    if not context:
        if model.bos is None:
            raise InvalidRequestError(
                "the prompt is empty and this vocabulary has no BOS token; give at least one token to score behind"
            )
        context = [model.bos]
    return context, rest
