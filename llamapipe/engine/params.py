"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llamapipe.llama.check import check_flag, check_float, check_int
from llamapipe.llama.sampler import check_bias

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request; frozen, usable for any number of requests and threads.

    The order is llama.cpp's: ``logit_bias`` and penalties change logits, then ``top_k``, ``typical_p``, ``top_p`` and
    ``min_p`` cut candidates off, then ``temperature`` divides what is left and one token is drawn.

    - ``max_tokens``: most generated tokens; None: until end of generation or of the context.
    - ``temperature``: 0 takes the most probable token, on ties the lowest id. ``top_k``: 0 keeps all.
    - ``repeat_penalty``, ``presence_penalty``, ``frequency_penalty`` look at the last ``repeat_last_n`` tokens, the
      prompt's included (-1: all of them, 0: none).
    - ``logit_bias``: token id to a number added to its logit; ``float("-inf")`` forbids it, else at
      most a million.
    - ``seed``: 0 to 2**64 - 1; None draws one, told in ``Completion.seed``.
    - ``stop``: strings that end the text before them; ``stop_token_ids``: tokens that end it.
    - ``ignore_eos``: never choose a token that ends generation.

    Raises ValueError or TypeError naming the field.
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._int("max_tokens", 1, _INT32_MAX, optional=True)
        self._int("top_k", 0, _INT32_MAX)
        self._int("repeat_last_n", -1, _INT32_MAX)
        self._int("seed", 0, 2**64 - 1, optional=True)
        self._float("temperature", 0.0, 1e6)
        self._float("top_p", 0.0, 1.0)
        self._float("min_p", 0.0, 1.0)
        self._float("typical_p", 0.0, 1.0)
        self._float("repeat_penalty", 1e-6, 1e6)
        self._float("presence_penalty", -1e6, 1e6)
        self._float("frequency_penalty", -1e6, 1e6)
        check_flag("ignore_eos", self.ignore_eos)
        self._set("stop", _stop_strings(self.stop))
        self._set(
            "stop_token_ids",
            tuple(_token("stop_token_ids", t) for t in _items("stop_token_ids", self.stop_token_ids)),
        )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(
                    f"logit_bias must map token ids to numbers, not be a {type(self.logit_bias).__name__}"
                )
            biases = {
                _token("logit_bias", t): check_bias(f"logit_bias of token {t}", v)
                for t, v in self.logit_bias.items()
            }
            self._set("logit_bias", MappingProxyType(biases))

    def __hash__(self) -> int:
        biases = None if self.logit_bias is None else frozenset(self.logit_bias.items())
        return hash(
            (
                self.max_tokens,
                self.temperature,
                self.top_k,
                self.top_p,
                self.min_p,
                self.seed,
                self.stop,
                biases,
            )
        )

    def __reduce__(self) -> Any:  # a mappingproxy cannot be pickled
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.logit_bias is not None:
            values["logit_bias"] = dict(self.logit_bias)
        return _rebuild, (values,)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _int(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            self._set(name, check_int(name, value, low, high))

    def _float(self, name: str, low: float, high: float) -> None:
        self._set(name, check_float(name, getattr(self, name), low, high))


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _items(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}")
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}") from None


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _items("stop", value)
    for s in strings:
        if not isinstance(s, str):
            raise TypeError(f"stop must hold strings, not {type(s).__name__}")
        if not s:
            raise ValueError("stop holds an empty string, which would end every text at once; leave it out")
    return tuple(strings)


def _token(name: str, value: Any) -> int:
    return check_int(f"a token id of {name}", value, 0, _INT32_MAX)
