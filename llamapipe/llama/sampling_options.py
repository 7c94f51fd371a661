"""Converts a request's sampling options to the struct that native code reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamapipe._sampling_table import OPTIONS
from llamapipe.errors import EngineClosedError
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import last_error, native
from llamapipe.native.not_copyable import NotCopyable

NUMBERS = tuple(option.name for option in OPTIONS if option.is_native)


class Dry(NotCopyable):
    """The DRY sampler's options. Creating them is slow: sequence breakers are looked up in the vocabulary.

    ``multiplier * base ** (length - allowed_length)`` is taken from the logit of a token that would lengthen a
    repetition of the last ``last_n`` tokens to ``length``; repetitions end at ``breakers``. The object is freed with
    its last reference or by ``close``; the vocabulary's model may be closed first.
    """

    def __init__(
        self,
        vocab: Vocab,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> None:
        lib, ffi = native().lib, native().ffi
        texts = [ffi.new("char[]", text.encode()) for text in breakers]
        handle = lib.lp_dry_new(
            vocab.handle,
            multiplier,
            base,
            allowed_length,
            last_n,
            len(texts),
            ffi.new("const char *[]", texts),
        )
        if handle == ffi.NULL:
            raise MemoryError(last_error(native()))
        self._handle = handle
        # Many requests make chains with this object, so it is freed with the last object that refers to it.
        self._free = weakref.finalize(self, lib.lp_dry_free, handle)

    @property
    def handle(self) -> Any:
        """The native ``lp_dry *``. Raises EngineClosedError when closed."""
        if not self._free.alive:
            raise EngineClosedError("these options of DRY are closed; make others")
        return self._handle

    def close(self) -> None:
        """Free the native memory; a second call does nothing. Chains made with it have their own copies."""
        self._free()


class SamplingOptions(NotCopyable):
    """A native ``lp_sampling_options`` and the memory that it points to. Only grammars are checked here.

    ``order``: see ``set_order``. ``numbers``: fields of the struct; omitted fields are neutral. ``struct``: the native
    pointer; ``native/cdef/30_sampling.h`` says what each field means. One object may serve any number of chains.
    """

    def __init__(self, order: Iterable[str] = (), **numbers: float) -> None:
        module = native()
        self._ffi, self._lib = module.ffi, module.lib
        self._kept: dict[str, Any] = {}  # arrays and texts, by field
        self.struct = self._ffi.new("lp_sampling_options *", self._lib.lp_sampling_default_options())
        self.set_order(order)
        for name, value in numbers.items():
            setattr(self.struct, name, value)

    def set_numbers(self, params: object) -> None:
        """Copy the numbers that native code reads unchanged: ``is_native`` in the table of options."""
        for name in NUMBERS:
            setattr(self.struct, name, getattr(params, name))

    def set_order(self, names: Iterable[str]) -> None:
        """Set the samplers to apply, in this order: names in ``SAMPLER_ORDER``."""
        order = [getattr(self._lib, f"LP_SAMPLER_{name.upper()}") for name in names]
        self.struct.order[0 : len(order)] = order
        self.struct.n_order = len(order)

    def set_bias(self, bias: Mapping[int, float]) -> None:
        """Set numbers to add to logits; minus infinity forbids a token."""
        self._set_array("bias_tokens", "int32_t[]", list(bias))
        self._set_array("biases", "float[]", list(bias.values()))
        self.struct.n_biases = len(bias)

    def set_allowed(self, tokens: Sequence[int] | None) -> None:
        """Set the only tokens that may be drawn; None allows all."""
        self._set_array("allowed", "int32_t[]", tokens)
        self.struct.n_allowed = 0 if tokens is None else len(tokens)

    def set_bad_words(self, words: Sequence[Sequence[int]]) -> None:
        """Set sequences of tokens; the last token of each is never drawn after the others."""
        tokens: list[int] = []
        ends = []
        for word in words:
            tokens += word
            ends.append(len(tokens))
        self._set_array("bad_word_tokens", "int32_t[]", tokens)
        self._set_array("bad_word_ends", "int32_t[]", ends)
        self.struct.n_bad_words = len(ends)

    def set_min_tokens(self, n: int, ends: Sequence[int]) -> None:
        """Forbid the tokens ``ends`` until ``n`` other tokens are drawn."""
        self._set_array("end_tokens", "int32_t[]", ends)
        self.struct.min_tokens, self.struct.n_end_tokens = n, len(ends)

    def set_reasoning(self, budget: int, opens: str, ends: str, close: Sequence[int], is_open: bool) -> None:
        """End the text between two markers with the tokens ``close`` after ``budget`` tokens."""
        self._set_array("reasoning_opens", "char[]", opens.encode())
        self._set_array("reasoning_ends", "char[]", ends.encode())
        self._set_array("reasoning_close", "int32_t[]", close)
        self.struct.n_reasoning_close = len(close)
        self.struct.reasoning_budget, self.struct.reasoning_is_open = budget, is_open

    def set_grammar(self, text: str, root: str = "root") -> None:
        """Set a grammar in llama.cpp's GBNF. Raises ValueError for text that llama.cpp would misread.

        Text that would crash llama.cpp's parser must be refused earlier (``llamapipe.structured``).
        """
        if not text.strip() or "\0" in text:
            raise ValueError("the grammar is empty or has a NUL in it, where llama.cpp would end it")
        self._set_array("grammar", "char[]", text.encode())
        self._set_array("grammar_root", "char[]", root.encode())

    def set_dry(self, dry: Dry | None) -> None:
        """Set DRY's options; with None, a chain keeps its own. The caller must keep ``dry`` until chains are made."""
        self.struct.dry = self._ffi.NULL if dry is None else dry.handle

    def _set_array(self, name: str, kind: str, values: Any) -> None:
        self._kept[name] = self._ffi.NULL if values is None else self._ffi.new(kind, values)
        setattr(self.struct, name, self._kept[name])
