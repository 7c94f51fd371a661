"""Objects that own native memory are neither copied nor pickled: two owners would free it twice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch, SamplerChain

WAYS: list[Callable[[object], object]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_owners_are_not_copied(tiny: lp.Model, way: Callable[[object], object]) -> None:
    with (
        lp.Engine(tiny, n_ctx=64, n_threads=1) as engine,
        lp.Pipeline(tiny, n_ctx=64, n_threads=1) as pipeline,
        Context(tiny, n_ctx=64, n_threads=1) as context,
        SamplerChain(tiny.vocab) as sampler,
        engine.start([5, 6, 7], lp.SamplingParams(ignore_eos=True)) as generation,
        engine.stream([5, 6, 7], lp.SamplingParams(max_tokens=2, ignore_eos=True)) as stream,
        engine.cache_prefix([5] * 20) as prefix,
    ):
        step = pipeline.submit(lp.DecodeBatch.of_tokens([5, 6]))
        owners = [tiny, tiny.vocab, engine, pipeline, context, sampler, generation, stream, prefix, step]
        for owner in owners:
            with pytest.raises(TypeError, match=rf"a {type(owner).__name__} cannot be copied or pickled"):
                way(owner)
        assert len(list(stream)) == 2
        assert generation.next() is not None
        context.decode(DecodeBatch.of_tokens([5, 6]))
    assert tiny.tokenize("a")


def test_what_owns_nothing_is_copied(tiny: lp.Model) -> None:
    with lp.Engine(tiny, n_ctx=64, n_threads=1) as engine:
        params = lp.SamplingParams(max_tokens=3, temperature=0, logit_bias={5: 1.0})
        out = engine.generate([5, 6], params)
    for value in (params, out):
        assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
