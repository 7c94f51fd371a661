"""The constructor of ``Llama``, the objects behind it, and its tokens, states and lifetime.

The low-level calls of llama-cpp-python work on one sequence of tokens per thread. The sequence is evaluated when a
token is sampled.
"""

from __future__ import annotations

import os
import random
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from llamapipe._messages import instead_of, quoted, unknown_attribute, wrong_option
from llamapipe._names_elsewhere import INSTEAD
from llamapipe.arguments import check_float, check_int, check_tokens
from llamapipe.compat import formats, options
from llamapipe.compat.sampling import SAMPLING_OPTIONS, sampling_params
from llamapipe.compat.tokenizer import LlamaTokenizer, PromptMaker
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine, with_tuning
from llamapipe.errors import EngineClosedError
from llamapipe.llama.adapter import MOST_SCALE, AnyAdapter
from llamapipe.llama.model import Model
from llamapipe.locks import Lock
from llamapipe.params import SamplingParams


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
            """Raise AttributeError, for ``scores`` with the reason."""
            raise _missing("LlamaState", name, dir(self))

    def __repr__(self) -> str:
        return f"<LlamaState n_tokens={self.n_tokens} n_bytes={self.llama_state_size}>"


class LlamaRAMCache:
    """Asks for a prefix cache. The engine always has one, so this object only holds its ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, for ``cache_state`` with the reason."""
            raise _missing("LlamaRAMCache", name, dir(self))

    @property
    def cache_size(self) -> int:
        """Bytes stored in this object: 0. ``Llama.engine.stats()`` has the size of the engine's cache."""
        return 0

    def __repr__(self) -> str:
        return f"LlamaRAMCache(capacity_bytes={self.capacity_bytes})"


class LlamaDiskCache:
    """Not supported: ``lp.Engine(cache_dir=)`` keeps prefixes on disk. Raises NotImplementedError."""

    def __init__(self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> NoReturn:
        raise NotImplementedError(
            "LlamaDiskCache is not supported: prefixes are cached in memory, without set_cache(). To keep them on "
            "disk, use lp.Engine(..., cache_dir=DIR), or write Llama.save_state() with pickle"
        )


LlamaCache = LlamaRAMCache


class _Tokens(local):
    def __init__(self) -> None:
        self.ids: list[int] = []


class ThreadSequence:
    """The tokens that a thread has evaluated. Their KV cells are found again in the prefix cache."""

    def __init__(self, engine: Engine, n_ctx: int, adapter: dict[str | AnyAdapter, float] | None) -> None:
        self._engine, self._n_ctx = engine, n_ctx
        self._params = SamplingParams(max_tokens=1, temperature=0, adapter=adapter)
        self._tokens = _Tokens()

    def __repr__(self) -> str:
        return f"<ThreadSequence n_tokens={len(self.ids)}>"

    @property
    def ids(self) -> list[int]:
        """The tokens of the calling thread."""
        return self._tokens.ids

    def reset(self) -> None:
        """Forget the tokens."""
        self._tokens.ids = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises ValueError for tokens outside the vocabulary or if the context is too small."""
        ids = check_tokens("tokens", tokens, self._engine.model.n_vocab)
        n = len(self.ids) + len(ids)
        if n > self._n_ctx:
            raise ValueError(f"{n} tokens exceed the context of {self._n_ctx}; raise n_ctx or call reset()")
        self.ids.extend(ids)

    def sample(self, params: SamplingParams, n: int) -> int:
        """Sample the token after the first ``n``; it may be one that ends generation. Raises ValueError."""
        choice = self._engine.generate(self._prompt()[:n], params).choices[0]
        if choice.stop_token is not None:
            return choice.stop_token
        return choice.token_ids[0]

    def generate(self, params: SamplingParams, end: int) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens and append each; yield ``end`` if generation ends. Tokens that are sent are also appended."""
        with self._engine.start(self._prompt(), params) as generation:
            while (token := generation.next()) is not None:
                self.ids.append(token.id)
                if (more := (yield token.id)) is not None:
                    self.extend(more)
                    generation.append(more)
            if generation.finish_reason == "stop":
                yield end

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the row of logits after the last token, float32 ``(n_vocab,)``."""
        rows: list[npt.NDArray[np.float32]] = []

        def keep(row: npt.NDArray[np.float32]) -> None:
            rows.append(row.copy())

        self._engine.generate(self._prompt(), replace(self._params, logits_processors=[keep]))
        return rows[0]

    def save(self, seed: int) -> LlamaState:
        """Return the sequence and its KV cells."""
        cells = b""
        if self.ids:
            with self._engine.start(self.ids, self._params) as generation:
                generation.next()
                cells = generation.snapshot()
        return LlamaState(tuple(self.ids), len(self.ids), cells, len(cells), seed)

    def load(self, state: LlamaState) -> None:
        """Load a saved sequence; its cells go to the prefix cache. Raises ValueError for a state of another model."""
        if state.llama_state:
            with closing(self._engine.restore(state.llama_state, self._params)):
                pass
        self._tokens.ids = list(state.input_ids)

    def _prompt(self) -> list[int]:
        if not self.ids:
            raise ValueError("nothing was evaluated; call eval(tokens) first")
        return list(self.ids)


def _check_names(method: str, sampling: Mapping[str, Any]) -> None:
    wrong = sampling.keys() - SAMPLING_OPTIONS
    if wrong:
        raise TypeError(wrong_option(method, min(wrong), {*SAMPLING_OPTIONS, "temp"}, {}))


Answer = dict[str, Any]


class LlamaBase:
    """The base of ``Llama``: everything except the calls that answer in OpenAI's form."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        seed: int = options.NO_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Any = None,
        draft_model: Any = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        n_seq_max: int = 8,
        n_cells: int | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        template_args: Mapping[str, Any] | None = None,
        **older: Any,
    ) -> None:
        values = {name: value for name, value in locals().items() if name != "self"}
        self._model: Model | None = None
        self._owned = ExitStack()
        # As llama-cpp-python does: programs that move over do not close.
        self._free = weakref.finalize(self, _close_dropped, self._owned)
        del values["older"]
        options.check_older(older, values)
        options.check_refused(values)
        options.check_integers(values)
        template = formats.template_of(chat_format, chat_template)
        if template_args and chat_format in formats.FORMATS:
            raise ValueError(
                f"template_args are for a template, and chat_format={quoted(chat_format)} has none; leave one out"
            )
        self.model_path = os.fspath(model_path)
        # logits_all and no_perf change what llama-cpp-python prints or allocates, not what it answers.
        self.verbose = verbose
        self.chat_format = chat_format
        self.chat_handler = None  # another is refused
        self._named = formats.FORMATS.get(chat_format or "")
        self._last_n = last_n_tokens_size
        self._lock = Lock()
        self._embedding = embedding
        self._embedder: Embedder | None = None
        self._n_batch = n_batch
        self._options = values
        self._template_args = dict(template_args or {})
        self._cache: LlamaRAMCache | None = None
        self.set_seed(seed)
        model = Model(self.model_path, chat_template=template, **options.model_options(values))
        self._model = self._owned.enter_context(model)
        self._adapter: dict[str | AnyAdapter, float] | None = None
        try:
            self._n_ctx = n_ctx or model.n_ctx_train
            scale = check_float("lora_scale", lora_scale, -MOST_SCALE, MOST_SCALE)
            if lora_path is not None:
                if embedding:
                    raise ValueError(
                        "lora_path is not supported with embedding=True: embeddings have no adapters"
                    )
                self._adapter = {model.load_adapter(lora_path): scale}
            self._pooling = options.pooling(pooling_type, model.metadata)
            self._tokenizer = LlamaTokenizer(model)
            self._prompts = PromptMaker(model, self._tokenizer, spm_infill)
            self._engine: Engine | None = None
            self._sequence: ThreadSequence | None = None
            if not vocab_only and not embedding:
                _ = self.engine
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = " closed" if self._model is None else ""
        return f"<Llama {Path(self.model_path).name!r} n_ctx={self._n_ctx}{state}>"

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return an argument of the constructor that llama-cpp-python keeps, too.

            Raises AttributeError, with the reason if llama-cpp-python has the name, else with the nearest name.
            """
            if hasattr(type(self), name):  # a property that raised
                return object.__getattribute__(self, name)
            if name in options.AS_GIVEN and "_options" in self.__dict__:
                return self._options[name]
            raise _missing("Llama", name, dir(self))

    # ---- what is beneath
    @property
    def lp_model(self) -> Model:
        """The llamapipe model. Raises EngineClosedError when closed."""
        if self._model is None:
            raise EngineClosedError("this Llama is closed; make another")
        return self._model

    @property
    def engine(self) -> Engine:
        """The llamapipe engine, for everything that llama-cpp-python cannot do."""
        with self._lock:
            model = self.lp_model
            if self._engine is None:
                if model.vocab_only:
                    raise RuntimeError("vocab_only=True: this Llama can only tokenize")
                engine = Engine(model, **with_tuning(options.engine_options(self._options, self._n_ctx)))
                self._engine = self._owned.enter_context(engine)
                self._sequence = ThreadSequence(self._engine, self._n_ctx, self._adapter)
            return self._engine

    def _own_sequence(self) -> ThreadSequence:
        _ = self.engine
        assert self._sequence is not None
        return self._sequence

    @property
    def ctx(self) -> Any:
        """In llama-cpp-python, the context, which does not exist here."""
        raise NotImplementedError("there is no llama_cpp context; use Llama.engine, or llamapipe.Pipeline")

    @property
    def model(self) -> Any:
        """In llama-cpp-python, the handle of the model, which does not exist here."""
        raise NotImplementedError("there is no llama_cpp model; use Llama.lp_model")

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as texts, without arrays."""
        return self.lp_model.metadata

    def n_ctx(self) -> int:
        """Return the number of tokens that a request may have, including prompt and output."""
        return self._n_ctx

    def n_embd(self) -> int:
        """Return the width of the model, and of embeddings."""
        return self.lp_model.n_embd

    def n_vocab(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return self.lp_model.n_vocab

    def tokenizer(self) -> LlamaTokenizer:
        """Return the model's tokenizer."""
        return self._tokenizer

    tokenizer_ = property(tokenizer, doc="The same as an attribute.")

    @property
    def cache(self) -> LlamaRAMCache | None:
        """The cache that ``set_cache`` was given."""
        return self._cache

    def token_eos(self) -> int:
        """Return the token that ends a text; -1 if there is none."""
        return _or_none(self.lp_model.eos)

    def token_bos(self) -> int:
        """Return the token that begins a text; -1 if there is none."""
        return _or_none(self.lp_model.bos)

    def token_nl(self) -> int:
        """Return the token of a newline; -1 if a newline is not one token."""
        tokens = self.lp_model.vocab.tokenize("\n", add_special=False)
        return tokens[-1] if tokens else -1

    def pooling_type(self) -> int:
        """Return the pooling type of embeddings as its number in llama.h."""
        return next(number for number, text in options.POOLING.items() if text == self._pooling)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the tokens of UTF-8 text; ``special``: convert the text of control tokens to these tokens."""
        _ = self.lp_model  # raises if it is closed
        return self._tokenizer.tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the bytes of tokens; control tokens have no bytes unless ``special``."""
        _ = self.lp_model  # raises if it is closed
        return self._tokenizer.detokenize(tokens, prev_tokens, special)

    def set_seed(self, seed: int) -> None:
        """Set the seed of calls without ``seed``; with -1 or 0xFFFFFFFF, each gets a random one."""
        self._seed = check_int("seed", seed, -(2**63), 2**64 - 1)
        self._seeds = None if seed in (-1, options.NO_SEED) else random.Random(self._seed)

    def set_cache(self, cache: LlamaRAMCache | None) -> None:
        """Accept a ``LlamaRAMCache``, which the engine's prefix cache makes unnecessary."""
        if cache is not None and not isinstance(cache, LlamaRAMCache):
            raise TypeError(
                f"cache must be a LlamaRAMCache, not {type(cache).__name__}: prefixes are kept in memory"
            )
        self._cache = cache

    def _params(self, max_tokens: int | None, seed: int | None, **sampling: Any) -> SamplingParams:
        if seed is None and self._seeds is not None:
            with self._lock:
                seed = self._seeds.getrandbits(32)
        elif seed is not None:
            seed = None if seed in (-1, options.NO_SEED) else seed
        return sampling_params(
            max_tokens=max_tokens,
            seed=seed,
            last_n=self._last_n,
            end=self.lp_model.eos,
            adapter=self._adapter,
            **sampling,
        )

    # ---- the calling thread's sequence
    @property
    def n_tokens(self) -> int:
        """The number of tokens that the calling thread has evaluated."""
        return len(self._own_sequence().ids)

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """The tokens that the calling thread has evaluated."""
        return np.array(self._own_sequence().ids, np.intc)

    @property
    def eval_tokens(self) -> deque[int]:
        """The tokens that the calling thread has evaluated, as a deque."""
        return deque(self._own_sequence().ids, maxlen=self._n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The logits after the last token, which are computed on access."""
        return deque([self._own_sequence().logits().tolist()], maxlen=1)

    @property
    def scores(self) -> Any:
        """In llama-cpp-python, the logits of all tokens; they are not kept here."""
        raise NotImplementedError(INSTEAD["Llama"]["_scores"])

    def reset(self) -> None:
        """Forget the calling thread's tokens."""
        self._own_sequence().reset()

    def eval(self, tokens: Sequence[int]) -> None:
        """Append tokens to the calling thread's sequence. They are computed when a token is sampled."""
        self._own_sequence().extend(tokens)

    def sample(self, *, temp: float = 0.8, idx: int | None = None, **sampling: Any) -> int:
        """Sample the token after the calling thread's sequence without appending it.

        ``idx``: the index of a token; the token after it is sampled, as if the sequence ended there. ``sampling``: as
        in ``generate``. Raises TypeError for unknown names, and ValueError for an ``idx`` outside the sequence.
        """
        _check_names("sample", sampling)
        n = self.n_tokens
        if idx is not None and not 0 <= (idx := index(idx)) < n:
            raise ValueError(
                f"idx is {idx}, and {n} tokens were evaluated; it must be from 0 to {max(n - 1, 0)}"
            )
        params = self._params(1, None, temperature=temp, **sampling)
        return self._own_sequence().sample(params, n if idx is None else idx + 1)

    def generate(
        self, tokens: Sequence[int], *, temp: float = 0.8, reset: bool = True, **sampling: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield the tokens generated after ``tokens``; if a token ends generation, it is the last one.

        ``sampling``: ``top_k``, ``top_p``, ``min_p``, ``typical_p``, ``repeat_penalty``, ``frequency_penalty``,
        ``presence_penalty``, ``mirostat_mode``, ``mirostat_tau``, ``mirostat_eta``, ``logits_processor``,
        ``stopping_criteria``, ``grammar``. Tokens that are sent to the generator are appended. Raises TypeError for
        unknown names.
        """
        _check_names("generate", sampling)
        sequence = self._own_sequence()
        params = self._params(None, None, temperature=temp, **sampling)
        if reset:
            sequence.reset()
        sequence.extend(tokens)
        return sequence.generate(params, self.token_eos())

    def save_state(self) -> LlamaState:
        """Return the calling thread's sequence, with its KV cells."""
        return self._own_sequence().save(self._seed)

    def load_state(self, state: LlamaState) -> None:
        """Make a saved sequence the calling thread's sequence."""
        self._own_sequence().load(state)

    # ---- lifetime
    def close(self) -> None:
        """Free the model after the running calls have ended. A second call does nothing."""
        with self._lock:
            self._model = None
            self._free.detach()
            self._owned.close()

    def __getstate__(self) -> Answer:
        return {name: value for name, value in self._options.items() if name != "model_path"} | {
            "model_path": self.model_path
        }

    def __setstate__(self, state: Answer) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---- helpers that programs use
    @staticmethod
    def logits_to_logprobs(
        logits: npt.NDArray[np.float32] | list[float], axis: int = -1
    ) -> npt.NDArray[np.float32]:
        """Return the natural logarithms of the probabilities that the logits represent."""
        row = np.asarray(logits, np.float32)
        shifted = row - np.max(row, axis=axis, keepdims=True)
        logprobs: npt.NDArray[np.float32] = shifted - np.log(
            np.sum(np.exp(shifted), axis=axis, keepdims=True)
        )
        return logprobs

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Return the length of the longest common prefix of two sequences."""
        n = 0
        for left, right in zip(a, b, strict=False):
            if left != right:
                break
            n += 1
        return n


def _close_dropped(owned: ExitStack) -> None:
    """Close the resources of a Llama that was never closed, unless something else uses the model.

    Another user may be an engine of the caller or, at the interpreter's exit, one that another thread is making.
    """
    with suppress(EngineClosedError):
        owned.close()


def _missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Make the error for a missing attribute, with the reason if llama-cpp-python has it, else the nearest name."""
    if (reason := instead_of(name, owner)) is not None:
        return AttributeError(f"{owner} has no {quoted(name)} here: {reason}", name=name)
    if name.startswith("_"):  # Python itself asks for many of these
        return AttributeError(f"{owner!r} object has no attribute {name!r}", name=name)
    return unknown_attribute(owner, name, known)


def _or_none(token: int | None) -> int:
    return -1 if token is None else token
