"""The devices of the loaded backends, as llama.cpp lists them.

``Device`` is plain data; native handles stay valid for the life of the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamapipe.native.load import native

_TYPES = {
    "GGML_BACKEND_DEVICE_TYPE_CPU": "cpu",
    "GGML_BACKEND_DEVICE_TYPE_GPU": "gpu",
    "GGML_BACKEND_DEVICE_TYPE_IGPU": "igpu",
    "GGML_BACKEND_DEVICE_TYPE_ACCEL": "accel",
}

_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "software rasterizer")


@dataclass(frozen=True)
class Device:
    """A device that llama.cpp can compute on, as its backend describes it.

    ``type`` is ``"cpu"``, ``"gpu"``, ``"igpu"``, ``"accel"`` or ``"other"``. ``memory_total`` and ``memory_free`` are
    bytes; the latter was read when the device was listed. ``async_compute``: launches return before the work is done.
    ``events``: work can be ordered with events. ``host_buffer``: the device offers pinned host memory. Plain data; any
    thread. Source: ``ggml_backend_dev_get_props``.
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


def device_handles() -> list[tuple[Device, Any]]:
    """Every device of this machine with its native handle, which is valid for the life of the process."""
    lib = native().lib
    handles = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
    return [(describe(handle), handle) for handle in handles]


def describe(handle: Any) -> Device:
    """What the backend says about a device. For one of another machine: while a connection is open."""
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
    """The devices of this machine that llamapipe can use, in llama.cpp's order (GPUs before CPUs). Any thread.

    Raises BackendError when the native libraries cannot be loaded.
    """
    return [device for device, _ in device_handles()]
