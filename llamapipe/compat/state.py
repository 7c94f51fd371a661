"""Saved states and caches under llama-cpp-python's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from llamapipe.compat.names import missing


@dataclass(frozen=True, repr=False)
class LlamaState:
    """The tokens of a thread's sequence and, in ``llama_state``, a snapshot of their KV cells. Can be pickled."""

    input_ids: tuple[int, ...]
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, for ``scores`` with the reason."""
            raise missing("LlamaState", name, dir(self))

    def __repr__(self) -> str:
        return f"<LlamaState n_tokens={self.n_tokens} n_bytes={self.llama_state_size}>"


class LlamaRAMCache:
    """Asks for a cache of prefixes. The engine has one at any rate, so this only holds its ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, for ``cache_state`` with the reason."""
            raise missing("LlamaRAMCache", name, dir(self))

    @property
    def cache_size(self) -> int:
        """Bytes stored in this object: 0. ``Llama.engine.stats()`` has those of the engine's cache."""
        return 0

    def __repr__(self) -> str:
        return f"LlamaRAMCache(capacity_bytes={self.capacity_bytes})"


class LlamaDiskCache:
    """Prefixes cannot be cached on disk. Raises NotImplementedError."""

    def __init__(self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> NoReturn:
        raise NotImplementedError(
            "LlamaDiskCache is not supported: prefixes are cached in memory, without set_cache(). To keep one on disk, "
            "write Llama.save_state() with pickle"
        )


LlamaCache = LlamaRAMCache
