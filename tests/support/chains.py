"""A sampler chain whose options tests change one by one; requests have all of theirs at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.samplers import SamplerFactory
from llamapipe.llama import SamplerChain, Vocab
from llamapipe.llama.sampler import Guide, Processor
from llamapipe.llama.sampling_options import Dry, SamplingOptions


class Chain(SamplerChain):
    """A change keeps the accepted tokens and the state of the generator. Values are not checked."""

    def __init__(self, vocab: Vocab, seed: int = 0) -> None:
        self._given = SamplingOptions()
        super().__init__(vocab, seed, self._given)

    def __enter__(self) -> Chain:
        return self

    def set_bias(self, bias: Mapping[int, float]) -> Chain:
        self._given.set_bias(bias)
        return self._configure()

    def set_allowed(self, tokens: Sequence[int]) -> Chain:
        self._given.set_allowed(tokens)
        return self._configure()

    def set_bad_words(self, words: Sequence[Sequence[int]]) -> Chain:
        self._given.set_bad_words(words)
        return self._configure()

    def set_min_tokens(self, n: int, ends: Iterable[int]) -> Chain:
        self._given.set_min_tokens(n, list(ends))
        return self._configure()

    def set_grammar(self, text: str) -> Chain:
        self._given.set_grammar(text)
        return self._configure()

    def set_penalties(
        self, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> Chain:
        """Before all other samplers."""
        return self._put(
            self._lib.LP_SAMPLER_PENALTIES,
            at=0,
            repeat_last_n=last_n,
            repeat_penalty=repeat,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )

    def set_dry(self, dry: Dry) -> Chain:
        """Before all other samplers but penalties. The chain has its own copy, so ``dry`` may be freed."""
        self._given.set_dry(dry)
        try:
            return self._put(self._lib.LP_SAMPLER_DRY, at=int(self._lib.LP_SAMPLER_PENALTIES in self._order))
        finally:
            self._given.set_dry(None)

    def set_min_keep(self, n: int) -> Chain:
        """What typical, top_p and min_p leave at least."""
        self._given.struct.min_keep = n
        return self._configure()

    def add_top_k(self, k: int) -> Chain:
        """The smallest of several counts; 0 keeps all."""
        before = self._given.struct.top_k
        return self._put(self._lib.LP_SAMPLER_TOP_K, top_k=min(k or before, before or k))

    def add_typical(self, p: float) -> Chain:
        return self._put(self._lib.LP_SAMPLER_TYPICAL_P, typical_p=p)

    def add_top_p(self, p: float) -> Chain:
        return self._put(self._lib.LP_SAMPLER_TOP_P, top_p=p)

    def add_min_p(self, p: float) -> Chain:
        return self._put(self._lib.LP_SAMPLER_MIN_P, min_p=p)

    def add_temperature(self, temperature: float) -> Chain:
        """0: greedy."""
        return self._put(self._lib.LP_SAMPLER_TEMPERATURE, temperature=temperature)

    def set_python(self, processors: Sequence[Processor], guide: Guide | None) -> Chain:
        self._set_python(processors, guide)
        self._given.struct.needs_row, self._given.struct.has_guide = bool(processors), guide is not None
        return self._configure()

    def set_logprobs(self, n: int) -> Chain:
        self.n_logprobs = self._given.struct.n_logprobs = n
        return self._configure()

    @property
    def _order(self) -> list[int]:
        return list(self._given.struct.order[0 : self._given.struct.n_order])

    def _put(self, sampler: int, at: int | None = None, **numbers: float) -> Chain:
        """Adds a sampler to the order, unless it is there."""
        struct, order = self._given.struct, self._order
        for name, value in numbers.items():
            setattr(struct, name, value)
        if sampler not in order:
            order.insert(len(order) if at is None else at, sampler)
            struct.order[0 : len(order)] = order
            struct.n_order = len(order)
        return self._configure()

    def _configure(self) -> Chain:
        self._check(self._lib.lp_sampler_configure(self.handle, self._given.struct))
        return self


def request_chain(factory: SamplerFactory, request: Request) -> SamplerChain:
    """The sampler of a request that has neither a constraint nor a logits processor."""
    chain = factory.make(request)
    assert isinstance(chain, SamplerChain)
    return chain
