"""Owns a llama_context: KV cells for several sequences, decoding, logits rows. One thread at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llamapipe.arguments import check_flag, check_int, choice_of, int_of
from llamapipe.errors import (
    BackendError,
    ContextFullError,
    DecodeError,
    EngineClosedError,
    InvalidRequestError,
)
from llamapipe.gguf.draft_file import ASSISTANT, DRAFT_KINDS
from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.host.cores import usable_cores
from llamapipe.llama.adapter import AdapterSet, assign_adapters, set_adapters
from llamapipe.llama.batch import DecodeBatch, check_batch
from llamapipe.llama.kv_memory import check_kv_memory, head_size
from llamapipe.llama.model import Model
from llamapipe.llama.rope import FROM_FILE, Rope
from llamapipe.native.load import drain_log, last_error, native
from llamapipe.native.owner import Owner

if TYPE_CHECKING:
    import numpy.typing as npt

CACHE_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q5_0": "Q5_0", "q5_1": "Q5_1",
               "q4_0": "Q4_0", "q4_1": "Q4_1", "iq4_nl": "IQ4_NL"}  # fmt: skip
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_INT32_MAX = 2**31 - 1
_COARSE_KEYS = ("q4_0", "q4_1", "iq4_nl")
_warned: set[str] = set()  # key types that a warning was logged for
# How long idle compute threads spin while they wait for the next graph, 0 to 100. 2 is about 10 ms: longer than the
# pause between two steps, but too short to delay other programs.
_POLL = 2


def state_version() -> int:
    """Return the version of llama.cpp's sequence states. llama.cpp does not check it when it reads a state."""
    version: int = native().lib.LLAMA_STATE_SEQ_VERSION
    return version


def _check_moe_cache(model: Model) -> None:
    """Raise InvalidRequestError if no experts can be cached; llama.cpp would silently ignore the option."""
    if all(device.type == "cpu" for device in model.devices):
        raise InvalidRequestError(
            "moe_cache_size is given, but no GPU computes the model, so there is no memory for it; leave it out"
        )
    if not model.n_cpu_expert_layers:
        raise InvalidRequestError(
            "moe_cache_size is given, but no layer keeps all of its experts on the CPU; give n_cpu_moe as well "
            "(--n-cpu-moe), or leave it out"
        )


class Context(Owner):
    """KV cells and compute buffers over a model.

    - ``n_ctx``: positions each sequence may use. ``n_cells``: total KV cells (default ``n_ctx * n_seq_max``; another
      number needs ``kv_unified``).
    - ``n_batch``, ``n_ubatch``: maximum tokens in a decode, and in the physical chunks that llama.cpp cuts it into
      (batches of models that are not causal are not cut).
    - ``n_outputs_max``: maximum output rows of a decode (default: ``n_batch``, or ``n_ubatch`` with a ring).
      ``n_more_outputs`` is added to it. The sum bounds memory.
    - ``type_k``, ``type_v``: number formats of the cache. ``flash_attn``: ``"auto"`` (off on software devices),
      ``"on"`` or ``"off"``.
    - ``n_threads``: threads that compute single tokens (default: the cores this process may use; give fewer if other
      processes compute, since threads wait for each other by spinning). ``n_threads_batch``: threads that compute
      several tokens (default: ``n_threads``).
    - ``n_states``: recurrent states of a sequence to keep in addition to the last one, so that the last tokens of a
      decode can be removed. The attribute is the number kept: at most ``n_ubatch`` - 2, and 0 if the model cannot keep
      any. ``needs_states``: a sequence can only be continued at a position whose recurrent state, or last window of
      cells, is kept.
    - ``swa_full``: layers with a sliding window keep all cells, not only the last window's; the attribute is None if
      the model has no such layers.
    - ``drafts_for``: the context whose hidden states (``keep_states``) this context drafts with. Its model is then the
      MTP layers of that context's model, or a file of ``DRAFT_KINDS`` that belongs to it, and only ``draft`` may be
      called; with a DFlash file, only ``inject`` and ``decode_blocks``. A Gemma 4 assistant reads that context's cells:
      create the assistant's context before the first decode, with the same sizes, types and flags, and never clear it.
    - ``is_causal``: if False, tokens also attend to later tokens of the decode; ``n_ubatch`` must then be ``n_batch``.
    - ``n_ring_slots``: stage output rows in a ring of this many times ``n_outputs_max`` rows, for a pipeline;
      ``logits`` then cannot read them. ``has_ring`` is False if there can be no ring.
    - ``graph_sampling``: with a ring, the graph samples as well. The attribute says whether it does, and
      ``graph_problem`` why not.
    - ``batch_invariant``: llamapipe's kernels, in which rows do not depend on each other, also multiply matrices of
      floats. ``rope``: how positions are scaled. ``moe_cache_size``: bytes of GPU memory for experts that are kept on
      the CPU.

    The first thread that decodes owns the context until ``release_thread``. Close it before its model.

    Raises TypeError and ValueError for bad arguments, BackendError if the context cannot be created (out of memory).
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        n_seq_max: int = 1,
        n_cells: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_outputs_max: int | None = None,
        n_more_outputs: int = 0,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        kv_unified: bool = False,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        n_ring_slots: int = 0,
        graph_sampling: bool = False,
        batch_invariant: bool = False,
        n_states: int = 0,
        swa_full: bool = True,
        rope: Rope = FROM_FILE,
        moe_cache_size: int = 0,
        drafts_for: Context | None = None,
        is_causal: bool = True,
    ) -> None:
        self._handle: Any = None
        self._llama: Any = None
        self._adapters: AdapterSet | None = None
        self._assigned: dict[int, AdapterSet | None] = {}
        self.batch_invariant = batch_invariant
        self.graph_sampling = graph_sampling and n_ring_slots > 0
        self.graph_problem = "outputs go through llama.cpp's own buffer" if graph_sampling else ""
        self.has_ring = False
        self.n_ring_slots = n_ring_slots
        if not isinstance(model, Model):
            raise TypeError(f"model must be a Model, not {type(model).__name__}")
        self._native = native()
        lib, handle = self._native.lib, model.handle
        if model.vocab_only:
            raise InvalidRequestError(
                f"{model.path} was loaded with vocab_only=True; a context needs its weights"
            )
        self._drafts_for = drafts_for
        is_head = model.architecture in DRAFT_KINDS
        if is_head and drafts_for is None:
            raise InvalidRequestError(
                f"{model.path} is not a whole model: it drafts for another one; give it as lp.Engine(MODEL, draft=...)"
            )
        if not is_head and (lib.llama_model_has_encoder(handle) or not lib.llama_model_has_decoder(handle)):
            raise InvalidRequestError(
                f"{model.path} is not a decoder-only model; llamapipe generates with decoders only"
            )
        if moe_cache_size:
            _check_moe_cache(model)
        self._moe_cache_size = moe_cache_size
        self.model = model
        self._set_sizes(
            n_ctx,
            n_seq_max,
            n_cells,
            n_batch,
            n_ubatch,
            n_outputs_max,
            n_more_outputs,
            check_flag("kv_unified", kv_unified),
        )
        self.n_threads = int_of("n_threads", usable_cores() if n_threads is None else n_threads)
        self.n_threads_batch = int_of(
            "n_threads_batch", self.n_threads if n_threads_batch is None else n_threads_batch
        )
        flash_attn = self._check_types(type_k, type_v, flash_attn)
        check_flag("swa_full", swa_full)
        if drafts_for is None:  # otherwise only one layer has cells
            check_kv_memory(model, self.n_cells, self.n_seq_max, type_k, type_v, swa_full=swa_full)
        self.type_k, self.type_v, self.flash_attn = type_k, type_v, flash_attn
        rope.check(model)
        self.rope = rope
        params = self._params(type_k, type_v, flash_attn)
        rope.apply(params)
        # llama.cpp aborts if a ubatch has no room for the tokens whose states are kept.
        params.swa_full = swa_full
        self.is_recurrent = model.is_recurrent and drafts_for is None
        self.swa_full = swa_full if model.n_swa else None
        self.needs_states = self.is_recurrent or (model.n_swa > 0 and not swa_full)
        if drafts_for is not None:
            params.ctx_other = drafts_for.llama
            if not is_head or model.architecture == ASSISTANT:
                params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
            if not is_causal:
                params.attention_type = lib.LLAMA_ATTENTION_TYPE_NON_CAUSAL
        params.n_rs_seq = max(min(check_int("n_states", n_states, 0, 2**16), self.n_ubatch - 2), 0)
        self._pid = os.getpid()
        self._owner: int | None = None
        try:
            model.adopt(self)
            self._create(params)
        except BaseException:
            self.close()
            model.release(self)
            raise

    def _set_sizes(
        self,
        n_ctx: int | None,
        n_seq_max: int,
        n_cells: int | None,
        n_batch: int,
        n_ubatch: int,
        n_outputs_max: int | None,
        n_more_outputs: int,
        kv_unified: bool,
    ) -> None:
        """Check the sizes and set the attributes of the same names."""
        default_n_ctx = min(self.model.n_ctx_train, 4096)
        self.n_ctx = int_of("n_ctx", default_n_ctx if n_ctx is None else n_ctx)
        self.n_seq_max = int_of("n_seq_max", n_seq_max)
        self.n_cells = int_of("n_cells", self.n_ctx * self.n_seq_max if n_cells is None else n_cells)
        self.kv_unified = kv_unified
        if self.n_cells != self.n_ctx * self.n_seq_max and not self.kv_unified:
            raise ValueError(
                f"n_cells is {self.n_cells} but n_ctx * n_seq_max is {self.n_ctx * self.n_seq_max}; "
                "a different number needs kv_unified=True"
            )
        # llama.cpp applies the same limit.
        self.n_batch: int = min(int_of("n_batch", n_batch), self.n_cells)
        self.n_ubatch = min(int_of("n_ubatch", n_ubatch), self.n_batch)
        if not self.model.is_causal:  # tokens see later tokens: llama.cpp aborts if it must cut a batch
            self.n_ubatch = self.n_batch
        default_n_outputs = self.n_ubatch if self.n_ring_slots else self.n_batch
        most = check_int(
            "n_outputs_max", default_n_outputs if n_outputs_max is None else n_outputs_max, 1, self.n_batch
        )
        more = check_int("n_more_outputs", n_more_outputs, 0, 2**31 - 1)
        self.n_outputs_max = min(max(most, self.n_seq_max) + more, self.n_batch)
        if self.n_seq_max > self.n_batch:
            raise ValueError(
                f"n_seq_max is {self.n_seq_max} and n_batch {self.n_batch}; n_batch must not be smaller"
            )

    def _check_types(self, type_k: str, type_v: str, flash_attn: str) -> str:
        """Check the types of the KV cache. Return the value to use for ``flash_attn``."""
        choice_of("type_k", type_k)
        choice_of("type_v", type_v)
        choice_of("flash_attn", flash_attn)
        if type_k in _COARSE_KEYS and type_k not in _warned:
            _warned.add(type_k)
            logging.getLogger("llamapipe").warning(
                "type_k is %r: keys of 4 bits make the texts of some models much worse (docs/guides/sizing.md has "
                "figures); use 'q8_0', or compare perplexities with your model",
                type_k,
            )
        if flash_attn == "off" and type_k not in ("f32", "f16", "bf16") and (head_size(self.model) or 1) % 32:
            # llama.cpp checks this only with flash attention; without flash attention it aborts
            raise ValueError(
                f"type_k is {type_k!r}, which packs 32 numbers, and a head of this model has {head_size(self.model)}; "
                "use type_k='f16'"
            )
        software = next((device for device in self.model.devices if device.is_software), None)
        if software is not None and flash_attn != "off":
            if flash_attn == "on":
                logging.getLogger("llamapipe").warning(
                    "flash_attn='on' on the software device %s: its driver is known to crash the process there "
                    "(Mesa 22.3.6); flash_attn='auto' leaves it off",
                    software.description,
                )
            else:
                flash_attn = "off"
        return flash_attn

    def _params(self, type_k: str, type_v: str, flash_attn: str) -> Any:
        ffi, lib = self._native.ffi, self._native.lib
        params = ffi.new("struct llama_context_params *", lib.llama_context_default_params())
        # llama.cpp divides n_ctx by the sequences and pads each part to 256.
        params.n_ctx = self.n_cells if self.kv_unified else self.n_positions * self.n_seq_max
        params.n_batch, params.n_ubatch = self.n_batch, self.n_ubatch
        params.n_seq_max = self.n_seq_max
        params.n_outputs_max = self.n_outputs_max
        params.n_threads, params.n_threads_batch = self.n_threads, self.n_threads_batch
        params.kv_unified = self.kv_unified
        params.moe_cache_size = self._moe_cache_size
        params.type_k = getattr(lib, f"GGML_TYPE_{CACHE_TYPES[type_k]}")
        params.type_v = getattr(lib, f"GGML_TYPE_{CACHE_TYPES[type_v]}")
        params.flash_attn_type = _FLASH_ATTN[flash_attn]
        params.no_perf = False
        return params

    @property
    def n_positions(self) -> int:
        """Positions that llama.cpp gives a sequence, padded to a multiple of 256."""
        return -(-(self.n_cells if self.kv_unified else self.n_ctx) // 256) * 256

    def _create(self, params: Any) -> None:
        """Create the native context, with a ring for output rows if it is wanted and possible."""
        ffi, lib = self._native.ffi, self._native.lib
        n_rows = max(self.n_ring_slots, 0) * self.n_outputs_max
        drain_log(self._native)
        with awaited_at_exit():
            self._handle = (
                lib.lp_context_new(
                    self.model.handle,
                    params,
                    _POLL,
                    n_rows,
                    self.graph_sampling,
                    self.model.attends,
                    self.batch_invariant,
                )
                or None
            )
        if self._handle is None:
            reason = "; ".join(drain_log(self._native)[-2:]) or last_error(self._native)
            raise BackendError(
                f"a context of {self.n_cells} cells for {self.n_seq_max} sequences could not be created "
                f"({reason}); try a smaller n_ctx, n_seq_max or n_batch, or another cache type"
            )
        drain_log(self._native)
        self._llama = lib.lp_context_llama(self._handle)
        self.n_states: int = lib.llama_n_rs_seq(self._llama)
        got = lib.llama_n_ctx(self._llama) if self.kv_unified else lib.llama_n_ctx_seq(self._llama)
        wanted = self.n_cells if self.kv_unified else self.n_ctx
        if got < wanted:
            raise BackendError(
                f"llama.cpp gave {got} KV cells where {wanted} were asked for; set n_ctx to at most {got}"
            )
        self.n_batch = min(self.n_batch, lib.llama_n_batch(self._llama))
        self.has_ring = lib.lp_context_has_ring(self._handle)
        problem = lib.lp_context_staging_problem(self._handle)
        if problem != ffi.NULL:
            logging.getLogger("llamapipe").warning(
                "output rows of %s cannot be staged (%s); they are read from llama.cpp's own buffer, with more waiting",
                self.model.path.name,
                ffi.string(problem).decode(),
            )
        if self.graph_sampling and not self.has_ring:
            self.graph_sampling = False
        elif self.graph_sampling:
            problem = lib.lp_context_sampler_problem(self._handle)
            if problem != ffi.NULL:
                self.graph_sampling, self.graph_problem = False, ffi.string(problem).decode()

    def __repr__(self) -> str:
        kind = "unified" if self.kv_unified else "per-sequence"
        state = " closed" if self._handle is None else ""
        return (
            f"<Context n_ctx={self.n_ctx} n_seq_max={self.n_seq_max} n_cells={self.n_cells} kv={kind}{state}>"
        )

    def set_adapters(self, adapters: AdapterSet | None, carries: bool = False) -> None:
        """Compute with these adapters from the next decode on; None: with the model alone. Raises BackendError.

        ``carries``: see ``adapter.carries``; no sequence has an adapter until ``assign_adapters`` assigns one.
        """
        self.claim()
        set_adapters(self._native, self._native.lib.lp_context_set_adapters, self._handle, adapters, carries)
        self._adapters = adapters  # they must stay alive while the context computes with them
        self._assigned.clear()

    @property
    def mixes_adapters(self) -> bool:
        """Whether sequences can have different adapters, which requires that only llamapipe's kernels compute."""
        return bool(self._native.lib.lp_context_mixes_adapters(self._handle))

    def assign_adapters(self, seq_id: int, adapters: AdapterSet | None) -> None:
        """If a carrier is set, compute a sequence with these adapters from the next decode on. Raises BackendError."""
        self.claim()
        assign_adapters(
            self._native, self._native.lib.lp_context_assign_adapters, self._handle, seq_id, adapters
        )
        self._assigned[seq_id] = adapters

    # ---- decoding
    def decode(self, batch: DecodeBatch) -> None:
        """Compute a batch and return when its logits can be read.

        Raises ValueError for wrong tokens, sequences or positions (a sequence's positions continue from its last one
        without a gap), ContextFullError when no cells are left, DecodeError when the computation fails.
        """
        if not isinstance(batch, DecodeBatch):
            raise TypeError(f"batch must be a DecodeBatch, not {type(batch).__name__}")
        self.claim()
        self._check(batch)
        ffi = self._native.ffi
        with awaited_at_exit():
            code = self.decode_arrays(
                len(batch),
                ffi.from_buffer("int32_t[]", batch.tokens),
                ffi.from_buffer("int32_t[]", batch.positions),
                ffi.from_buffer("int32_t[]", batch.seq_ids),
                ffi.from_buffer("int8_t[]", batch.outputs),
            )
        if code == 1:
            raise ContextFullError(
                f"no KV cells are left for {len(batch)} tokens; remove sequences or use a larger n_ctx"
            )
        if code != 0:
            raise self.decode_error(code)

    def decode_arrays(self, n_tokens: int, tokens: Any, positions: Any, seq_ids: Any, outputs: Any) -> int:
        """Decode cffi arrays that the caller has checked; return llama_decode's code."""
        self.claim()
        return self._native.lib.lp_decode(self._handle, n_tokens, tokens, positions, seq_ids, outputs)  # type: ignore[no-any-return]

    # ---- hidden states
    def keep_states(self, n_most: int, layers: Sequence[int] = ()) -> None:
        """Keep hidden states of the last ``n_most`` tokens of each sequence, as long as their cells are kept.

        A token's state is its last hidden state, or the concatenated inputs of ``layers``. llama.cpp ends the process
        if the architecture's graph does not output these inputs: call ``check_draft_file`` first. Only tokens that are
        decoded later have states, so call ``keep_states`` before the first decode. Raises BackendError.
        """
        n, indices = check_int("n_most", n_most, 1, _INT32_MAX), self._native.ffi.new("int32_t[]", [*layers])
        if self._native.lib.lp_context_keep_states(self.handle, n, len(indices), indices) < 0:
            raise BackendError(f"hidden states cannot be kept ({last_error(self._native)})")

    def kept_states(self, seq_id: int) -> tuple[int, int]:
        """Return the range of a sequence's positions whose states are kept: the first, and the one after the last."""
        end = self._native.ffi.new("int32_t *")
        begin: int = self._native.lib.lp_context_states(self.handle, seq_id, end)
        return begin, int(end[0])

    def states(self, seq_id: int) -> npt.NDArray[np.float32]:
        """Copy a sequence's kept states: float32 ``(n, width)``, from the first kept position onward."""
        ffi, lib = self._native.ffi, self._native.lib
        begin, end = self.kept_states(seq_id)
        out = np.empty((end - begin, lib.lp_context_state_width(self.handle)), dtype=np.float32)
        for i, row in enumerate(out):
            ffi.memmove(row, lib.lp_context_state(self.handle, seq_id, begin + i), row.nbytes)
        return out

    def draft(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[bool],
        before: Sequence[int],
    ) -> None:
        """Decode in a context that drafts for another. Each entry reads the state of the token before it.

        Entry ``i`` reads the state of entry ``before[i]``, an output of the previous batch; if that is -1, it reads a
        state that ``drafts_for`` keeps. Positions may begin anywhere. With EAGLE-3, either all entries are outputs or
        none are. The lists must be as long as ``tokens``. Arguments are not checked, because that would take long
        compared with a draft of one layer (under 1 ms). Raises ContextFullError and DecodeError.
        """
        self.claim()
        assert self._drafts_for is not None
        new, n = self._native.ffi.new, len(tokens)
        arrays = [new("int32_t[]", values) for values in (tokens, positions, seq_ids)]
        flags, rows = new("int8_t[]", outputs), new("int32_t[]", before)
        code = self._native.lib.lp_draft(self.handle, self._drafts_for.handle, n, *arrays, flags, rows)
        self._raise_for_draft(code, n)

    def inject(self, positions: Sequence[int], seq_ids: Sequence[int]) -> None:
        """Compute a DFlash draft's cells from the states that ``drafts_for`` keeps for these positions.

        As in ``draft``, nothing is checked. Raises ContextFullError and DecodeError.
        """
        self.claim()
        assert self._drafts_for is not None
        arrays = [self._native.ffi.new("int32_t[]", values) for values in (positions, seq_ids)]
        code = self._native.lib.lp_inject(self.handle, self._drafts_for.handle, len(positions), *arrays)
        self._raise_for_draft(code, len(positions))

    def decode_blocks(self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int]) -> None:
        """Decode blocks of a DFlash draft after the cells of their sequences. All entries are outputs.

        The entries of a block follow one another. As in ``draft``, nothing is checked. Raises ContextFullError and
        DecodeError.
        """
        new, n = self._native.ffi.new, len(tokens)
        ids, places, sequences = (new("int32_t[]", values) for values in (tokens, positions, seq_ids))
        self._raise_for_draft(self.decode_arrays(n, ids, places, sequences, new("int8_t[]", [True] * n)), n)

    def _raise_for_draft(self, code: int, n: int) -> None:
        if code == 1:
            raise ContextFullError(f"no KV cells are left for a draft of {n} tokens")
        if code != 0:
            raise self.decode_error(code)

    def best(self, row: int) -> tuple[int, float]:
        """Return the most probable token of entry ``row`` of the last batch, and its probability. Raises ValueError.

        The token is -1 if no logit is a number. The entry must be an output.
        """
        share = self._native.ffi.new("float *")
        token: int = self._native.lib.lp_best(self.handle, row, share)
        if token < -1:
            raise ValueError(
                f"entry {row} of the last batch is not an output; set its outputs flag before decoding"
            )
        return token, float(share[0])

    def decode_error(self, code: int) -> DecodeError:
        """Return an error with llama.cpp's log messages for a negative or abnormal result of ``decode_arrays``."""
        reason = "; ".join(drain_log(self._native)[-2:]) or last_error(self._native)
        return DecodeError(f"llama.cpp failed to compute this step (code {code}: {reason})")

    def _check(self, batch: DecodeBatch) -> None:
        check_batch(batch, self.n_batch, tokens=self.model.n_vocab, seq_ids=self.n_seq_max)
        n_outputs = int(np.count_nonzero(batch.outputs))
        if n_outputs > self.n_outputs_max:
            raise ValueError(f"the batch has {n_outputs} outputs; n_outputs_max is {self.n_outputs_max}")
        for seq_id in np.unique(batch.seq_ids).tolist():
            positions = batch.positions[batch.seq_ids == seq_id]
            first = self.seq_pos_max(seq_id) + 1
            if positions[0] != first or np.any(np.diff(positions) != 1):
                raise ValueError(
                    f"positions of sequence {seq_id} must continue from {first} without gaps, "
                    f"not {positions[:4].tolist()}…"
                )
            if positions[-1] >= self.n_ctx:
                raise ValueError(
                    f"sequence {seq_id} would reach position {positions[-1]}; n_ctx is {self.n_ctx}"
                )

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return a copy of the logits of entry ``row`` of the last batch: float32 ``(n_vocab,)``.

        Raises ValueError if the entry was not an output.
        """
        self.claim()
        ffi = self._native.ffi
        out = np.empty(self.model.n_vocab, dtype=np.float32)
        rows = ffi.new("int32_t[1]", [check_int("row", row, 0, self.n_batch - 1)])
        if (
            self._native.lib.lp_logits(
                self.handle, 1, rows, self.model.n_vocab, ffi.from_buffer("float[]", out)
            )
            != 0
        ):
            drain_log(self._native)
            raise ValueError(
                f"entry {row} of the last batch is not an output; set its outputs flag before decoding"
            )
        return out

    @property
    def can_shift(self) -> bool:
        """Whether positions can be shifted with this type of keys."""
        lib = self._native.lib
        return self._keys_rotate() and bool(lib.llama_memory_can_shift(lib.llama_get_memory(self.llama)))

    def _keys_rotate(self) -> bool:
        """Return whether llama.cpp can rotate the keys in cells. Where it cannot, a shift fails or ends the process.

        It cannot rotate bfloat16. Quantized keys need a head size that is a multiple of 64. At least one layer must
        have rotary positions; Granite models may have no such layer.
        """
        sizes = self.model.metadata
        arch = sizes.get("general.architecture", "")
        if self.model.has_only_states:
            return True
        if arch.startswith("granite") and sizes.get(f"{arch}.rope.scaling.finetuned") == "false":
            return False
        if self.type_k in ("f32", "f16"):
            return True
        heads = (str(head_size(self.model)), sizes.get(f"{arch}.attention.key_length_swa", "0"))
        return self.type_k != "bf16" and all(int(size) % 64 == 0 for size in heads if size.isdigit())

    @property
    def n_reused(self) -> int:
        """The number of times that llama.cpp has reused its last compute graph."""
        return int(self._native.lib.llama_perf_context(self.llama).n_reused)

    def set_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Change the numbers of compute threads from the next decode on; see ``n_threads``. Any thread, at any time.

        Unused threads sleep. Raises TypeError and ValueError for bad numbers, BackendError if threads cannot be
        started; nothing is changed then.
        """
        n = int_of("n_threads", n_threads)
        n_batch = int_of("n_threads_batch", n if n_threads_batch is None else n_threads_batch)
        if self._native.lib.lp_context_set_threads(self.handle, n, n_batch) < 0:
            raise BackendError(f"{n} and {n_batch} threads cannot be used ({last_error(self._native)})")
        self.n_threads, self.n_threads_batch = n, n_batch

    def park_threads(self) -> None:
        """Put the compute threads to sleep until the next decode. Otherwise they spin for some milliseconds first."""
        self._native.lib.lp_context_rest(self.handle)

    def compute_thread_ids(self) -> list[int]:
        """Return the kernel's ids of the compute threads: the thread that decoded last, then its workers. Any thread.

        The list is empty before the first decode and on systems other than Linux. ``set_threads`` changes the ids.
        """
        ids = self._native.ffi.new("int32_t[]", 1024)
        n: int = self._native.lib.lp_context_thread_ids(self.handle, 1024, ids)
        return self._native.ffi.unpack(ids, max(n, 0))  # type: ignore[no-any-return]

    # ---- memory
    def seq_pos_max(self, seq_id: int) -> int:
        """Return the largest position held for a sequence, -1 when it is empty."""
        lib = self._native.lib
        check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
        return int(lib.llama_memory_seq_pos_max(lib.llama_get_memory(self.llama), seq_id))

    def seq_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Forget positions ``[p0, p1)`` of a sequence; ``p1=-1`` means the end.

        Returns False, and changes nothing, if the model's memory cannot remove a part (recurrent models).
        """
        self.claim()
        check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
        first, end = check_int("p0", p0, 0, _INT32_MAX), check_int("p1", p1, -1, _INT32_MAX)
        lib = self._native.lib
        result = lib.lp_context_memory(self.handle, lib.LP_REMOVE, seq_id, 0, first, end)
        if result < 0:
            raise DecodeError(f"removing from sequence {seq_id} failed ({last_error(self._native)})")
        return bool(result)

    def seq_copy(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Share positions ``[p0, p1)`` of ``src`` with ``dst``; without ``kv_unified``, only the whole sequence.

        Raises ValueError for a part without ``kv_unified``: llama.cpp would end the process.
        """
        self.claim()
        check_int("src", src, 0, self.n_seq_max - 1)
        check_int("dst", dst, 0, self.n_seq_max - 1)
        first, end = check_int("p0", p0, 0, _INT32_MAX), check_int("p1", p1, -1, _INT32_MAX)
        if not self.kv_unified and src != dst and (first > 0 or end >= 0):
            raise ValueError(
                f"positions {first} to {end} of sequence {src} cannot be copied alone; "
                "copy all and remove the rest, or use kv_unified=True"
            )
        lib = self._native.lib
        if lib.lp_context_memory(self.handle, lib.LP_COPY, src, dst, first, end) < 0:
            raise DecodeError(f"copying sequence {src} to {dst} failed ({last_error(self._native)})")

    def clear(self) -> None:
        """Forget all sequences."""
        self.claim()
        lib = self._native.lib
        if lib.lp_context_memory(self.handle, lib.LP_CLEAR, 0, 0, 0, -1) < 0:
            raise DecodeError(f"clearing the context failed ({last_error(self._native)})")

    # ---- lifetime
    @property
    def handle(self) -> Any:
        """The native ``lp_context *``. Raises EngineClosedError when closed, or in a forked child."""
        if self._handle is None:
            raise EngineClosedError("the context is closed; create another")
        if self._pid != os.getpid():
            raise EngineClosedError("the context was created before fork(); create one in the child process")
        return self._handle

    @property
    def llama(self) -> Any:
        """The native ``llama_context *``. Raises as ``handle`` does."""
        return self._llama if self.handle else None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._handle is None

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that created the context."""
        return self._pid != self._getpid()

    _getpid = staticmethod(os.getpid)  # modules may be gone when the interpreter ends

    def claim(self) -> Any:
        """Take the context for this thread; return the native ``lp_context *``.

        Raises EngineClosedError when closed, or in a forked child; RuntimeError when another thread has it.
        """
        handle = self.handle
        me = threading.get_ident()
        if self._owner != me:
            if self._owner is not None:
                raise RuntimeError(
                    "this context belongs to another thread; call release_thread() there first"
                )
            self._owner = me
        return handle

    def release_thread(self) -> None:
        """Let another thread take over the context."""
        self._owner = None

    def close(self) -> None:
        """Free the native memory immediately; a second call does nothing. Not while a decode runs."""
        if self._handle is None or self._pid != os.getpid():
            return
        handle, self._handle = self._handle, None
        self._native.lib.lp_context_free(handle)
        self._adapters = None
        self._assigned.clear()
        self.model.release(self)

    def _is_left_open(self) -> bool:
        return getattr(self, "_handle", None) is not None and self._pid == os.getpid()
