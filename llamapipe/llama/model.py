"""A loaded model: weights and vocabulary, shared by any number of contexts.

The model is checked by ``gguf.check`` before llama.cpp reads it. It counts the objects created from it and cannot be
closed before them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from llamapipe._messages import explains_options, listed, wrong_option
from llamapipe._options import MODEL
from llamapipe.arguments import check_flag, choice_of, int_of, path_of
from llamapipe.chat.tools import ToolDefinition
from llamapipe.errors import BackendError, EngineClosedError, ModelLoadError
from llamapipe.host.cores import usable_cores
from llamapipe.host.cpu_load import mark_cores
from llamapipe.host.memory import free_memory, return_freed_memory
from llamapipe.llama._loading import Progress, is_loading, load, mapping_guard
from llamapipe.llama._overrides import (
    check_kv,
    kv_text,
    log_placement,
    n_cpu_expert_layers,
    native_kv,
    native_placement,
    place_tensors,
)
from llamapipe.llama.adapter import Adapter, ControlVector, ModelAdapters, local_file
from llamapipe.llama.devices import Device, check_rpc, device_list, shares_of_devices, used_devices
from llamapipe.llama.fim import FimExtra, FimOrder, fim_prompt, fim_text
from llamapipe.llama.rope import FROM_FILE, Rope
from llamapipe.llama.vocab import Vocab
from llamapipe.locks import Lock
from llamapipe.native.load import native
from llamapipe.native.owner import Owner
from llamapipe.ollama_models import display_name, model_of

if TYPE_CHECKING:
    from llamapipe.gguf.check import GgufInfo
    from llamapipe.gguf.mmproj import MmprojInfo
    from llamapipe.gguf.reader import Tensor
    from llamapipe.llama._chat_prompts import ChatPrompts
    from llamapipe.llama.projector import Projector
    from llamapipe.rpc import Workers

# Options of ``Engine`` that other libraries take when they load a model.
ENGINE_OPTIONS = ("n_ctx", "n_seq_max", "n_threads", "type_k", "type_v")
TUNING_OPTIONS = ("n_batch", "n_ubatch", "n_threads_batch")  # the same for EngineTuning
# Architectures whose graphs look up single rows of weights that also serve in products: packed weights have no rows.
_READ_AS_ROWS = frozenset({"clef"})
# Architectures whose graphs do not support batches of tokens and image rows (llm_arch_supports_mixed_batch).
_NO_MEDIA = frozenset({"cogvlm", "deepseek4", "granite-switch", "eagle3", "dflash", "gemma4-assistant"})
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}


def packs_architecture(name: str) -> bool:
    """Return whether an architecture's weights are packed for llamapipe's kernels, if this machine has any."""
    return name not in _READ_AS_ROWS


def demo_model_path() -> Path:
    """Return the path of the bundled model, a small GGUF file inside the package."""
    return Path(__file__).parent.parent / "data" / "demo.gguf"


# The options of ``Model``, for error messages.
MODEL_OPTIONS = frozenset(option.name for option in MODEL)


class Model(Owner):
    """A model loaded from a GGUF file, the Hugging Face Hub (extra ``hub``) or Ollama's downloads.

    ``path``: a file; ``"hf:OWNER/REPO/FILE"``, ``"hf:OWNER/REPO"`` or ``"hf:OWNER/REPO:QUANT"``, which is downloaded
    once (``from_pretrained`` has more options); ``"ollama:NAME"`` or ``"ollama:NAME:TAG"``.

    - ``n_gpu_layers``: layers to place on GPUs; -1: all. ``devices``: names or ``Device`` objects to use; None: all.
    - ``split_mode``: how the model is divided among devices. ``main_gpu``: the device that mode ``"none"`` uses.
      ``tensor_split``: the share of each device.
    - ``use_mmap``: map the file instead of reading it. ``use_mlock``: lock the weights in memory.
    - ``progress``: called on this thread with 0.0 to 1.0 while the model loads. An exception in it stops the load and
      is raised here.
    - ``vocab_only``: load no weights, for tokenizing only.
    - ``chat_template``: replaces the file's template: Jinja source, or the path of a file with it.
    - ``rpc``: addresses of ``llamapipe rpc-worker``, such as ``"10.0.0.2:50052"``, whose devices get layers before the
      local ``devices``. Connections are neither authenticated nor encrypted. If a worker ends, so does this process.
    - ``tool_calls``: ``"lenient"`` also reads an answer of plain JSON as tool calls; ``"strict"`` reads only what the
      chat template marks as a call.
    - ``kernels``: with ``"auto"``, weights on the CPU are packed for llamapipe's matrix kernels if it has one for their
      type. Packed weights take memory in addition to the file; if less than the file's size is free, none are packed.
      With ``"ggml"``, ggml computes all products.
    - ``packed_cache``: a folder for packed weights; True or ``"auto"``: in the user's cache; None, False or ``"off"``:
      no folder. The first load writes a file as large as the packed weights there. Later loads map it, which is faster,
      and processes share its memory.
    - ``mmproj``: the model's second file, a GGUF file with an encoder of images or audio (``docs/guides/images.md``),
      as a path or ``hf:OWNER/REPO[/FILE]``. ``"auto"``: the file ``mmproj*.gguf`` in the model's folder, if exactly one
      there fits the model; it is loaded with the first image. Without one, messages can only have text. True: the same,
      or the file in the model's repository; it must exist. None, False or ``"off"``: none.
    - ``image_min_tokens``, ``image_max_tokens``: approximate limits of an image's tokens, or a tile's if the projector
      tiles; only for projectors that keep an image's proportions. None: the file's limits. Projectors with one size for
      all images refuse these options if ``mmproj`` names a file, and otherwise log a warning.
    - ``n_cpu_moe``: keep the experts of this many layers, from the first onward, on the CPU, even if the rest of the
      model is on a GPU. ``tensor_placement``: devices of other tensors, by regular expressions (``re.search``) for
      their names, such as ``{r"ffn_.*_exps": "CPU"}``; the first match counts. A pattern that matches no tensor is an
      error.
    - ``kv_overrides``: values that replace those in the file's metadata, by key; types must be the file's.
    - ``load_mtp``: also load the layers that predict the token after the next (MTP), if the file has some, for
      ``Engine(draft="mtp")``. An engine that is created from a path sets this option itself.

    A model has these attributes:

    - ``path``, ``name``: the file, and the name that servers and messages have for the model.
    - ``n_vocab``, ``n_ctx_train`` (tokens), ``n_embd``, ``n_layer``, ``n_params``, ``size_bytes``: sizes.
    - ``n_swa``: tokens that a layer with a sliding window attends to; 0 without such layers.
    - ``is_recurrent``: the model keeps one state per sequence, of which no part can be removed. ``has_only_states``: it
      has no KV cells in addition.
    - ``n_mtp_layers``: the number of layers in the file that predict the token after the next. ``load_mtp``: whether
      they were loaded.
    - ``is_causal``: False if tokens attend to later tokens; engines refuse such models.
    - ``devices``: the devices its layers may be placed on; the CPU if no GPU is used. ``n_cpu_expert_layers``: the
      number of layers whose experts were all placed on the CPU by options.
    - ``kernels``: the kernels for packed weights, such as ``"avx2"``; ``"ggml"`` if none are packed.
      ``n_packed_tensors``: the number of packed weights. ``packed_bytes``: the memory they take in addition to the
      file. ``attends``: whether contexts also compute attention with llamapipe's kernels.
    - ``packed_folder``: the folder of ``packed_cache``; None without one, or if llamapipe's kernels are not used.
      ``packed_file``: the file there that the weights are mapped from, or None.
    - ``supports_images``, ``supports_audio``: whether messages may have images or audio, which needs a projector.

    Any thread may use a model. Close it after every context and engine created from it, or use ``with``.

    Raises ModelLoadError for a missing, damaged or unsupported file, TypeError and ValueError for wrong arguments
    (``docs/reference/options.md`` has the ranges), BackendError for an unknown device and for a worker that cannot be
    reached.
    """

    @explains_options({"Engine": ENGINE_OPTIONS, "EngineTuning": TUNING_OPTIONS})
    def __init__(
        self,
        path: str | os.PathLike[str],
        n_gpu_layers: int = -1,
        devices: Sequence[str | Device] | None = None,
        split_mode: str = "layer",
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        use_mmap: bool = True,
        use_mlock: bool = False,
        progress: Progress | None = None,
        vocab_only: bool = False,
        chat_template: str | os.PathLike[str] | None = None,
        rpc: Sequence[str] | None = None,
        tool_calls: Literal["lenient", "strict"] = "lenient",
        kernels: Literal["auto", "ggml"] = "auto",
        packed_cache: str | os.PathLike[str] | bool | None = None,
        mmproj: str | os.PathLike[str] | bool | None = "auto",
        image_min_tokens: int | None = None,
        image_max_tokens: int | None = None,
        n_cpu_moe: int | None = None,
        tensor_placement: Mapping[str, str | Device] | None = None,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        load_mtp: bool = False,
    ) -> None:
        # 1. The attributes that `close` needs; it may be called at any time.
        self._handle: Any = None
        self.projector: Projector | None = None
        self.no_projector = "was loaded without a projector"
        self._workers: Workers | None = None
        self._pid = os.getpid()
        self._lock = Lock()
        self._children: dict[int, str] = {}
        self.adapters = ModelAdapters(self)

        # 2. Check the options before anything is read.
        try:
            self.path, self.name = model_of(path) or (local_file(path), "")
        except TypeError:
            raise TypeError(f"path must be a str or os.PathLike, not {type(path).__name__}") from None
        self.name = self.name or display_name(self.path)
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, not {type(progress).__name__}")
        split = choice_of("split_mode", split_mode)
        n_layers = int_of("n_gpu_layers", n_gpu_layers)
        gpu = int_of("main_gpu", main_gpu)
        mapped, locked = check_flag("use_mmap", use_mmap), check_flag("use_mlock", use_mlock)
        self.vocab_only = check_flag("vocab_only", vocab_only)
        self.load_mtp = check_flag("load_mtp", load_mtp)
        self.tool_calls = choice_of("tool_calls", tool_calls)
        may_pack = choice_of("kernels", kernels) == "auto"
        folder = _packed_folder(packed_cache)
        if folder is not None:
            _check_packed_folder(kernels=kernels, use_mmap=mapped, use_mlock=locked)
        self._given_template = None if chat_template is None else template_text(chat_template)
        second = _check_mmproj(mmproj)
        if self.vocab_only and second not in ("auto", None):
            raise ValueError(
                "mmproj is given, and vocab_only loads no weights that could use it; give one of them"
            )
        self._kv_overrides = check_kv(kv_overrides)
        limits = _image_limits(image_min_tokens, image_max_tokens)
        if rpc is not None:
            check_rpc(split, n_layers, self.vocab_only)

        # 3. Check the file before llama.cpp reads it.
        mark_cores()
        self._native = native()
        info = self._check_file()
        self.architecture = info.architecture
        self.tensors: Mapping[str, Tensor] = {tensor.name: tensor for tensor in info.tensors}
        # Includes arrays, which `metadata` lacks.
        self.file_metadata = info.metadata
        self.is_causal = info.is_causal
        self.has_rank_head = info.has_rank_head

        # 4. Place the tensors and load the model.
        params = self._params(n_layers, split, gpu, mapped, locked)
        ffi, lib = self._native.ffi, self._native.lib
        overrides = native_kv(ffi, lib, {key: info.metadata[key] for key in self._kv_overrides})
        if self._kv_overrides:
            params.kv_overrides = overrides
        shares = shares_of_devices(ffi, lib, tensor_split)
        try:
            far = self._connect(rpc)
            # Native memory that must stay alive until load() returns.
            keep = [device_list(ffi, devices, far), shares, overrides]
            params.devices, params.tensor_split = keep[:2]
            placed = place_tensors(info, tensor_placement, n_cpu_moe, devices)
            if placed:
                places = native_placement(ffi, lib, placed)
                params.tensor_buft_overrides = places[0]
                keep.append(places)
            self.devices = used_devices(devices, n_layers, far)
            self.n_cpu_expert_layers = n_cpu_expert_layers(info, placed)
            self._load(info, params, progress, may_pack, folder)
            log_placement(info, placed)

            # 5. Read the loaded model's facts and set the projector.
            self._read_sizes()
            self._check_rope(info)
            if second is not None and not self.vocab_only:
                self._set_projector(info, second, limits)
        except BaseException:  # Ctrl-C: the caller never gets this object, so cannot close it
            self.close()
            raise

    def _check_file(self) -> GgufInfo:
        """Check the file and return its facts. Raises ModelLoadError if llama.cpp must not read it, OSError."""
        from llamapipe.gguf.check import check_gguf
        from llamapipe.hub import pull_advice

        with mapping_guard(self._native, self.path):
            try:
                info = check_gguf(self.path, self._kv_overrides)
            except ModelLoadError as e:
                advice = pull_advice(self.path) if "truncated" in str(e) else ""
                raise ModelLoadError(f"{e}{advice}") from None
        if info.is_vocab_only and not self.vocab_only:
            raise ModelLoadError(
                f"{self.path} holds a vocabulary without weights; load it with vocab_only=True to tokenize, "
                "or give the file of a whole model"
            )
        return info

    def _connect(self, rpc: Sequence[str] | None) -> Sequence[Any]:
        """Connect to workers and return their devices, which the model then owns. Raises BackendError."""
        if rpc is None:
            return []
        from llamapipe.rpc import Workers

        self._workers = Workers(rpc)
        return self._workers.devices

    def _params(self, n_layers: int, split_mode: str, main_gpu: int, maps: bool, locks: bool) -> Any:
        """Return llama.cpp's parameters, without the devices."""
        ffi, lib = self._native.ffi, self._native.lib
        params = ffi.new("struct llama_model_params *", lib.llama_model_default_params())
        params.n_gpu_layers = n_layers
        params.split_mode = _SPLIT_MODES[split_mode]
        params.main_gpu = main_gpu
        params.vocab_only = self.vocab_only
        params.load_mtp = self.load_mtp
        mmap, mlock = lib.LLAMA_LOAD_MODE_MMAP, lib.LLAMA_LOAD_MODE_MLOCK
        both, neither = lib.LLAMA_LOAD_MODE_MMAP_MLOCK, lib.LLAMA_LOAD_MODE_NONE
        params.load_mode = (both if locks else mmap) if maps else (mlock if locks else neither)
        return params

    def _load(
        self, info: GgufInfo, params: Any, progress: Progress | None, may_pack: bool, folder: Path | None
    ) -> None:
        lib, ffi = self._native.lib, self._native.ffi
        has_kernels = may_pack and lib.lp_kernels_level() != ffi.NULL
        self.attends = may_pack and lib.lp_kernels_attend()
        self.packed_folder = folder if has_kernels else None
        packs = has_kernels and packs_architecture(info.architecture)
        with ExitStack() as stack:
            cache = None
            if packs and folder is not None and not self.vocab_only:
                from llamapipe.llama._packed_cache import PackedFile

                # A load inside a progress function must not wait for the load that called the function.
                cache = stack.enter_context(PackedFile(folder, info, may_wait=not is_loading()))
            is_found = cache is not None and cache.is_found
            packs = packs and (is_found or self._fits_memory(info))
            packing = ffi.NULL
            if packs:
                packing = ffi.new("lp_packing *", {"n_threads": usable_cores(), "fd": -1})
            if cache is not None and is_found:
                packing.fd, packing.offset = cache.fd, cache.offset
                packing.n_in_file, packing.layout_in_file = cache.n_bytes, cache.layout
            self._load_file(info, params, progress, packing)
            self.n_packed_tensors: int = packing.n_tensors if packs else 0
            self.packed_bytes: int = packing.n_bytes if packs else 0
            if cache is not None and self.n_packed_tensors and not packing.is_mapped:
                cache.write(self._native, packing)
            self.packed_file: Path | None = cache.path if cache is not None and packing.is_mapped else None
        self.kernels: str = ffi.string(lib.lp_kernels_level()).decode() if self.n_packed_tensors else "ggml"

    def _fits_memory(self, info: GgufInfo) -> bool:
        free = free_memory()
        if free is None or info.size_bytes <= free:
            return True
        logging.getLogger("llamapipe").warning(
            "%s has %.1f GiB, and %.1f GiB are free: it is not packed for llamapipe's kernels; "
            "kernels='ggml' avoids this warning",
            self.path.name,
            info.size_bytes / 2**30,
            free / 2**30,
        )
        return False

    def _load_file(self, info: GgufInfo, params: Any, progress: Progress | None, packing: Any) -> None:
        failure = None
        try:
            with mapping_guard(self._native, self.path, [stamp.path for stamp in info.stamps]):
                self._handle = load(self._native, self.path, params, progress, packing)
        except ModelLoadError as error:
            failure = error
        if change := info.change():
            raise ModelLoadError(
                f"{change} while it was loaded; load it again when it is complete"
            ) from failure
        if failure is not None:
            raise failure

    def _read_sizes(self) -> None:
        lib = self._native.lib
        self.vocab = Vocab(lib.llama_model_get_vocab(self._handle), lambda: self.metadata)
        self.n_vocab: int = self.vocab.n_vocab
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(self._handle)
        self.n_embd: int = lib.llama_model_n_embd(self._handle)
        self.n_layer: int = lib.llama_model_n_layer(self._handle)
        self.n_params: int = lib.llama_model_n_params(self._handle)
        self.size_bytes: int = lib.llama_model_size(self._handle)
        self.has_only_states: bool = lib.llama_model_is_recurrent(self._handle)
        self.is_recurrent: bool = self.has_only_states or lib.llama_model_is_hybrid(self._handle)
        self.n_swa: int = lib.llama_model_n_swa(self._handle)
        self.n_mtp_layers: int = lib.llama_model_n_layer_nextn(self._handle)
        self.bos = self.vocab.bos
        self.eos = self.vocab.eos

    @property
    def rotates(self) -> bool:
        """Whether at least some layers encode positions as rotations of keys and queries."""
        lib = self._native.lib
        return bool(lib.llama_model_rope_type(self._handle) != lib.LLAMA_ROPE_TYPE_NONE)

    @property
    def has_mrope(self) -> bool:
        """Whether a position has several parts: time, height and width."""
        lib = self._native.lib
        kind = lib.llama_model_rope_type(self._handle)
        return kind != lib.LLAMA_ROPE_TYPE_NONE and bool(kind & lib.LLAMA_ROPE_TYPE_MROPE)

    def _check_rope(self, info: GgufInfo) -> None:
        """Refuse files that lack required rotary settings: a decode would hang or end the process."""
        lib = self._native.lib
        kind = lib.llama_model_rope_type(self._handle)
        if self.vocab_only or kind == lib.LLAMA_ROPE_TYPE_NONE:
            return
        name = f"{self.path}: {info.architecture}.rope."
        if info.n_rot == 0 and not self.is_recurrent:
            raise ModelLoadError(f"{name}dimension_count is 0, this architecture needs at least 2")
        if kind & lib.LLAMA_ROPE_TYPE_MROPE and not info.has_rope_sections:
            raise ModelLoadError(f"{name}dimension_sections is missing or zero, this architecture needs it")

    def _set_projector(
        self, info: GgufInfo, mmproj: Path | str | bool, limits: tuple[int | None, int | None]
    ) -> None:
        """Load the projector that ``mmproj`` names, or remember the one in the model's folder for later."""
        from llamapipe.gguf.mmproj import check_mmproj, mmproj_beside
        from llamapipe.llama.projector import Projector

        is_asked = mmproj != "auto"
        if info.architecture in _NO_MEDIA:
            if is_asked:
                raise ModelLoadError(
                    f"{self.path}: llamapipe does not support images and sounds with the architecture "
                    f"{info.architecture!r}"
                )
            return
        with mapping_guard(self._native, self.path):
            if isinstance(mmproj, Path):
                projectors = [check_mmproj(mmproj)]
            else:
                title = lambda: self.metadata.get("general.name", "")  # noqa: E731
                projectors = mmproj_beside(self.path, self.n_embd, title)
                if len(projectors) > 1:
                    names = listed([projector.path.name for projector in projectors])
                    self.no_projector = f"has {len(projectors)} projectors beside it, {names}"
                    if is_asked:
                        raise ModelLoadError(f"{self.path} {self.no_projector}; give mmproj the path of one")
                elif not projectors:
                    self.no_projector = "has no projector beside it"
                    projectors = [check_mmproj(_mmproj_of_hub(self.path))] if is_asked else []
        if len(projectors) == 1:
            use_gpu = any(device.type in ("gpu", "igpu") for device in self.devices)
            limits = self._limits_of(projectors[0], limits, is_asked)
            self.projector = Projector(self._native, self, self._handle, projectors[0], use_gpu, limits)
            if is_asked:
                self.projector.open()

    def _limits_of(
        self, mmproj: MmprojInfo, limits: tuple[int | None, int | None], is_asked: bool
    ) -> tuple[int | None, int | None]:
        """Return the limits if the projector accepts them, else none. If ``is_asked``, raise ValueError instead."""
        if limits == (None, None):
            return limits
        try:
            if mmproj.image_tokens is None:
                raise ValueError(
                    "image_min_tokens and image_max_tokens are for projectors that keep an image's proportions, "
                    f"which {' and '.join(mmproj.projectors)} is not: leave them out"
                )
            mmproj.image_tokens.check(*limits)
        except ValueError as e:
            if is_asked:
                raise ValueError(f"{mmproj.path}: {e}") from None
            logging.getLogger("llamapipe").warning("%s has its own limits: %s", mmproj.path.name, e)
            return None, None
        return limits

    @property
    def supports_images(self) -> bool:
        """Whether messages may have images."""
        return self.projector is not None and self.projector.sees

    @property
    def supports_audio(self) -> bool:
        """Whether messages may have audio."""
        return self.projector is not None and self.projector.hears

    @classmethod
    def demo(cls) -> Model:
        """Load the bundled model, which writes stories, counts and answers simple questions."""
        return cls(demo_model_path())

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        *,
        revision: str | None = None,
        local_files_only: bool = False,
        progress: bool = True,
        **options: Any,
    ) -> Model:
        """Load a model from the Hugging Face Hub (extra ``hub``).

        The model is downloaded once; later calls use the Hub's cache.

        - ``repo_id``: ``"owner/name"``. ``filename``: a file, or a pattern such as ``"*Q4_K_M.gguf"`` that matches
          exactly one model; None if the repository has only one. A model that is split into several files counts as
          one.
        - ``revision``: a branch, tag or commit. ``local_files_only``: use the cache and do not connect.
        - ``progress``: show progress bars. ``options``: as for ``Model``.

        ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` have the meaning that huggingface_hub gives
        them. Raises ImportError without the extra, ValueError for a bad name, ModelLoadError if no model or more than
        one matches or the download fails, and whatever ``Model`` raises.
        """
        from llamapipe.hub import model_file

        for name, value in (("local_files_only", local_files_only), ("progress", progress)):
            check_flag(name, value)
        if wrong := options.keys() - MODEL_OPTIONS:
            known = MODEL_OPTIONS | {"filename", "revision", "local_files_only", "progress"}
            raise TypeError(
                wrong_option(
                    "from_pretrained",
                    min(wrong),
                    known,
                    {"Engine": ENGINE_OPTIONS, "EngineTuning": TUNING_OPTIONS},
                )
            )
        texts: dict[str, object] = {"repo_id": repo_id, "filename": filename, "revision": revision}
        for name, text in texts.items():
            if not isinstance(text, str) and (text is not None or name == "repo_id"):
                raise TypeError(f"{name} must be a str, not {type(text).__name__}")
        return cls(model_file(repo_id, filename, revision, local_files_only, progress), **options)

    def __repr__(self) -> str:
        if self._handle is None:
            return f"<Model {self.path.name!r} closed>"
        sizes = f"n_params={self.n_params} n_vocab={self.n_vocab} n_ctx_train={self.n_ctx_train}"
        return f"<Model {self.path.name!r} {sizes}>"

    def __dir__(self) -> list[str]:
        """Return the public names, without those that only contexts and engines use."""
        hidden = set(
            "adopt release handle chat_prompts is_template_given fingerprint on_workers adapters architecture "
            "tensors projector no_projector has_mrope".split()
        )
        return [name for name in super().__dir__() if not name.startswith("_") and name not in hidden]

    # ---- adapters
    def load_adapter(self, path: str | os.PathLike[str], name: str | None = None) -> Adapter:
        """Load a LoRA of this model from a GGUF file, as llama.cpp's ``convert_lora_to_gguf.py`` writes it.

        ``path``: a file, or ``hf:OWNER/REPO/FILE.gguf`` on the Hugging Face Hub (extra ``hub``). ``name``: the name
        that requests use (``SamplingParams.adapter``); None: the name in the file's metadata, else the file's name.
        Requests that do not name the adapter are computed without it.

        Any thread, also while engines run. Raises ModelLoadError for a file that is missing, damaged, not a LoRA or
        made for another model; ValueError for a name that is taken; TypeError.
        """
        return self.adapters.load(self._native, path, name)

    def load_control_vector(
        self, path: str | os.PathLike[str], layers: tuple[int, int] | None = None, name: str | None = None
    ) -> ControlVector:
        """Load a control vector from a GGUF file, as llama.cpp's ``cvector-generator`` and repeng write it.

        ``path``: as for ``load_adapter``. ``layers``: the first and the last layer to change, counted from 1; None: all
        layers that the file has a direction for. ``name``: as for ``load_adapter``; adapters and control vectors share
        one list of names. If a request names several, their scaled directions add up.

        Any thread, also while engines run. Raises ModelLoadError for a file that is missing, damaged, not a control
        vector or made for another model, and for an architecture to which llama.cpp cannot apply one; ValueError for a
        name that is taken or layers that the model does not have; TypeError.
        """
        return self.adapters.load_control_vector(self._native, path, layers, name)

    # ---- text
    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of ``text``; see ``Vocab.tokenize``."""
        self.handle  # noqa: B018  (refuses a closed model)
        return self.vocab.tokenize(text, add_special, parse_special)

    def detokenize(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of token ids; see ``Vocab.detokenize``."""
        self.handle  # noqa: B018
        return self.vocab.detokenize(ids)

    def piece(self, token: SupportsIndex) -> bytes:
        """Return the bytes of a token; see ``Vocab.piece``."""
        self.handle  # noqa: B018
        return self.vocab.piece(token)

    def is_eog(self, token: SupportsIndex) -> bool:
        """Return whether the token ends generation; see ``Vocab.is_eog``."""
        return self.vocab.is_eog(token)

    def tokenize_fim(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: FimExtra = (),
        filename: str | None = None,
        order: FimOrder = "psm",
        n_max: int | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt that asks the model for the text between ``prefix`` and ``suffix``.

        ``extra``: other files, ``(filename, text)``, the most important last. ``filename``: the name of the gap's file.
        ``order``: ``"psm"`` writes the prefix first, ``"spm"`` the suffix; most models were trained with the first.
        ``n_max``: the maximum number of tokens. To stay within it, the beginning of the prefix, the end of the suffix
        and whole other files are left out, in steps of up to 256 tokens, so that the prompts of a moving cursor begin
        alike. Names of control tokens in the texts stay text.

        Any thread. Raises InvalidRequestError if the model has no tokens that mark a gap, and for an ``n_max`` that is
        too small; TypeError, ValueError.
        """
        self.handle  # noqa: B018
        text = fim_text(prefix, suffix, extra, filename, order)
        return fim_prompt(self.vocab, text, n_max).tokens

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as text, by key. Arrays are omitted."""
        ffi, lib = self._native.ffi, self._native.lib
        metadata = {}
        for i in range(lib.llama_model_meta_count(self.handle)):
            key = _text(ffi, partial(lib.llama_model_meta_key_by_index, self.handle, i))
            metadata[key] = _text(ffi, partial(lib.llama_model_meta_val_str_by_index, self.handle, i))
        return metadata | {key: kv_text(value) for key, value in self._kv_overrides.items()}

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that identify this file; see ``gguf.reader.fingerprint``. Raises OSError."""
        from llamapipe.gguf.reader import fingerprint

        own = fingerprint(self.path)
        if not self._kv_overrides:
            return own
        return hashlib.sha256(own + repr(sorted(self._kv_overrides.items())).encode()).digest()[: len(own)]

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template in use, from the option ``chat_template`` or the file, or None."""
        if self._given_template is not None:
            return self._given_template
        ffi = self._native.ffi
        text = self._native.lib.llama_model_chat_template(self.handle, ffi.NULL)
        return None if text == ffi.NULL else ffi.string(text).decode("utf-8", "replace")

    # ---- chat
    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Iterable[ToolDefinition] | None = None,
        add_generation_prompt: bool = True,
        **template_args: object,
    ) -> str:
        """Return a conversation's text as the chat template renders it, without a BOS that tokenizing would add.

        ``messages``: dicts with ``role`` and ``content``. ``tools``: as for ``Engine.chat``. ``add_generation_prompt``:
        end where an answer begins. ``template_args``: more variables for the template, such as ``enable_thinking``. To
        generate, use ``Engine.chat`` or ``tokenize_chat``: this text does not show which control tokens come from the
        template and which from a message.

        Any thread. Raises TypeError and InvalidRequestError for bad messages, for messages that the template refuses,
        and for a model without a template; ImportError without the extra ``chat``.
        """
        prompts = self.chat_prompts
        return prompts.render(messages, prompts.definitions(tools), add_generation_prompt, template_args)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Iterable[ToolDefinition] | None = None,
        add_generation_prompt: bool = True,
        **template_args: object,
    ) -> list[int]:
        """Return the tokens of a conversation. Control tokens come from the template only, never from a message.

        Arguments and exceptions as for ``render_chat``.
        """
        prompts = self.chat_prompts
        return prompts.tokenize(messages, prompts.definitions(tools), add_generation_prompt, template_args)

    def save_tokenizer(self, folder: str | os.PathLike[str]) -> Path:
        """Write tokenizer files to a folder, for programs that tokenize themselves. Return the folder.

        The files are ``tokenizer.json`` (the format of the ``tokenizers`` package), ``tokenizer_config.json``, which
        has the chat template, and ``config.json``. Existing files are replaced atomically.

        Any thread. Raises ValueError if ``tokenizer.json`` cannot express the vocabulary exactly; OSError.
        """
        from llamapipe.gguf.tokenizer_json import write_tokenizer

        vocab = self.vocab
        return write_tokenizer(
            self.path,
            path_of(folder),
            vocab.special_tokens(),
            first=vocab.bos if vocab.add_bos else None,
            last=vocab.eos if vocab.add_eos else None,
            bos=vocab.bos,
            eos=vocab.eos,
            ends=sorted(vocab.eog_tokens),
            n_ctx_train=self.n_ctx_train,
            chat_template=self.chat_template,
        )

    @property
    def is_template_given(self) -> bool:
        """Whether ``chat_template`` replaces the file's own templates."""
        return self._given_template is not None

    @cached_property
    def chat_prompts(self) -> ChatPrompts:
        """The compiled chat templates. Raises ImportError without the extra ``chat``."""
        from llamapipe.llama._chat_prompts import ChatPrompts

        return ChatPrompts(self)

    @property
    def on_workers(self) -> bool:
        """Whether devices of RPC workers have any of the model's layers."""
        return self._workers is not None

    # ---- lifetime
    @property
    def handle(self) -> Any:
        """The native ``llama_model *``. Raises EngineClosedError if the model is closed or this is a forked child."""
        if self._handle is None:
            raise EngineClosedError("the model is closed; load it again")
        if self._pid != os.getpid():
            raise EngineClosedError(
                "the model was loaded before fork(); load it in the child process, or use the spawn start method"
            )
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._handle is None

    def adopt(self, child: object, name: str | None = None) -> None:
        """Register an object that uses the native model.

        While it lives, ``close`` raises an error that shows ``name``.
        """
        with self._lock:
            self.handle  # noqa: B018
            if self.on_workers and self._children.keys() - {id(child)}:
                raise BackendError(
                    f"the model is on RPC workers and has a context already ({', '.join(self._children.values())}); "
                    "workers compute for one context at a time: close that one first, or share it"
                )
            self._children[id(child)] = name or type(child).__name__

    def release(self, child: object) -> None:
        """Remove an object registered by ``adopt``."""
        with self._lock:
            self._children.pop(id(child), None)

    def close(self) -> None:
        """Free the native memory immediately; a second call does nothing.

        Raises EngineClosedError while contexts or engines created from it are open.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._handle is None:
                self._close_workers()
                return
            if self._children:
                names = ", ".join(sorted(self._children.values()))
                raise EngineClosedError(f"the model is in use; first close {names}")
            handle, self._handle = self._handle, None
            if hasattr(self, "vocab"):  # absent if Ctrl-C interrupted __init__
                self.vocab.forget()
            self.adapters.close()
        if self.projector is not None:
            self.projector.close()
        self._native.lib.llama_model_free(handle)
        self._close_workers()
        return_freed_memory()

    def _close_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _is_left_open(self) -> bool:
        return getattr(self, "_handle", None) is not None and self._pid == os.getpid()


def warn_of_context(model: Model, n_ctx: int, rope: Rope = FROM_FILE) -> None:
    """Log a warning if ``n_ctx`` exceeds both the training context and the context that positions are scaled for."""
    if n_ctx <= model.n_ctx_train:
        return
    if n_ctx > (most := rope.most_tokens(model)):
        logging.getLogger("llamapipe").warning(
            "n_ctx is %d, but the model was trained with %d: longer texts are likely to be of poor quality "
            "(docs/guides/long-contexts.md)",
            n_ctx,
            most,
        )


def _packed_folder(value: str | os.PathLike[str] | bool | None) -> Path | None:
    """Return the folder that ``packed_cache`` selects, or None. Raises TypeError, ValueError."""
    if value is None or value is False or value == "off":
        return None
    if value is not True and value != "auto":
        try:
            if folder := os.fspath(value):
                return path_of(folder)
        except TypeError:
            raise TypeError(
                f"packed_cache must be a folder, True, False or None, not {type(value).__name__}"
            ) from None
        raise ValueError("packed_cache is empty; it must be a folder, 'auto' or 'off'")
    from llamapipe.host.folders import cache_folder

    try:
        return cache_folder() / "packed"
    except RuntimeError as error:  # no home folder is known: the user has no name, and HOME is not set
        logging.getLogger("llamapipe").warning(
            "packed_cache: %s; packed weights stay in memory: give a folder, or set LLAMAPIPE_CACHE_DIR",
            error,
        )
        return None


def _check_packed_folder(*, kernels: str, use_mmap: bool, use_mlock: bool) -> None:
    """Raise ValueError if no packed weights can be mapped with these options."""
    for option, is_wrong in (
        (f"kernels={kernels!r}", kernels != "auto"),
        (f"use_mmap={use_mmap!r}", not use_mmap),
        (f"use_mlock={use_mlock!r}", use_mlock),
    ):
        if is_wrong:
            raise ValueError(f"packed_cache maps packed weights, which {option} does not allow")


def _check_mmproj(value: str | os.PathLike[str] | bool | None) -> Path | Literal["auto", True] | None:
    """Return the checked ``mmproj``; a file becomes a path. Raises TypeError, ValueError, and as ``hub.model_file``."""
    if value is None or value is False or value == "off":
        return None
    if value is True:
        return True
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.startswith("hf:"):
        from llamapipe.hub import MMPROJ, model_file, parse

        repo_id, filename = parse(value)
        return model_file(repo_id, filename or MMPROJ)
    try:
        return local_file(value)
    except TypeError:
        raise TypeError(f"mmproj must be a path, a bool or None, not {type(value).__name__}") from None


def _image_limits(least: int | None, most: int | None) -> tuple[int | None, int | None]:
    """Return the checked limits of an image's tokens. Raises TypeError, ValueError."""
    limits = {"image_min_tokens": least, "image_max_tokens": most}
    least, most = (None if n is None else int_of(name, n) for name, n in limits.items())
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"image_min_tokens is {least} and image_max_tokens {most}; the first must not be larger"
        )
    return least, most


def _mmproj_of_hub(model: Path) -> Path:
    """Return the projector in the repository of a file in the hub's cache. Raises ModelLoadError."""
    from llamapipe.hub import MMPROJ, model_file, source_of

    source = source_of(model)
    if source is None:
        raise ModelLoadError(
            f"{model} has no projector (mmproj*.gguf) of the same model beside it; give mmproj its path"
        )
    return model_file(source.repo_id, MMPROJ, revision=source.filename)


def template_text(chat_template: str | os.PathLike[str]) -> str:
    """Return a chat template, given as Jinja source or as a file's path. Raises TypeError, ValueError, OSError."""
    if not isinstance(chat_template, (str, os.PathLike)):
        raise TypeError(f"chat_template must be a str or a path, not {type(chat_template).__name__}")
    if chat_template == "":
        raise ValueError(
            "chat_template is empty; give Jinja source, the path of a file, or None for the file's own"
        )
    if isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template):
        return chat_template
    try:
        return path_of(chat_template).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"chat_template: {chat_template} is not UTF-8 text: {e}") from None


def _text(ffi: Any, read: Callable[[Any, int], int]) -> str:
    n = read(ffi.NULL, 0)
    text = ffi.new("char[]", max(n, 0) + 1)
    read(text, max(n, 0) + 1)
    return bytes(ffi.buffer(text, max(n, 0))).decode("utf-8", "replace")
