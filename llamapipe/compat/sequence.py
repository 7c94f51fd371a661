"""The low-level calls of llama-cpp-python: one sequence of tokens for each thread, evaluated when it is sampled."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from threading import local

import numpy as np
import numpy.typing as npt

from llamapipe.arguments import check_tokens
from llamapipe.compat.state import LlamaState
from llamapipe.engine.engine import Engine
from llamapipe.engine.params import SamplingParams


class _Tokens(local):
    def __init__(self) -> None:
        self.ids: list[int] = []


class ThreadSequence:
    """The tokens that a thread has evaluated. What was computed for them is found again in the prefix cache."""

    def __init__(self, engine: Engine, n_ctx: int) -> None:
        self._engine, self._n_ctx = engine, n_ctx
        self._tokens = _Tokens()

    def __repr__(self) -> str:
        return f"<ThreadSequence n_tokens={len(self.ids)}>"

    @property
    def ids(self) -> list[int]:
        """The tokens of the calling thread."""
        return self._tokens.ids

    def reset(self) -> None:
        """Forgets them."""
        self._tokens.ids = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens. Raises ValueError for tokens outside the vocabulary, and if the context is too small."""
        found = check_tokens("tokens", tokens, self._engine.model.n_vocab)
        n = len(self.ids) + len(found)
        if n > self._n_ctx:
            raise ValueError(f"{n} tokens exceed the context of {self._n_ctx}; raise n_ctx or call reset()")
        self.ids.extend(found)

    def sample(self, params: SamplingParams) -> int:
        """The next token, which may be one that ends generation; it is not appended. Raises ValueError."""
        choice = self._engine.generate(self._prompt(), params).choices[0]
        if choice.stop_token is not None:
            return choice.stop_token
        return choice.token_ids[0]

    def generate(self, params: SamplingParams, end: int) -> Generator[int, Sequence[int] | None, None]:
        """Tokens, one after the other, each appended; ``end`` if generation ends. Tokens sent are appended too."""
        with self._engine.start(self._prompt(), params) as generation:
            while (token := generation.next()) is not None:
                self.ids.append(token.id)
                if (more := (yield token.id)) is not None:
                    self.extend(more)
                    generation.append(more)
            if generation.finish_reason == "stop":
                yield end

    def logits(self) -> npt.NDArray[np.float32]:
        """The row of logits after the last token, float32 ``(n_vocab,)``."""
        rows: list[npt.NDArray[np.float32]] = []

        def keep(row: npt.NDArray[np.float32]) -> None:
            rows.append(row.copy())

        self._engine.generate(self._prompt(), SamplingParams(max_tokens=1, logits_processors=[keep]))
        return rows[0]

    def save(self, seed: int) -> LlamaState:
        """The sequence and its KV cells."""
        cells = b""
        if self.ids:
            with self._engine.start(self.ids, SamplingParams(max_tokens=1, temperature=0)) as generation:
                generation.next()
                cells = generation.snapshot()
        return LlamaState(tuple(self.ids), len(self.ids), cells, len(cells), seed)

    def load(self, state: LlamaState) -> None:
        """Takes over a sequence; its cells go to the prefix cache. Raises ValueError for what another model saved."""
        if state.llama_state:
            with closing(self._engine.restore(state.llama_state)):
                pass
        self._tokens.ids = list(state.input_ids)

    def _prompt(self) -> list[int]:
        if not self.ids:
            raise ValueError("nothing was evaluated; call eval(tokens) first")
        return list(self.ids)
