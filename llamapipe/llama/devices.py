"""Lists the devices of the loaded backends, and selects those that a model is placed on.

``Device`` is plain data; native handles stay valid for the life of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llamapipe.arguments import check_float
from llamapipe.errors import BackendError
from llamapipe.native.load import native

_TYPES = {
    "GGML_BACKEND_DEVICE_TYPE_CPU": "cpu",
    "GGML_BACKEND_DEVICE_TYPE_GPU": "gpu",
    "GGML_BACKEND_DEVICE_TYPE_IGPU": "igpu",
    "GGML_BACKEND_DEVICE_TYPE_ACCEL": "accel",
}

_UNIFIED = ("MTL", "Metal")  # GPU backends that use system memory although their type is not igpu
_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "software rasterizer")


@dataclass(frozen=True)
class Device:
    """A device that llama.cpp can compute on, as its backend describes it.

    ``type`` is ``"cpu"``, ``"gpu"``, ``"igpu"``, ``"accel"`` or ``"other"``. ``memory_total`` and ``memory_free`` are
    bytes; ``memory_free`` was read when the device was listed. ``async_compute``: launches return before the work is
    done. ``events``: work can be ordered with events. ``host_buffer``: the device offers pinned host memory. Plain
    data; any thread. Source: ``ggml_backend_dev_get_props``.
    """

    name: str
    description: str
    backend: str
    type: str
    memory_total: int
    memory_free: int
    async_compute: bool
    events: bool
    host_buffer: bool

    @property
    def is_software(self) -> bool:
        """True for a GPU driver that computes on the CPU (llvmpipe, SwiftShader): useful for tests, slow."""
        return self.type != "cpu" and any(name in self.description.lower() for name in _SOFTWARE)

    @property
    def has_own_memory(self) -> bool:
        """True for a GPU whose memory is not the system's, and whose backend says how much it has."""
        shares = self.is_software or self.backend in _UNIFIED
        return self.type == "gpu" and not shares and self.memory_total > 0


def device_handles() -> list[tuple[Device, Any]]:
    """Return every device of this machine with its native handle, which is valid for the life of the process."""
    lib = native().lib
    handles = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
    return [(describe(handle), handle) for handle in handles]


def describe(handle: Any) -> Device:
    """Return the backend's description of a device. A remote device needs an open connection."""
    module = native()
    ffi, lib = module.ffi, module.lib
    props = ffi.new("struct ggml_backend_dev_props *")
    lib.ggml_backend_dev_get_props(handle, props)
    kind = ffi.typeof("enum ggml_backend_dev_type").elements.get(props.type, "")
    return Device(
        name=ffi.string(props.name).decode(),
        description=ffi.string(props.description).decode("utf-8", "replace").strip(),
        backend=ffi.string(lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(handle))).decode(),
        type=_TYPES.get(kind, "other"),
        memory_total=props.memory_total,
        memory_free=props.memory_free,
        async_compute=bool(props.caps.__getattribute__("async")),
        events=bool(props.caps.events),
        host_buffer=bool(props.caps.host_buffer),
    )


def devices() -> list[Device]:
    """Return the devices of this machine that llamapipe can use, in llama.cpp's order (GPUs before CPUs). Any thread.

    Raises BackendError when the native libraries cannot be loaded.
    """
    return [device for device, _ in device_handles()]


# ---- devices for a model; ``far``: native devices of workers
def check_rpc(split_mode: str, n_gpu_layers: int, vocab_only: bool) -> None:
    """Raise ValueError for options that leave workers nothing to compute or that ggml-rpc does not support."""
    if split_mode in ("row", "tensor"):
        raise ValueError(
            f'split_mode is {split_mode!r}, which splits each tensor; RPC workers get whole layers: use "layer", '
            'or "none" for one worker'
        )
    if n_gpu_layers == 0 or vocab_only:
        what = "vocab_only is True" if vocab_only else "n_gpu_layers is 0"
        raise ValueError(
            f"{what}, so that RPC workers would get nothing to compute; leave out rpc, or change it"
        )


def device_list(ffi: Any, wanted: Sequence[str | Device] | None, far: Sequence[Any]) -> Any:
    """Return llama.cpp's array of devices, with workers' devices first; NULL for all devices of this machine.

    Raises TypeError, and BackendError for an unknown device.
    """
    if wanted is None:
        if not far:
            return ffi.NULL
        handles = [handle for device, handle in device_handles() if device.type in ("gpu", "igpu")]
        return ffi.new("ggml_backend_dev_t[]", [*far, *handles, ffi.NULL])
    if isinstance(wanted, (str, Device)) or not isinstance(wanted, Sequence):
        raise TypeError(
            f"devices must be a sequence of names or Device objects, not a single {type(wanted).__name__}"
        )
    known = {device.name: handle for device, handle in device_handles()}
    handles = []
    for item in wanted:
        name = item.name if isinstance(item, Device) else item
        if not isinstance(name, str):
            raise TypeError(f"devices must hold names or Device objects, not {type(name).__name__}")
        if name not in known:
            raise BackendError(
                f"there is no device {name!r}; this build and machine have: {', '.join(known)}"
            )
        handles.append(known[name])
    return ffi.new("ggml_backend_dev_t[]", [*far, *handles, ffi.NULL])


def used_devices(
    wanted: Sequence[str | Device] | None, n_gpu_layers: int, far: Sequence[Any]
) -> list[Device]:
    """Return the devices that get layers: the workers' and the requested devices, else all GPUs, else the CPU."""
    known = [device for device, _ in device_handles()]
    if wanted is not None:
        names = {item.name if isinstance(item, Device) else item for item in wanted}
        known = [device for device in known if device.name in names]
    used = [device for device in known if device.type in ("gpu", "igpu")] if n_gpu_layers != 0 else []
    if far:
        used = [*map(describe, far), *(used if wanted is None else known)]
    return used or [device for device, _ in device_handles() if device.type == "cpu"]


def shares_of_devices(ffi: Any, lib: Any, shares: Sequence[float] | None) -> Any:
    """Return ``tensor_split`` as llama.cpp reads it; NULL for None. Raises TypeError and ValueError."""
    if shares is None:
        return ffi.NULL
    if isinstance(shares, (str, bytes)) or not isinstance(shares, Iterable):
        raise TypeError(f"tensor_split must be a sequence of numbers, not {type(shares).__name__}")
    limit = lib.llama_max_devices()
    values = [check_float("tensor_split", share, 0, 1e30) for share in shares]
    if len(values) > limit:
        raise ValueError(f"tensor_split has {len(values)} numbers; it must have at most {limit}")
    return ffi.new("float[]", values + [0.0] * (limit - len(values)))
