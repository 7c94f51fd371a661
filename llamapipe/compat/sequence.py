"""The low-level calls of llama-cpp-python: one sequence of tokens for each thread, evaluated when it is sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.arguments import check_tokens, wrong_option
from llamapipe.compat.names import NO_SCORES
from llamapipe.compat.sampling import SAMPLING_OPTIONS
from llamapipe.compat.state import LlamaState
from llamapipe.engine import Engine
from llamapipe.params import SamplingParams


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


class SequenceMethods:
    """The methods of ``Llama`` that work on the calling thread's sequence."""

    _n_ctx: int
    _seed: int

    def _own(self) -> ThreadSequence:
        raise NotImplementedError

    def _params(self, max_tokens: int | None, seed: int | None, **sampling: Any) -> SamplingParams:
        raise NotImplementedError

    def token_eos(self) -> int:
        """The token that ends a text; -1 if there is none."""
        raise NotImplementedError

    @property
    def n_tokens(self) -> int:
        """How many tokens the calling thread has evaluated."""
        return len(self._own().ids)

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """The tokens that the calling thread has evaluated."""
        return np.array(self._own().ids, np.intc)

    @property
    def eval_tokens(self) -> deque[int]:
        """The same as a deque."""
        return deque(self._own().ids, maxlen=self._n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The logits after the last token. Computes them."""
        return deque([self._own().logits().tolist()], maxlen=1)

    @property
    def scores(self) -> Any:
        """llama-cpp-python's logits of all tokens, which are not kept here."""
        raise NotImplementedError(NO_SCORES)

    def reset(self) -> None:
        """Forgets the calling thread's tokens."""
        self._own().reset()

    def eval(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the calling thread's sequence. They are computed when a token is sampled."""
        self._own().extend(tokens)

    def sample(self, *, temp: float = 0.8, idx: int | None = None, **sampling: Any) -> int:
        """Samples the token after the calling thread's sequence, and does not append it.

        ``sampling``: as in ``generate``. Raises TypeError for unknown names, and ValueError for ``idx``: only the last
        position can be sampled.
        """
        _check_names("sample", sampling)
        if idx is not None:
            raise ValueError("idx is not supported: only the last position can be sampled")
        return self._own().sample(self._params(1, None, temperature=temp, **sampling))

    def generate(
        self, tokens: Sequence[int], *, temp: float = 0.8, reset: bool = True, **sampling: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Tokens after ``tokens``, one after the other; the token that ends generation, if one does, is the last.

        ``sampling``: ``top_k``, ``top_p``, ``min_p``, ``typical_p``, ``repeat_penalty``, ``frequency_penalty``,
        ``presence_penalty``, ``mirostat_mode``, ``mirostat_tau``, ``mirostat_eta``, ``logits_processor``,
        ``stopping_criteria``, ``grammar``. Tokens that are sent to the generator are appended. Raises TypeError for
        unknown names.
        """
        _check_names("generate", sampling)
        sequence = self._own()
        params = self._params(None, None, temperature=temp, **sampling)
        if reset:
            sequence.reset()
        sequence.extend(tokens)
        return sequence.generate(params, self.token_eos())

    def save_state(self) -> LlamaState:
        """The calling thread's sequence, with its KV cells."""
        return self._own().save(self._seed)

    def load_state(self, state: LlamaState) -> None:
        """Makes a saved sequence the calling thread's."""
        self._own().load(state)


def _check_names(method: str, sampling: Mapping[str, Any]) -> None:
    wrong = sampling.keys() - SAMPLING_OPTIONS
    if wrong:
        raise TypeError(wrong_option(method, min(wrong), {*SAMPLING_OPTIONS, "temp"}, {}))
