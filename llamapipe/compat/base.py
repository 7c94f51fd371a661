"""The constructor of ``Llama``, the objects beneath it, its tokens and its lifetime."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llamapipe.arguments import check_int
from llamapipe.compat import formats, options
from llamapipe.compat.names import missing
from llamapipe.compat.sampling import sampling_params
from llamapipe.compat.sequence import SequenceMethods, ThreadSequence
from llamapipe.compat.state import LlamaRAMCache
from llamapipe.compat.tokenizer import LlamaTokenizer, PromptMaker
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.errors import EngineClosedError
from llamapipe.llama.model import Model
from llamapipe.locks import Lock
from llamapipe.params import SamplingParams

Answer = dict[str, Any]


class LlamaBase(SequenceMethods):
    """What ``Llama`` is made of, but for the calls that answer in OpenAI's form."""

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
        self._free = weakref.finalize(self, _dropped, self._owned)
        del values["older"]
        options.check_older(older, values)
        options.check_refused(values)
        options.check_integers(values)
        template = formats.template_of(chat_format, chat_template)
        self.model_path = os.fspath(model_path)
        # They change what llama-cpp-python prints or allocates, not what it answers.
        self.verbose, self._logits_all, self._no_perf = verbose, logits_all, no_perf
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
        try:
            self._n_ctx = n_ctx or model.n_ctx_train
            options.check_rope(values, model.metadata)
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
            """Raises AttributeError: with the reason for what llama-cpp-python has, else with the nearest name."""
            if hasattr(type(self), name):  # a property that raised
                return object.__getattribute__(self, name)
            raise missing("Llama", name, dir(self))

    # ---- what is beneath
    @property
    def lp_model(self) -> Model:
        """Llamapipe's model. Raises EngineClosedError when closed."""
        if self._model is None:
            raise EngineClosedError("this Llama is closed; make another")
        return self._model

    @property
    def engine(self) -> Engine:
        """Llamapipe's engine, for all that it can do and llama-cpp-python cannot."""
        with self._lock:
            model = self.lp_model
            if self._engine is None:
                if model.vocab_only:
                    raise RuntimeError("vocab_only=True: this Llama can only tokenize")
                engine = Engine(model, **options.engine_options(self._options, self._n_ctx))
                self._engine = self._owned.enter_context(engine)
                self._sequence = ThreadSequence(self._engine, self._n_ctx)
            return self._engine

    def _own(self) -> ThreadSequence:
        _ = self.engine
        assert self._sequence is not None
        return self._sequence

    @property
    def ctx(self) -> Any:
        """llama-cpp-python's context, which does not exist here."""
        raise NotImplementedError("there is no llama_cpp context; use Llama.engine, or llamapipe.Pipeline")

    @property
    def model(self) -> Any:
        """llama-cpp-python's model handle, which does not exist here."""
        raise NotImplementedError("there is no llama_cpp model; use Llama.lp_model")

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as text, without arrays."""
        return self.lp_model.metadata

    def n_ctx(self) -> int:
        """Tokens that a request may have, prompt and output."""
        return self._n_ctx

    def n_embd(self) -> int:
        """The width of the model, and of embeddings."""
        return self.lp_model.n_embd

    def n_vocab(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.lp_model.n_vocab

    def tokenizer(self) -> LlamaTokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    tokenizer_ = property(tokenizer, doc="The same as an attribute.")

    @property
    def cache(self) -> LlamaRAMCache | None:
        """What ``set_cache`` was given."""
        return self._cache

    def token_eos(self) -> int:
        """The token that ends a text; -1 if there is none."""
        return _or_none(self.lp_model.eos)

    def token_bos(self) -> int:
        """The token that begins a text; -1 if there is none."""
        return _or_none(self.lp_model.bos)

    def token_nl(self) -> int:
        """The token of a line end; -1 if it is not one token."""
        tokens = self.lp_model.vocab.tokenize("\n", add_special=False)
        return tokens[-1] if tokens else -1

    def pooling_type(self) -> int:
        """The number of the pooling of embeddings, as in llama.h."""
        return next(number for number, text in options.POOLING.items() if text == self._pooling)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The tokens of UTF-8 text; ``special``: text of control tokens becomes those tokens."""
        _ = self.lp_model  # raises if it is closed
        return self._tokenizer.tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens; control tokens have none unless ``special``."""
        _ = self.lp_model  # raises if it is closed
        return self._tokenizer.detokenize(tokens, prev_tokens, special)

    def set_seed(self, seed: int) -> None:
        """Seeds calls that have no ``seed``; -1 and 0xFFFFFFFF: each gets a random one."""
        self._seed = check_int("seed", seed, -(2**63), 2**64 - 1)
        self._seeds = None if seed in (-1, options.NO_SEED) else random.Random(self._seed)

    def set_cache(self, cache: LlamaRAMCache | None) -> None:
        """Accepts a ``LlamaRAMCache``, whose purpose the engine's prefix cache serves in any case."""
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
            max_tokens=max_tokens, seed=seed, last_n=self._last_n, end=self.lp_model.eos, **sampling
        )

    # ---- lifetime
    def close(self) -> None:
        """Frees the model, after the calls that run. A second call does nothing."""
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
        """The natural logarithms of the probabilities that logits stand for."""
        row = np.asarray(logits, np.float32)
        shifted = row - np.max(row, axis=axis, keepdims=True)
        found: npt.NDArray[np.float32] = shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))
        return found

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many tokens two sequences begin with in common."""
        n = 0
        for left, right in zip(a, b, strict=False):
            if left != right:
                break
            n += 1
        return n


def _dropped(owned: ExitStack) -> None:
    """Closes what a Llama that nobody closed has. It stays open while something else uses the model.

    That is an engine of the caller's or, when the interpreter exits, one that another thread is making.
    """
    with suppress(EngineClosedError):
        owned.close()


def _or_none(token: int | None) -> int:
    return -1 if token is None else token
