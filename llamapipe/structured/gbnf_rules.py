"""The rules of a GBNF grammar after llama.cpp's expansion of repetitions and brackets.

Only the structure is kept: terminals are all alike here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TERMINAL = -1
Alternative = list[int]  # ids of rules, and TERMINAL


@dataclass
class Rules:
    """``alternatives[i]`` belongs to rule ``i``. Rules made for repetitions and brackets have no name."""

    names: dict[str, int] = field(default_factory=dict)
    alternatives: dict[int, list[Alternative]] = field(default_factory=dict)
    first_used: dict[str, int] = field(default_factory=dict)  # offset of the first use of each name
    tokens: list[tuple[int, int | str]] = field(default_factory=list)  # offset; the id, or the text in <...>
    n_symbols: int = 0

    def symbol(self, name: str, at: int) -> int:
        """The id of a named rule, which is created at its first use."""
        if name not in self.names:
            self.names[name] = self.new()
            self.first_used[name] = at
        return self.names[name]

    def new(self) -> int:
        """The id of a new rule without a name."""
        self.n_symbols += 1
        return self.n_symbols - 1
