"""Saved states and caches under llama-cpp-python's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class LlamaState:
    """The tokens of a thread's sequence and, in ``llama_state``, a snapshot of their KV cells. Can be pickled."""

    input_ids: tuple[int, ...]
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int

    def __repr__(self) -> str:
        return f"<LlamaState n_tokens={self.n_tokens} n_bytes={self.llama_state_size}>"


class LlamaRAMCache:
    """Asks for a cache of prefixes. The engine has one at any rate, so this only holds its ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    def __repr__(self) -> str:
        return f"LlamaRAMCache(capacity_bytes={self.capacity_bytes})"


LlamaCache = LlamaRAMCache
