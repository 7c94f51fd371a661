"""The arguments of ``--model_args``, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from llamapipe.arguments import check_flag, check_int, quoted
from llamapipe.engine import CacheType, FlashAttention

_INT32_MAX = 2**31 - 1
_DEFAULT_SEQUENCES = 8  # Engine's


@dataclass(frozen=True)
class Options:
    """Model arguments.

    - ``path``: the model's file, or ``demo`` for the one in the package.
    - ``n_ctx`` (or ``max_length``), ``n_seq_max``, ``n_cells``, ``n_threads``, ``n_threads_batch``, ``n_batch``,
      ``n_ubatch``, ``kv_unified``, ``type_k``, ``type_v``, ``flash_attn``: as for ``Engine``; ``n_gpu_layers``: as for
      ``Model``.
    - ``max_gen_toks``: most generated tokens where a task does not say (default: 256, at most half of ``n_ctx``).
    - ``add_bos_token``: whether texts begin with BOS (default: what the vocabulary says). ``prefix_token_id``: what
      stands before the first token of a text that is scored from its beginning (default: BOS, else EOS).
    - ``enable_thinking``: given to the chat template, by those that ask for it.
    - ``batch_size``: over 1 the default of ``n_seq_max``; the engine makes its own batches. ``max_batch_size`` is the
      same for ``batch_size=auto``. ``device``: ``cpu`` keeps all layers off GPUs; others choose nothing here.

    The harness reads numbers from text in its own way, so ``-1`` may come as ``-1.0``.

    Raises TypeError and ValueError naming the argument.
    """

    path: str
    n_ctx: int | None = None
    max_length: int | None = None
    n_seq_max: int | None = None
    n_cells: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int | None = None
    kv_unified: bool | None = None
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"
    flash_attn: FlashAttention = "auto"
    max_gen_toks: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    enable_thinking: bool | None = None
    batch_size: int | str | None = None
    max_batch_size: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        path: object = self.path
        if not isinstance(path, str) or not path:
            raise TypeError(
                f"path must be the file of a model, or demo, not {quoted(self.path)}: --model_args path=model.gguf"
            )
        for name in (
            "n_ctx", "max_length", "n_seq_max", "n_cells", "n_threads", "n_threads_batch", "n_batch", "n_ubatch",
            "max_gen_toks", "max_batch_size",
        ):  # fmt: skip
            self._int(name, 1)
        self._int("n_gpu_layers", -1)
        self._int("prefix_token_id", 0)
        for name in ("kv_unified", "add_bos_token", "enable_thinking"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.n_ctx is not None and self.max_length not in (None, self.n_ctx):
            raise ValueError(
                f"n_ctx is {self.n_ctx} and max_length is {self.max_length}; they mean the same, give one of them"
            )
        self._set("n_ctx", self.max_length if self.n_ctx is None else self.n_ctx)
        if self.device is not None and not isinstance(self.device, str):
            raise TypeError(f"device must be a name such as cpu, not {quoted(self.device)}")
        if self.n_gpu_layers is None:
            self._set("n_gpu_layers", 0 if self.device == "cpu" else -1)
        self._set("n_seq_max", self._sequences())

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Those of a command line. Raises TypeError also for arguments that do not exist, and without ``path``."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"llamapipe has no model argument {quoted(name)}; it has: {', '.join(known)}")
        if "path" not in given:
            raise TypeError(
                "llamapipe needs the file of a model: --model_args path=model.gguf (or path=demo)"
            )
        return cls(**given)

    def _sequences(self) -> int:
        size = self.batch_size
        if isinstance(size, str) and (size == "auto" or size.startswith("auto:")):
            size = self.max_batch_size
        elif size is not None:
            try:
                size = check_int("batch_size", int(size), 1, _INT32_MAX)
            except (TypeError, ValueError):
                raise ValueError(
                    f"batch_size is {quoted(size)}; it must be a whole number, or auto"
                ) from None
        if self.n_seq_max is not None:
            return self.n_seq_max
        # The harness passes 1 if the user chose no value.
        return _DEFAULT_SEQUENCES if size in (None, 1) else int(size)

    def _int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None:
            self._set(name, check_int(name, value, low, _INT32_MAX))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
