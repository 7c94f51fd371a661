"""From SamplingParams to the samplers of requests."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

from llamapipe._engine.request import Request, Sampler
from llamapipe.engine.params import SAMPLER_ORDER, SamplingParams
from llamapipe.engine.sampling.background import BackgroundSampler, GrammarBudget
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.sampler import Guide, SamplerChain, takes_tokens
from llamapipe.llama.sampling_options import Dry, SamplingOptions
from llamapipe.llama.vocab import Vocab
from llamapipe.locks import Lock

_N_KEPT = 64
T = TypeVar("T")


def choose_seed(params: SamplingParams) -> int:
    """The request's seed, drawn when none is given: below 2**52, which every reader of JSON keeps exactly."""
    return int.from_bytes(os.urandom(8), "little") >> 12 if params.seed is None else params.seed


class LruCache(Generic[T]):
    """The values used last, by their keys. Any thread."""

    def __init__(self, n: int = _N_KEPT) -> None:
        self._n = n
        self._lock = Lock()
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value kept for ``key``, or the one that ``make`` gives, which may be called twice by two threads."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            self._values[key] = made
            if len(self._values) > self._n:
                self._values.popitem(last=False)
        return made


class SamplerFactory:
    """One SamplingParams resolved for a vocabulary; creates the samplers of its requests.

    Raises InvalidRequestError for what this vocabulary does not have and for constraints that cannot be compiled.
    """

    def __init__(self, params: SamplingParams, vocab: Vocab, n_ctx: int, dries: LruCache[Dry]) -> None:
        self.params = params
        self._vocab = vocab
        self._n_ctx = n_ctx
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            bad = [t for t in getattr(params, name) or () if t >= vocab.n_vocab]
            if bad:
                raise InvalidRequestError(
                    f"{name} holds {bad[0]}; this vocabulary has the ids 0 to {vocab.n_vocab - 1}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab.n_vocab:
                raise InvalidRequestError(
                    f"{name} is {getattr(params, name)}; this vocabulary has {vocab.n_vocab} tokens"
                )
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
        self._guide: Callable[[], Guide] | None = None
        for name in ("infill", "grammar"):
            if getattr(params, name) and (params.ignore_eos or not vocab.eog_tokens):
                raise InvalidRequestError(
                    f"{name} needs a token that ends generation: "
                    + ("leave ignore_eos off" if params.ignore_eos else "this vocabulary has none")
                )
        if params.infill and vocab.eos is None and vocab.eot is None:
            raise InvalidRequestError("infill needs an EOT or EOS token; this vocabulary has neither")
        for name, without in (
            ("mirostat", "infill"),
            ("mirostat", "adaptive_target"),
            ("adaptive_target", "infill"),
        ):
            if _is_on(params, name) and _is_on(params, without):
                raise InvalidRequestError(
                    f"{name} and {without} are both given; each decides by itself: choose one"
                )
        if params.temperature == 0:
            for name in ("mirostat", "adaptive_target", "infill"):
                if _is_on(params, name):
                    raise InvalidRequestError(
                        f"{name} draws, but temperature is 0, which never does: leave one out"
                    )
        if params.grammar is not None:
            self._check_grammar(params.grammar)
        for name in ("json_schema", "regex", "lark", "choice"):
            if getattr(params, name) is not None:
                from llamapipe.structured.compile import compile_guide

                constraint = {name: getattr(params, name), "json_whitespace": params.json_whitespace}
                self._guide = compile_guide(vocab, **constraint).new
        self._options = self._make_options()

    @property
    def penalizes(self) -> bool:
        """Whether the penalties change anything."""
        p = self.params
        return p.repeat_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    def history(self, tokens: list[int]) -> list[int]:
        """The last tokens of a sequence, as many as penalties, DRY and bad words read."""
        p = self.params
        if not self._bad_words and self._dry is None and not self.penalizes:
            return []
        n = max((len(word) for word in self._bad_words), default=0)
        for last_n in [p.repeat_last_n] * self.penalizes + [p.dry_penalty_last_n] * (self._dry is not None):
            n = max(n, len(tokens) if last_n < 0 else last_n)
        return list(tokens[-n:]) if n else []

    @property
    def is_slow(self) -> bool:
        """Whether a sampler may take long: for a constraint, or for logits processors."""
        return self.is_constrained or bool(self.params.logits_processors)

    @property
    def is_constrained(self) -> bool:
        """Whether the text must match a format."""
        return self._guide is not None or self.params.grammar is not None

    def make(self, request: Request) -> Sampler:
        """The sampler of a request that gets its first slot. Engine thread.

        If the constraint refuses tokens that the request has already generated, its first draw fails.
        """
        if not self.is_slow:
            return self.make_chain(request)
        build = partial(self._build, request.spec.seed, *self._accepted(request))
        budget = request.spec.grammar_budget if self.is_constrained else None
        assert budget is None or isinstance(budget, GrammarBudget)
        return BackgroundSampler(build, budget, request.spec.share, bool(self.params.logits_processors))

    def make_chain(self, request: Request) -> SamplerChain:
        """The same as a chain of this thread. Raises ValueError or DecodeError if the constraint refuses tokens."""
        return self._build(request.spec.seed, *self._accepted(request))

    def rebuild(self, sampler: Sampler, request: Request) -> None:
        """Resets a sampler to its request's changed sequence. Engine thread."""
        change = partial(_reset, accepted=partial(self._accept, *self._accepted(request)))
        if isinstance(sampler, BackgroundSampler):
            sampler.rebuild(change)
        elif isinstance(sampler, SamplerChain):
            change(sampler)

    def _build(
        self, seed: int, history: Sequence[int], generated: Sequence[int], tokens: Sequence[int]
    ) -> SamplerChain:
        """A chain after a sequence; for the arguments see ``_accepted``."""
        guide = None if self._guide is None else self._guide()
        try:
            chain = SamplerChain(self._vocab, seed, self._options, self.params.logits_processors, guide)
        except BaseException:
            if guide is not None:
                guide.close()
            raise
        try:
            self._accept(history, generated, tokens, chain)
        except BaseException:
            chain.close()
            raise
        return chain

    def _accepted(self, request: Request) -> tuple[list[int], list[int], list[int]]:
        """Tokens that penalties look at, those that the constraint has to accept, and all, for logits processors.

        Copies: other threads may read them.
        """
        generated = request.full_sequence[request.n_prompt :] if self.is_constrained else []
        tokens = list(request.full_sequence) if any(map(takes_tokens, self.params.logits_processors)) else []
        return self.history(request.tokens), generated, tokens

    def _accept(
        self, history: Sequence[int], generated: Sequence[int], tokens: Sequence[int], chain: SamplerChain
    ) -> None:
        chain.tokens = list(tokens)
        if history:
            chain.accept(history)
        if self.params.grammar is not None and generated:
            chain.accept_grammar(generated)
        if chain.guide is not None:
            for token in generated:
                chain.guide.accept(token)

    def _check_grammar(self, text: str) -> None:
        from llamapipe.structured.gbnf import check_gbnf

        check_gbnf(text, self._vocab)
        with SamplerChain(self._vocab) as chain:
            try:
                chain.set_grammar(text)
            except ValueError as e:
                raise InvalidRequestError(f"grammar: {e}") from None

    def _make_options(self) -> SamplingOptions:
        """The native options; numbers have the same names there."""
        p, options = self.params, SamplingOptions()
        options.set_named(p)
        options.set_order(SAMPLER_ORDER if p.sampler_order is None else p.sampler_order)
        options.set_bias(self._biases)
        options.set_allowed(p.allowed_token_ids)
        options.set_bad_words(self._bad_words)
        options.set_min_tokens(p.min_tokens, self._ends)
        options.set_dry(self._dry)
        if p.grammar is not None:
            options.set_grammar(p.grammar)
        struct = options.struct
        struct.repeat_last_n = self._n_ctx if p.repeat_last_n < 0 else min(p.repeat_last_n, self._n_ctx)
        struct.n_logprobs = -1 if p.logprobs is None else p.logprobs
        struct.needs_row, struct.has_guide = bool(p.logits_processors), self._guide is not None
        return options


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
        self._factories: LruCache[SamplerFactory] = LruCache()
        self._dries: LruCache[Dry] = LruCache(8)

    def sampler_factory(self, params: SamplingParams) -> SamplerFactory:
        """The sampler factory for ``params``. Raises InvalidRequestError."""
        # Equal processors need not be the same, and a cache must not keep them alive.
        if params.logits_processors:
            return SamplerFactory(params, self._vocab, self._n_ctx, self._dries)
        return self._factories.get(
            params, lambda: SamplerFactory(params, self._vocab, self._n_ctx, self._dries)
        )
