"""Turns prompts and continuations into requests that score them, and gives the result its shape.

Open this file to change which tokens ``score``, ``score_tokens`` or ``perplexity`` scores, and in which requests.

The principle: every kind of score is a list of pairs, a context and a continuation. Pairs with equal contexts share
requests, so each context is computed once. ``ScoreJob`` keeps the order of the pairs and gives the result the shape of
the call's arguments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np

from llamapipe._engine.calls.prompts import (
    PORTION,
    Groups,
    RequestBuilder,
    RequestFactory,
    activation_of,
    split_prompts,
    with_prompt_index,
)
from llamapipe._engine.policy.prefix_tree import n_common
from llamapipe._engine.policy.scoring import TokenScore
from llamapipe._engine.runtime.mailboxes import Mailbox
from llamapipe._messages import quoted
from llamapipe.arguments import check_int, check_tokens
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.adapter import AdapterSet
from llamapipe.llama.model import Model
from llamapipe.results import Score
from llamapipe.types import Prompt, TokenIds

Pair = tuple[list[int], list[int]]  # a context and a continuation
T = TypeVar("T")  # the result of a call
_BEFORE_SPACES = tuple(":?=>")
_FIRST_WITHOUT_SPACES = "\u2e80"  # from here on, scripts have no spaces between words
_log = logging.getLogger("llamapipe")
_N_LEAST = 8  # minimum continuations per request, because each request copies the context's cells
Shaped = Score | list[Score] | list[list[Score]] | list[Score | list[Score]]


class ScoreJob(Generic[T]):
    """Contexts and continuations to be scored, and the shape of the result.

    The continuations of a context are divided among requests, which run at the same time and share the context's cells.
    Each request computes its continuations one after another.

    ``is_text``: a pair is one text, not a prompt and its answer, so an activated LoRA may be invoked anywhere in it.
    """

    def __init__(
        self, pairs: Sequence[Pair], shape: Callable[[list[Score]], T], is_text: bool = False
    ) -> None:
        self._pairs = pairs
        self._shape = shape
        self._is_text = is_text
        self._requests: list[list[int]] = []  # by request: the indices of its pairs

    @property
    def n_requests(self) -> int:
        """Number of requests; known after ``batches``."""
        return len(self._requests)

    def batches(
        self, request_builder: RequestBuilder, adapters: AdapterSet | None = None
    ) -> Iterator[RequestFactory]:
        """Return functions that each make a portion of the requests, which are computed with these adapters.

        Raises InvalidRequestError before any function runs.
        """
        _, activation = activation_of(adapters)
        begins: dict[int, int] = {}  # where the adapters of these texts begin to compute
        if self._is_text and activation is not None:
            begins = {i: activation.begin(context + rest) for i, (context, rest) in enumerate(self._pairs)}
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (context, _) in enumerate(self._pairs):
            groups.setdefault((begins.get(i, -1), *context), []).append(i)
        self._requests.clear()
        for members in groups.values():
            request_builder.check_scores(self._pairs[members[0]][0], [self._pairs[i][1] for i in members])
            self._requests += self._divide(members, request_builder.n_sharing)
        jobs = list(enumerate(self._requests))

        def make(portion: Sequence[tuple[int, list[int]]], mailbox: Mailbox) -> Groups:
            return {
                index: [
                    request_builder.scores(
                        self._pairs[members[0]][0],
                        [self._pairs[i][1] for i in members],
                        mailbox,
                        index,
                        adapters=adapters,
                        active_from=begins.get(members[0]),
                    )
                ]
                for index, members in portion
            }

        return (partial(make, jobs[i : i + PORTION]) for i in range(0, len(jobs), PORTION))

    def _divide(self, members: Sequence[int], n_sharing: int) -> Iterator[list[int]]:
        """Divide the pairs of one context among requests; yield the indices of each request's pairs.

        The first request has all continuations of a single token: the context's last row scores any number of them.
        """
        long = [i for i in members if len(self._pairs[i][1]) > 1]
        n_most = max(_N_LEAST, -(-len(long) // n_sharing)) if n_sharing > 1 else len(long)
        yield [i for i in members if len(self._pairs[i][1]) == 1] + long[:n_most]
        for begin in range(n_most, len(long), max(n_most, 1)):
            yield long[begin : begin + n_most]

    def result(self, answers: Mapping[int, list[list[TokenScore]]]) -> T:
        """Return the scores in the shape of the call. ``answers``: the answers of the requests, by index."""
        scores: dict[int, Score] = {}
        for index, members in enumerate(self._requests):
            for i, token_scores in zip(members, answers[index], strict=True):
                scores[i] = Score(
                    np.array(self._pairs[i][1], np.int32),
                    np.array([score.logprob for score in token_scores], np.float32),
                    all(score.is_greedy for score in token_scores),
                )
        return self._shape([scores[i] for i in range(len(self._pairs))])


def score_job(prompt: Any, continuation: Any, model: Model) -> ScoreJob[Shaped]:
    """Make the job of ``Engine.score``. Raises TypeError, ValueError, InvalidRequestError."""
    prompts, single = split_prompts(prompt, empty_ok=True)
    if single:
        continuations, is_single = split_prompts(continuation, "continuation")
        pairs = _pairs(model, prompts[0], continuations)
        return ScoreJob(pairs, (lambda scores: scores[0]) if is_single else list)
    if (
        isinstance(continuation, (str, bytes))
        or not isinstance(continuation, Sized)
        or not hasattr(continuation, "__getitem__")
    ):
        raise TypeError(
            "prompt is a list of prompts, so continuation must be a list with one item, or one list of items, for each"
        )
    by_prompt: Sequence[Any] = continuation  # type: ignore[assignment]
    if len(by_prompt) != len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts and {len(by_prompt)} continuations; give one item, or one list of "
            "items, for each"
        )
    pairs, lengths = [], []
    for index, (p, c) in enumerate(zip(prompts, list(by_prompt), strict=True)):
        try:
            items, is_single = split_prompts(c, "continuation")
            pairs += _pairs(model, p, items)
        except (TypeError, ValueError) as e:
            raise with_prompt_index(e, index) from None
        lengths.append(None if is_single else len(items))

    def shape(scores: list[Score]) -> Shaped:
        left = iter(scores)
        return [next(left) if n is None else [next(left) for _ in range(n)] for n in lengths]

    return ScoreJob(pairs, shape)


def tokens_job(tokens: Any, model: Model) -> ScoreJob[Score | list[Score]]:
    """Make the job of ``Engine.score_tokens``: it scores every token but the first, given the tokens before it."""
    if isinstance(tokens, str):
        raise TypeError(
            "tokens must be token ids; for text use model.tokenize(text), or score(prompt, continuation)"
        )
    items, single = split_prompts(tokens, "tokens")
    pairs: list[Pair] = []
    for item in items:
        ids = check_tokens("tokens", item, model.n_vocab)
        if len(ids) < 2:
            raise InvalidRequestError(
                "a single token has no token before it to be scored by; pass at least two"
            )
        pairs.append((ids[:1], ids[1:]))
    return ScoreJob(pairs, (lambda scores: scores[0]) if single else list, is_text=True)


def perplexity_job(text: str | TokenIds, n_window: int | None, model: Model, n_ctx: int) -> ScoreJob[float]:
    """Make the job of ``Engine.perplexity``: it scores every token but the first, or the second halves of windows.

    ``n_window``: tokens of a window; None: no windows. Raises InvalidRequestError.
    """
    ids = model.tokenize(text) if isinstance(text, str) else check_tokens("text", text, model.n_vocab)
    pairs = _overlapping(ids, n_ctx) if n_window is None else _windows(model, ids, n_window, n_ctx)

    def shape(scores: list[Score]) -> float:
        total = math.fsum(score.total for score in scores)
        return math.exp(-total / sum(len(score.logprobs) for score in scores))

    return ScoreJob(pairs, shape, is_text=True)


def _overlapping(ids: list[int], n_ctx: int) -> list[Pair]:
    """Return pairs that score every token but the first once, given all or at least ``n_ctx // 2`` tokens before it."""
    if len(ids) < 2:
        raise InvalidRequestError(f"the text has {len(ids)} tokens; perplexity needs at least 2")
    n_most = n_ctx + 1  # the last token of a pair is not fed
    pairs: list[Pair] = [(ids[:1], ids[1:n_most])]
    n_kept = max(n_ctx // 2, 1)
    for begin in range(n_most, len(ids), n_most - n_kept):
        end = min(begin + n_most - n_kept, len(ids))
        pairs.append((ids[begin - n_kept : begin], ids[begin:end]))
    return pairs


def _windows(model: Model, ids: list[int], n_window: int, n_ctx: int) -> list[Pair]:
    """Return pairs that score the second halves of windows that do not overlap, given the first halves."""
    window = check_int("n_window", n_window, 4, max(n_ctx, 4))
    if window > n_ctx:
        raise InvalidRequestError(f"n_ctx is {n_ctx} and a window needs 4 tokens; raise n_ctx")
    if len(ids) < window:
        raise InvalidRequestError(
            f"there are {len(ids)} tokens and a window has {window}; give more tokens, or a smaller window"
        )
    first = window // 2
    pairs: list[Pair] = []
    for begin in range(0, len(ids) - window + 1, window):
        part = ids[begin : begin + window]
        if model.vocab.add_bos and model.bos is not None:
            part[0] = model.bos
        pairs.append((part[: first + 1], part[first + 1 :]))
    return pairs


def _tokens(model: Model, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenize(prompt)
    return check_tokens("prompt", prompt, model.n_vocab)


def _pairs(model: Model, prompt: Prompt, continuations: Sequence[Prompt]) -> list[Pair]:
    """Return a prompt with each of its continuations as tokens. If both are text, tokenize them together.

    The context is the common prefix of the prompt and all these texts: after "Answer: ", the token " yes" includes the
    prompt's last space.
    """
    context = _tokens(model, prompt)
    wholes: dict[int, list[int]] = {}
    if isinstance(prompt, str):
        wholes = {i: model.tokenize(prompt + c) for i, c in enumerate(continuations) if isinstance(c, str)}
        _warn_of_spaces(prompt, continuations)
    n_context = min((n_common(context, whole) for whole in wholes.values()), default=0) or len(context)
    pairs = []
    for i, continuation in enumerate(continuations):
        if i in wholes:
            pairs.append(
                _check_pair(model, wholes[i][:n_context], wholes[i][n_context:] if continuation else [])
            )
        elif isinstance(continuation, str):
            pairs.append(_check_pair(model, context, model.tokenize(continuation, add_special=False)))
        else:
            pairs.append(
                _check_pair(model, context, check_tokens("continuation", continuation, model.n_vocab))
            )
    return pairs


def _warn_of_spaces(prompt: str, continuations: Sequence[Prompt]) -> None:
    """Warn if all continuations lack the space that would precede them in running text; they are scored as given."""
    if prompt[-1:] in _BEFORE_SPACES and len(continuations) > 1:
        texts = [text for text in continuations if isinstance(text, str) and _begins_a_word(text)]
        if len(texts) == len(continuations):
            _warn_once(prompt[-1], texts[0])


def _begins_a_word(text: str) -> bool:
    """Return whether a text begins with a letter or digit of a script that has spaces between words."""
    return text[:1].isalnum() and text[0] < _FIRST_WITHOUT_SPACES


@lru_cache(256)
def _warn_once(end: str, text: str) -> None:
    _log.warning(
        'score: the prompt ends with "%s", and no continuation begins with a space, as one does in running text: give '
        "%s in place of %s, and the same for the others",
        end,
        quoted(f" {text}"),
        quoted(text),
    )


def _check_pair(model: Model, context: list[int], rest: list[int]) -> Pair:
    if not rest:
        raise InvalidRequestError(
            "the continuation adds no token to the prompt, so there is nothing to score; pass at least one token"
        )
    if not context:
        if model.bos is None:
            raise InvalidRequestError(
                "the prompt is empty and the vocabulary has no BOS token to put in its place; "
                "pass a prompt of at least one token"
            )
        context = [model.bos]
    return context, rest
