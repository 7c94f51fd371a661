"""What every side is asked to do."""

from __future__ import annotations

from typing import Any, NamedTuple

_WORDS = ["red", "green", "blue", "black", "white"]
_LONG_S = 2.0  # works that take longer need not be repeated to be measured
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Alan", "Barbara", "Donald", "Edsger", "Grace"]},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "is_member": {"type": "boolean"},
        "colours": {"type": "array", "items": {"enum": _WORDS}, "minItems": 4, "maxItems": 4},
    },
    "required": ["name", "age", "is_member", "colours"],
    "additionalProperties": False,
}


class Work(NamedTuple):
    """``n`` requests at once, each with ``n_prompt`` and ``n_generate`` tokens, on ``n_threads`` threads.

    ``n_shared``: prompt tokens that all requests share, as with a system prompt; if there are any, prompts are cached.
    ``schema``: answers are JSON that matches SCHEMA, and generation ends with it. ``by_processor``: seconds are of
    processor time, but for first tokens: for a busy machine.
    """

    n: int
    n_prompt: int
    n_generate: int
    n_threads: int
    n_shared: int = 0
    schema: bool = False
    by_processor: bool = False

    def n_timed(self, seconds: float) -> int:
        """How often a round does it, where it takes so long (0: not known): short works more often."""
        return max(256 // (self.n * self.n_generate), 1) if 0 < seconds < _LONG_S else 1

    def warms_up(self, seconds: float) -> bool:
        """Whether a round does it once more before, untimed, where it takes so long.

        A side that has just started finds the other sides' weights in the caches.
        """
        return 0 < seconds < _LONG_S

    @property
    def n_ctx(self) -> int:
        """Cells of one request."""
        return -(-(self.n_prompt + self.n_generate + 8) // 256) * 256

    def prompts(self, salt: int) -> list[list[int]]:
        """Prompts that differ from the first unshared token on, in all rounds. Every vocabulary here has their ids."""
        shared = [300 + (17 * j + j * j) % 1900 for j in range(self.n_shared)]
        n_own = self.n_prompt - self.n_shared
        return [
            shared + [300 + (31 * (i + 64 * salt) + 7 * j * (i + 1) + j * j) % 1900 for j in range(n_own)]
            for i in range(self.n)
        ]
