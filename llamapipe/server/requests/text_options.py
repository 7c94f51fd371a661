"""The fields and checks that all requests for generated text share."""

from __future__ import annotations

from typing import Annotated

import msgspec

from llamapipe._messages import shown as shown_value
from llamapipe.errors import InvalidRequestError
from llamapipe.params import SamplingParams
from llamapipe.server._fields import Unused
from llamapipe.server.dialects.openai_stream import Format
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.sampling import (
    Constraint,
    LoraScale,
    Prediction,
    Sampling,
    with_field,
)
from llamapipe.server.state import ServerState
from llamapipe.work.long_work import takes_long

_MOST_TOKENS = 2**31 - 1


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. ``include_obfuscation``: events are padded to hide the length of their text.

    ``continuous_usage_stats``: each event has the usage so far, as in vLLM.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Streamed(Sampling, kw_only=True):
    """A request whose answer may be a stream."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None  # of llama-server: each event of a stream has the timings so far
    lora: list[LoraScale] | None = None
    return_progress: bool | None = None  # of llama-server: a stream reports the prompt's progress
    prediction: Prediction | str | None = None
    # llama-server's names of other fields.
    n_predict: int | None = None
    n_probs: int | None = None
    samplers: list[str] | str | None = None
    t_max_predict_ms: int | None = None
    response_fields: Annotated[list[str] | None, Unused([])] = None
    user: Annotated[str | None, Unused()] = None

    def check(self) -> None:
        """Raise ApiError 400 for stream options without a stream, unless ``"stream": false`` is explicit."""
        if self.stream is None and self.stream_options is not None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")

    def format(self) -> Format:
        """Return what the answer contains in addition to its text."""
        options = self.stream_options or StreamOptions()
        continuous = bool(options.continuous_usage_stats)
        return Format(
            with_usage=bool(options.include_usage) or continuous,
            continuous_usage=continuous,
            padded=bool(options.include_obfuscation),
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            timings_per_token=bool(self.timings_per_token),
            predicted=self.prediction is not None,
            with_progress=bool(self.return_progress),
        )


def token_limit(**limits: int | None) -> int | None:
    """Return the smallest of several limits on generated tokens. None and -1 mean no limit.

    Raises ApiError 400, which names the field.
    """
    for name, limit in limits.items():
        if limit is not None and limit < -1:
            raise ApiError(400, f"{name} is {limit}; it must be 0 or more, or -1 for no limit", name)
        if limit is not None and limit > _MOST_TOKENS:
            raise ApiError(
                400,
                f"{name} is {shown_value(limit)}; it must be at most {_MOST_TOKENS}, or -1 for no limit",
                name,
            )
    return min((limit for limit in limits.values() if limit is not None and limit >= 0), default=None)


async def check_params(state: ServerState, params: SamplingParams, constraint: Constraint | None) -> None:
    """Check params against the engine's model, before prompts are read. Raises ApiError 400, which names the field."""
    engine = state.engine
    try:
        if takes_long((), params):  # the constraint is compiled now, and cached
            await state.in_thread(engine.check_params, params)
        else:
            engine.check_params(params)
    except InvalidRequestError as e:
        raise with_field(e, "" if constraint is None else constraint.field) from None
