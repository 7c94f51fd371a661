"""A GBNF grammar's rules, as llama.cpp has them once repetitions are expanded."""

from __future__ import annotations

from dataclasses import dataclass, field

TERMINAL = -1
Alternative = list[int]  # ids of rules, and TERMINAL


@dataclass
class Rules:
    """``alternatives[i]`` are those of rule ``i``; rules that repetitions and brackets stand for have no name."""

    names: dict[str, int] = field(default_factory=dict)
    alternatives: dict[int, list[Alternative]] = field(default_factory=dict)
    first_used: dict[str, int] = field(default_factory=dict)  # offset of each name
    tokens: list[tuple[int, int | str]] = field(default_factory=list)  # offset; the id, or the text in <...>
    n_symbols: int = 0

    def symbol(self, name: str, at: int) -> int:
        """The number of a named rule."""
        if name not in self.names:
            self.names[name] = self.new()
            self.first_used[name] = at
        return self.names[name]

    def new(self) -> int:
        """The number of a rule without a name."""
        self.n_symbols += 1
        return self.n_symbols - 1
