"""Converts Dynamo's requests to ``SamplingParams``, and our deltas to Dynamo's chunks. Does not import Dynamo.

A request is a dict from Dynamo's frontend. An option without an equivalent here is refused with an error that names it,
unless its value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.params import SamplingParams
from llamapipe.results import Delta, TokenLogprob

_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}
_CONSTRAINTS: Final = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
# Values that have no effect, besides None. The frontend handles stop strings and trims them.
_WITHOUT_EFFECT: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    "sampling_options": {
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "include_stop_str_in_output": (False,),
    },
    "stop_conditions": {"stop_token_ids_visible": ([],), "max_thinking_tokens": ()},
    "output_options": {"prompt_logprobs": (), "no_stop_trim": (False,)},
}
_READ: Final = {
    "sampling_options": {*_SAMPLING, "seed", "guided_decoding"},
    "stop_conditions": {
        "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "stop_token_ids_hidden",
    },
    # All but logprobs concern how the frontend writes tokens.
    "output_options": {"logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"},
}  # fmt: skip
# Parts of a request that only other kinds of workers can serve.
_OTHER_WORKERS: Final = {
    "prefill_result": "disaggregated serving",
    "bootstrap_info": "disaggregated serving",
    "multi_modal_data": "images, audio and video",
    "mm_processor_kwargs": "images, audio and video",
    "encoder_result": "images, audio and video",
    "prompt_embeds": "prompts of embeddings",
}


def sampling_params(request: Mapping[str, Any], adapters: Collection[str] = ()) -> SamplingParams:
    """Return the options of a request; missing options have llamapipe's defaults.

    ``adapters``: the names of adapters, which requests use as model names.

    Raises InvalidRequestError for an unsupported option and for a wrong value; the message names the option.
    """
    for key, what in _OTHER_WORKERS.items():
        if request.get(key):
            raise InvalidRequestError(f"{key} is given, but this worker does not support {what}")
    sampling, stop, output = (_section(request, name) for name in _READ)
    values: dict[str, Any] = {ours: sampling[name] for name, ours in _SAMPLING.items() if name in sampling}
    if (name := request.get("model")) in adapters:
        values["adapter"] = name
    if "seed" in sampling:
        values["seed"] = sampling["seed"] % 2**64
    values["max_tokens"] = stop.get("max_tokens")
    values["stop_token_ids"] = [
        *stop.get("stop_token_ids", ()),
        *stop.get("stop_token_ids_hidden", ()),
    ]
    for name in ("min_tokens", "ignore_eos"):
        if name in stop:
            values[name] = stop[name]
    n_most, n_least = values["max_tokens"], values.get("min_tokens")
    if request.get("migration_link") is not None and n_most is not None and n_least is not None:
        values["min_tokens"] = min(n_least, n_most)  # the lost worker has generated the tokens before
    if "logprobs" in output:
        values["logprobs"] = output["logprobs"]
    if "guided_decoding" in sampling:
        values.update(_constraint(request, sampling["guided_decoding"]))
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(str(error)) from None


def _section(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options in one section of a request that are set and have an effect."""
    options = {}
    for option, value in (request.get(name) or {}).items():
        if value is None:
            continue
        if option in _READ[name]:
            options[option] = value
        elif value not in _WITHOUT_EFFECT[name].get(option, ()):
            raise InvalidRequestError(f"{option} is {quoted(value)}, which this worker does not support")
    return options


def _constraint(request: Mapping[str, Any], guided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraint on the output, as arguments of SamplingParams."""
    values: dict[str, Any] = {}
    for name, value in guided.items():
        if value is None:
            continue
        if name in _CONSTRAINTS:
            values[_CONSTRAINTS[name]] = value
        elif name == "choice":
            values["lark"] = "start: " + " | ".join(json.dumps(text) for text in value)
        else:
            raise InvalidRequestError(
                f"guided_decoding has {name}={quoted(value)}, which this worker does not support"
            )
    if values and request.get("migration_link") is not None:
        # The other worker's tokens are part of the prompt now, so the constraint would start over after them.
        raise InvalidRequestError(
            "a request with guided_decoding lost its worker and cannot continue on another one; send it again"
        )
    return values


def chunk(delta: Delta, n_prompt: int, n_generated: int, wants_logprobs: bool) -> dict[str, Any]:
    """Return a delta as a Dynamo chunk. ``n_generated``: tokens of the request so far, including this delta's."""
    result: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": 0}
    if wants_logprobs and delta.logprobs:
        result["log_probs"] = [entry.logprob for entry in delta.logprobs]
        result["top_logprobs"] = [_top(entry) for entry in delta.logprobs]
    if delta.finish_reason is not None:
        result.update(last_chunk(delta.finish_reason, n_prompt, n_generated))
        result["token_ids"] = list(delta.token_ids)
    return result


def last_chunk(reason: str, n_prompt: int, n_generated: int) -> dict[str, Any]:
    """Return the last chunk of a request, which has no tokens."""
    return {
        "token_ids": [],
        "index": 0,
        "finish_reason": reason,
        "completion_usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
        },
    }


def _top(entry: TokenLogprob) -> list[dict[str, Any]]:
    """Return the most probable tokens of a position. The sampled one is added if it is not among them."""
    ranked = [(top.id, top.logprob, top.piece) for top in entry.top]
    if all(token != entry.id for token, _, _ in ranked):
        ranked.append((entry.id, entry.logprob, entry.piece))
    return [
        {
            "rank": rank,
            "token_id": token,
            "token": piece.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(piece),
        }
        for rank, (token, logprob, piece) in enumerate(ranked, 1)
    ]
