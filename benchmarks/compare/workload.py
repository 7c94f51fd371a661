"""What every side is asked to do."""

from __future__ import annotations

from typing import Any, NamedTuple

_WORDS = ["red", "green", "blue", "black", "white"]
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
    """``n`` requests at once, each with a prompt of so many tokens and so many to generate, on so many threads.

    ``n_shared``: tokens that all prompts begin with, as they do with a system prompt; prompts are cached then.
    ``schema``: answers are JSON of SCHEMA, and end with it.
    """

    n: int
    n_prompt: int
    n_generate: int
    n_threads: int
    n_shared: int = 0
    schema: bool = False

    @property
    def n_timed(self) -> int:
        """How often a round does it: short works more often."""
        return max(256 // (self.n * self.n_generate), 1)

    def warms_up(self, seconds: float) -> bool:
        """Whether a round does it once more before, untimed, where it takes so long.

        A side that has just started finds the other sides' weights in the caches.
        """
        return seconds < 2 * self.n_timed

    @property
    def n_ctx(self) -> int:
        """Cells of one request."""
        return -(-(self.n_prompt + self.n_generate + 8) // 256) * 256

    def prompts(self, salt: int) -> list[list[int]]:
        """Of which no two begin alike after what they share, whatever the round; ids that every vocabulary here has."""
        shared = [300 + (17 * j + j * j) % 1900 for j in range(self.n_shared)]
        n_own = self.n_prompt - self.n_shared
        return [
            shared + [300 + (31 * (i + 64 * salt) + 7 * j * (i + 1) + j * j) % 1900 for j in range(n_own)]
            for i in range(self.n)
        ]
