"""Makes the samplers of requests from sampling parameters.

Open this file when a new option must reach the native sampler, or when a vocabulary makes params invalid.

The principle: work that depends only on the params and the vocabulary is done once. A ``SamplerFactory`` checks the
params, compiles the constraint, and makes the native options. Requests with equal params share a factory, unless the
params have logits processors; ``SamplerFactoryCache`` keeps the most recently used factories. A sampler is made when
its request gets its first slot. If a draw may take long, because of a constraint or a logits processor, the sampler is
a ``BackgroundSampler``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llamapipe._engine.policy.core import Request, Sampler
from llamapipe._engine.runtime.background_sampler import BackgroundSampler
from llamapipe._lru_cache import LruCache
from llamapipe._sampling_table import SAMPLER_ORDER
from llamapipe.chat.options import LimitedReasoning
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.sampler import SamplerChain, takes_tokens
from llamapipe.llama.sampling_options import Dry, SamplingOptions
from llamapipe.llama.vocab import Vocab
from llamapipe.params import SamplingParams
from llamapipe.structured.budget import GrammarBudget

if TYPE_CHECKING:
    from llamapipe.structured.compile import GuideFactory

_N_KEPT = 64
_MOST_OF_TOKEN = 16  # characters of a prediction per token of n_ctx; the rest would cost time and memory


def choose_seed(params: SamplingParams) -> int:
    """Return the request's seed, or draw one below 2**52, which every JSON reader keeps exactly."""
    return int.from_bytes(os.urandom(8), "little") >> 12 if params.seed is None else params.seed


class SamplerFactory:
    """SamplingParams resolved for a vocabulary. Creates the samplers of requests with these params.

    ``reasoning``: the markers around the reasoning that params limit; None: there is no reasoning to limit.

    ``is_constrained``: the text must match a format. ``is_slow``: a draw may take long, because of a constraint or
    logits processors. ``allows_space``: a space that is not part of the text may precede it.

    Raises InvalidRequestError for params that this vocabulary does not support and for constraints that cannot be
    compiled.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocab,
        n_ctx: int,
        dries: LruCache[Dry],
        reasoning: LimitedReasoning | None = None,
    ) -> None:
        _check_vocab(params, vocab)
        _check_exclusive(params)
        self.params = params
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._biases = dict(params.logit_bias or {})
        if params.ignore_eos:
            self._biases.update(dict.fromkeys(vocab.eog_tokens, -math.inf))
        self._ends = sorted(vocab.eog_tokens | set(params.stop_token_ids or ())) if params.min_tokens else []
        self._bad_words = sorted(
            {
                tuple(tokens)
                for word in params.bad_words or ()
                for text in (word, " " + word)
                if (tokens := vocab.tokenize(text, add_special=False))
            }
        )
        self._dry: Dry | None = None
        if params.dry_multiplier > 0 and params.dry_penalty_last_n != 0:
            last_n = n_ctx if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, n_ctx)
            options = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, last_n)
            breakers = tuple(params.dry_sequence_breakers)
            self._dry = dries.get((*options, breakers), lambda: Dry(vocab, *options, breakers))
        self.allows_space = self._allow_space()
        self._guides: GuideFactory | None = None
        if params.grammar is not None:
            self._check_grammar(params.grammar)
        for name in ("json_schema", "regex", "lark", "choice"):
            if getattr(params, name) is not None:
                from llamapipe.structured.compile import compile_guide

                constraint = {name: getattr(params, name), "json_whitespace": params.json_whitespace}
                self._guides = compile_guide(vocab, **constraint, space=" " if self.allows_space else "")
        self._predicted = (
            vocab.tokenize(params.prediction, add_special=False)[:n_ctx]
            if params.prediction is not None
            else []
        )
        self._reasoning = reasoning if params.reasoning_budget is not None else None
        self._options = self._make_options()
        self.is_constrained = self._guides is not None or params.grammar is not None
        self.is_slow = self.is_constrained or bool(params.logits_processors)
        self._takes_tokens = any(map(takes_tokens, params.logits_processors))
        # How many of the last tokens bad words, penalties and DRY each read; -1: all.
        self._looks_back = list(map(len, self._bad_words))
        if params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._looks_back.append(params.repeat_last_n)
        if self._dry is not None:
            self._looks_back.append(params.dry_penalty_last_n)

    def _allow_space(self) -> bool:
        """Return whether a space may precede the texts of ``choice``: running text continues "Answer:" with " yes".

        Without the space, a model would choose among tokens that it has hardly ever seen there. A token that is only a
        space is just as rare before "yes", and ``max_tokens=1`` would end the text after it. So this token is forbidden
        unless a text needs it.
        """
        texts, vocab = self.params.choice, self._vocab
        if texts is None or len(set(texts)) < 2 or any(text[:1].isspace() for text in texts):
            return False
        running = [vocab.tokenize(f": {text}", add_special=False)[1:] for text in texts]
        if self.params.max_tokens is not None and max(map(len, running)) > self.params.max_tokens:
            return False
        only_spaces = {
            token
            for text in (" ", "\n ")
            for token in vocab.tokenize(text, add_special=False)
            if vocab.piece(token) == b" "
        }
        if only_spaces.isdisjoint(token for tokens in running for token in tokens) and not any(
            " " in text for text in texts
        ):
            self._biases.update(dict.fromkeys(only_spaces, -math.inf))
        return True

    def history(self, tokens: list[int]) -> list[int]:
        """Return the last tokens of a sequence, as many as penalties, DRY and bad words read."""
        n = len(tokens) if -1 in self._looks_back else max(self._looks_back, default=0)
        return list(tokens[-n:]) if n else []

    def make(self, request: Request) -> Sampler:
        """Make the sampler of a request that gets its first slot. For the engine thread.

        If the constraint refuses tokens that the request has already generated, the sampler's first draw fails.
        """
        spec = request.spec
        text = request.text_tokens.copy() if spec.speculates else None
        build = partial(self._build, spec.seed, *self._accepted_tokens(request), text)
        if not self.is_slow:
            return build()
        budget = spec.grammar_budget if self.is_constrained else None
        assert budget is None or isinstance(budget, GrammarBudget)
        is_python = bool(self.params.logits_processors)
        return BackgroundSampler(build, budget, spec.share, is_python, spec.speculates)

    def rebuild(self, sampler: Sampler, request: Request) -> None:
        """Reset a sampler to its request's changed sequence. For the engine thread."""
        change = partial(_reset, accepted=partial(self._accept, *self._accepted_tokens(request)))
        if isinstance(sampler, BackgroundSampler):
            sampler.rebuild(change)
        elif isinstance(sampler, SamplerChain):
            change(sampler)

    @property
    def is_exhausted(self) -> bool:
        """Whether the grammar reached a limit that all requests share, so that the next request needs a new factory."""
        return self._guides is not None and self._guides.is_exhausted

    def _build(
        self,
        seed: int,
        history: Sequence[int],
        generated: Sequence[int],
        tokens: Sequence[int],
        text: Sequence[int] | None,
    ) -> SamplerChain:
        """Build a chain that has accepted a sequence; see ``_accepted_tokens``.

        ``text``: the tokens from which the chain guesses the next ones; None for no guesses.
        """
        guide = None if self._guides is None else self._guides.new()
        try:
            chain = SamplerChain(self._vocab, seed, self._options, self.params.logits_processors, guide)
        except BaseException:
            if guide is not None:
                guide.close()
            raise
        try:
            self._accept(history, generated, tokens, chain)
            if text is not None:
                chain.watch(self._predicted, text, own=self.params.speculate != "draft")
        except BaseException:
            chain.close()
            raise
        return chain

    def _accepted_tokens(self, request: Request) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens for penalties, for a constraint or a reasoning limit, and for logits processors.

        These are copies, because other threads may read them.
        """
        reads_answer = self.is_constrained or self._reasoning is not None
        generated = request.full_sequence[request.n_prompt :] if reads_answer else []
        tokens = [token for token in request.full_sequence if token >= 0] if self._takes_tokens else []
        history = self.history(request.text_tokens) if self._looks_back else []
        return history, generated, tokens

    def _accept(
        self, history: Sequence[int], generated: Sequence[int], tokens: Sequence[int], chain: SamplerChain
    ) -> None:
        chain.tokens = list(tokens)
        if history:
            chain.accept(history)
        if self.params.grammar is not None and generated:
            chain.accept_grammar(generated)
        if self._reasoning is not None and generated:
            chain.accept_reasoning(generated)
        if chain.guide is not None:
            for token in generated:
                chain.guide.accept(token)

    def _check_grammar(self, text: str) -> None:
        from llamapipe.structured.gbnf import check_gbnf

        check_gbnf(text, self._vocab)
        options = SamplingOptions()
        try:
            options.set_grammar(text)
            SamplerChain(self._vocab, options=options).close()
        except ValueError as e:
            raise InvalidRequestError(f"grammar: {e}") from None

    def _make_options(self) -> SamplingOptions:
        p, options = self.params, SamplingOptions()
        options.set_numbers(p)
        options.set_order(SAMPLER_ORDER if p.sampler_order is None else p.sampler_order)
        options.set_bias(self._biases)
        options.set_allowed(p.allowed_token_ids)
        options.set_bad_words(self._bad_words)
        options.set_min_tokens(p.min_tokens, self._ends)
        options.set_dry(self._dry)
        if p.grammar is not None:
            options.set_grammar(p.grammar)
        if self._reasoning is not None and p.reasoning_budget is not None:
            opens, ends, close, is_open = self._reasoning
            # The message comes from the caller, so the names of control tokens in it stay text.
            tokens = self._vocab.tokenize(p.reasoning_budget_message or "", add_special=False)
            tokens += self._vocab.tokenize(close, add_special=False, parse_special=True)
            options.set_reasoning(p.reasoning_budget, opens, ends, tokens, is_open)
        struct = options.struct
        struct.repeat_last_n = self._n_ctx if p.repeat_last_n < 0 else min(p.repeat_last_n, self._n_ctx)
        struct.n_logprobs = -1 if p.logprobs is None else p.logprobs
        struct.needs_row, struct.has_guide = bool(p.logits_processors), self._guides is not None
        return options


def _check_vocab(params: SamplingParams, vocab: Vocab) -> None:
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        bad = [token for token in getattr(params, name) or () if token >= vocab.n_vocab]
        if bad:
            raise InvalidRequestError(
                f"{name} holds {bad[0]}; this vocabulary has the ids 0 to {vocab.n_vocab - 1}"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab.n_vocab:
            raise InvalidRequestError(
                f"{name} is {getattr(params, name)}; this vocabulary has {vocab.n_vocab} tokens"
            )
    for name in ("infill", "grammar"):
        if getattr(params, name) and (params.ignore_eos or not vocab.eog_tokens):
            raise InvalidRequestError(
                f"{name} needs a token that ends generation: "
                + ("leave ignore_eos off" if params.ignore_eos else "this vocabulary has none")
            )
    if params.infill and vocab.eos is None and vocab.eot is None:
        raise InvalidRequestError("infill needs an EOT or EOS token; this vocabulary has neither")


def _check_exclusive(params: SamplingParams) -> None:
    for name, other in (
        ("mirostat", "infill"),
        ("mirostat", "adaptive_target"),
        ("adaptive_target", "infill"),
    ):
        if _is_on(params, name) and _is_on(params, other):
            raise InvalidRequestError(f"{name} and {other} are both given; each decides alone: choose one")
    if params.temperature == 0:
        for name in ("mirostat", "adaptive_target", "infill"):
            if _is_on(params, name):
                raise InvalidRequestError(
                    f"{name} draws, but temperature is 0, which never does: leave one out"
                )


def _reset(chain: SamplerChain, accepted: Callable[[SamplerChain], object]) -> None:
    chain.reset()
    chain.finished = False
    if chain.guide is not None:
        chain.guide.reset(())
    accepted(chain)


def _is_on(params: SamplingParams, name: str) -> bool:
    value = getattr(params, name)
    return bool(value >= 0 if name == "adaptive_target" else value)


class SamplerFactoryCache:
    """The sampler factories of one engine, kept for requests with the same params. Any thread."""

    def __init__(self, vocab: Vocab, n_ctx: int) -> None:
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._factories: LruCache[SamplerFactory] = LruCache(_N_KEPT)
        self._dries: LruCache[Dry] = LruCache(8)

    def sampler_factory(
        self, params: SamplingParams, reasoning: LimitedReasoning | None = None
    ) -> SamplerFactory:
        """Return the sampler factory for ``params``. Raises InvalidRequestError.

        ``reasoning``: as in ``SamplerFactory``.
        """
        most = _MOST_OF_TOKEN * self._n_ctx
        if params.prediction is not None and len(params.prediction) > most:
            params = replace(params, prediction=params.prediction[:most])
        # Processors that compare equal may be different objects, and a cache must not keep them alive.
        if params.logits_processors:
            return SamplerFactory(params, self._vocab, self._n_ctx, self._dries, reasoning)
        return self._factories.get(
            (params, reasoning),
            lambda: SamplerFactory(params, self._vocab, self._n_ctx, self._dries, reasoning),
            lambda factory: not factory.is_exhausted,
        )
