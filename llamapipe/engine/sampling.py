"""From a request's SamplingParams to its sampler chain."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from llamapipe.engine.params import SamplingParams
from llamapipe.engine.request import Request
from llamapipe.llama.sampler import SamplerChain
from llamapipe.llama.vocab import Vocab


def choose_seed(params: SamplingParams) -> int:
    """The request's seed, drawn when none is given."""
    return int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed


def history(params: SamplingParams, tokens: list[int]) -> list[int]:
    """The tokens that penalties look at."""
    n = params.repeat_last_n
    return tokens[-n:] if n > 0 else tokens if n < 0 else []


def sampler_factory(vocab: Vocab, n_ctx: int) -> Callable[[Request], SamplerChain]:
    """A function that makes the sampler of a request when it gets its first slot; for the decoder thread."""

    def make(request: Request) -> SamplerChain:
        params: SamplingParams = request.params
        chain = SamplerChain(vocab, request.seed)
        biases = dict(params.logit_bias or {})
        if params.ignore_eos:
            biases.update(dict.fromkeys(vocab.eog_tokens, -math.inf))
        if biases:
            chain.set_bias(biases)
        if params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            last_n = n_ctx if params.repeat_last_n < 0 else params.repeat_last_n
            chain.set_penalties(
                last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
            )
            chain.accept(history(params, request.tokens))
        if params.temperature == 0:
            return chain.add_temperature(0.0)
        chain.add_top_k(params.top_k)
        if params.typical_p < 1.0:
            chain.add_typical(params.typical_p)
        if params.top_p < 1.0:
            chain.add_top_p(params.top_p)
        if params.min_p > 0.0:
            chain.add_min_p(params.min_p)
        return chain.add_temperature(params.temperature)

    return make
