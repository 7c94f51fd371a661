"""From the harness's generation arguments to `SamplingParams`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from llamapipe.arguments import quoted
from llamapipe.params import SamplingParams

# The harness's name: llamapipe's name. An option that a task does not set removes no token.
_CUTS = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p"}
_PENALTIES = {
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", *_LENGTHS, "do_sample", "temperature", *_CUTS, *_PENALTIES, "seed", "num_beams")


def sampling_params(gen_kwargs: Mapping[str, Any], default_max_gen_toks: int) -> SamplingParams:
    """Params of one request.

    Without sampling the most probable token is taken. Sampled requests without a ``seed`` get one from Python's
    generator, which the harness seeds. Raises ValueError and TypeError for arguments that mean nothing here: they
    would change results, so they are not passed over.
    """
    if not isinstance(gen_kwargs, Mapping):
        raise TypeError(f"generation arguments must be a dict, not {type(gen_kwargs).__name__}")
    given = {name: value for name, value in gen_kwargs.items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            raise ValueError(
                f"llamapipe has no generation argument {quoted(name)}; it has: {', '.join(_KNOWN)}"
            )
    if given.get("num_beams", 1) != 1:
        raise ValueError(f"num_beams is {given['num_beams']}; llamapipe searches no beams, leave it out")
    normal: dict[str, Any] = dict(normalize_gen_kwargs(given, default_max_gen_toks))
    sampled = bool(normal["do_sample"])
    temperature = float(normal.get("temperature", 1.0)) if sampled else 0.0
    options = {**_NEUTRAL, **{ours: given[name] for name, ours in _CUTS.items() if name in given}}
    options |= {ours: given[name] for name, ours in _PENALTIES.items() if name in given}
    seed = given.get("seed")
    return SamplingParams(
        max_tokens=normal["max_gen_toks"],
        temperature=temperature,
        stop=_stops(normal["until"]),
        seed=random.getrandbits(63) if seed is None and sampled else seed,
        repeat_last_n=-1,  # as transformers counts: the whole text
        **options,
    )


def _stops(until: list[Any]) -> list[str]:
    for text in until:
        if not isinstance(text, str):
            raise TypeError(f"until must hold strings, not {type(text).__name__}")
    return [text for text in until if text]  # an empty one means none to the harness
