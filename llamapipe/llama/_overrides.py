"""Changes that a caller makes to a model while it loads: metadata values and the placement of tensors.

Both are applied before anything is checked or loaded. The checks in ``gguf`` see the changed file. llama.cpp gets exact
tensor names, so patterns mean what ``re`` says.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from llamapipe._messages import nearest, quoted
from llamapipe.arguments import int_of
from llamapipe.errors import BackendError
from llamapipe.llama.devices import Device, device_handles

if TYPE_CHECKING:
    from llamapipe.gguf.check import GgufInfo

Value = bool | int | float | str
# llama.cpp's limit for keys and texts, without the final NUL.
_MOST_BYTES: Final = 127
_INSTEAD: Final = {
    "general.architecture": "it decides what the tensors mean",
    "general.alignment": "it says where the tensors lie",
    "tokenizer.chat_template": "give chat_template",
}
_EXPERTS: Final = re.compile(r"blk\.(\d+)\.ffn_(up|down|gate|gate_up)_(ch)?exps\b")
_LAYER: Final = re.compile(r"(blk\.)(\d+)(\..*)")


# ---- metadata
def check_kv(overrides: Mapping[str, Value] | None) -> dict[str, Value]:
    """Return ``kv_overrides`` in a form that llama.cpp can take. Raises TypeError, ValueError."""
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise TypeError(f"kv_overrides must be a mapping of keys to values, not {type(overrides).__name__}")
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise TypeError(f"kv_overrides must have keys of type str, not {type(key).__name__}")
        _check_bytes("a key of kv_overrides", key)
        name = f"kv_overrides[{quoted(key)}]"
        why = "it says how files belong together" if key.startswith("split.") else _INSTEAD.get(key)
        if why is not None or not key:
            raise ValueError(f"{name} cannot be changed: {why or 'it has no name'}")
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"{name} must be a bool, int, float or str, not {type(value).__name__}")
        if isinstance(value, str):
            _check_bytes(name, value)
        elif not (math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**63):
            kind = "finite" if isinstance(value, float) else "from -2**63 to 2**63 - 1"
            raise ValueError(f"{name} is {quoted(value)}; it must be {kind}")
    return dict(overrides)


def _check_bytes(name: str, text: str) -> None:
    try:
        n = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} has a lone surrogate, which UTF-8 cannot express") from None
    if n > _MOST_BYTES or "\0" in text:
        raise ValueError(f"{name} has {n} bytes; it must have at most {_MOST_BYTES}, and none that is 0")


def native_kv(ffi: Any, lib: Any, overrides: Mapping[str, Value]) -> Any:
    """Return llama.cpp's array of overrides. Keep a reference to it while llama.cpp uses it."""
    slots = ffi.new("struct llama_model_kv_override[]", len(overrides) + 1)
    for slot, (key, value) in zip(slots, overrides.items(), strict=False):
        slot.key = key.encode()
        if isinstance(value, bool):
            slot.tag, slot.val_bool = lib.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            slot.tag, slot.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            slot.tag, slot.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            slot.tag, slot.val_str = lib.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
    return slots


def kv_text(value: Value) -> str:
    """Return a value in the notation that llama.cpp uses for metadata."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- tensors
def place_tensors(
    info: GgufInfo,
    placement: Mapping[str, str | Device] | None,
    n_cpu_moe: int | None,
    wanted: Sequence[str | Device] | None,
) -> dict[str, Device]:
    """Return the devices, by tensor name, of the tensors that the options move from llama.cpp's choice.

    ``wanted``: the option ``devices``, checked. Raises TypeError, ValueError, BackendError.
    """
    if placement is None and n_cpu_moe is None:
        return {}
    names = [tensor.name for tensor in info.tensors]
    device_of: dict[str, Device] = {}
    if placement is not None and not isinstance(placement, Mapping):
        raise TypeError(
            f"tensor_placement must be a mapping of patterns to devices, not {type(placement).__name__}"
        )
    known = _devices_by_name(wanted)
    for pattern, device in (placement or {}).items():
        if not isinstance(pattern, str):
            raise TypeError(f"tensor_placement must have patterns of type str, not {type(pattern).__name__}")
        name = device.name if isinstance(device, Device) else device
        if not isinstance(name, str):
            raise TypeError(f"tensor_placement must hold names or Device objects, not {type(name).__name__}")
        if name not in known:
            raise BackendError(
                f"tensor_placement names the device {quoted(name)}; the model may use: {', '.join(known)}"
            )
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"tensor_placement has the pattern {quoted(pattern)}, which is not a regular expression: {error}"
            ) from None
        matched = [name for name in names if compiled.search(name)]
        if not matched:
            near = nearest(pattern, names)
            raise ValueError(
                f"tensor_placement has the pattern {quoted(pattern)}, which is in the name of no tensor of the file"
                + (f"; one is {near}" if near else "")
            )
        for tensor in matched:
            device_of.setdefault(tensor, known[name])
    if n_cpu_moe is not None:
        n = int_of("n_cpu_moe", n_cpu_moe)
        experts = [(name, int(match[1])) for name in names if (match := _EXPERTS.match(name))]
        if n and not experts:
            raise ValueError(f"n_cpu_moe is given, and {info.path.name} has no experts; leave it out")
        cpu = next(device for device in known.values() if device.type == "cpu")
        for name, layer in experts:
            if layer < n:
                device_of.setdefault(name, cpu)
    return device_of


def n_cpu_expert_layers(info: GgufInfo, placed: Mapping[str, Device]) -> int:
    """Return how many layers have all of their experts on the CPU because ``placed`` says so."""
    layers: dict[str, list[str]] = {}
    for tensor in info.tensors:
        if match := _EXPERTS.match(tensor.name):
            layers.setdefault(match[1], []).append(tensor.name)
    on_cpu = {name for name, device in placed.items() if device.type == "cpu"}
    return sum(on_cpu.issuperset(names) for names in layers.values())


def _devices_by_name(wanted: Sequence[str | Device] | None) -> dict[str, Device]:
    """Return, by name, the devices that llama.cpp opens for the model: CPUs, and those in ``wanted`` (None: all)."""
    names = None if wanted is None else {item.name if isinstance(item, Device) else item for item in wanted}
    return {
        device.name: device
        for device, _ in device_handles()
        if device.type == "cpu" or names is None or device.name in names
    }


def native_placement(ffi: Any, lib: Any, placed: Mapping[str, Device]) -> tuple[Any, list[Any]]:
    """Return llama.cpp's array of patterns, and the strings that must live as long as the array.

    llama.cpp compiles every pattern for every tensor, so one pattern covers the same tensor in many layers.
    """
    handles = {device.name: handle for device, handle in device_handles()}
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, device in placed.items():
        match = _LAYER.fullmatch(name)
        start, layer, end = (match[1], match[2], match[3]) if match else (name, "", "")
        groups[device.name, start, end].append(layer)
    slots = ffi.new("struct llama_model_tensor_buft_override[]", len(groups) + 1)
    texts = []
    for slot, ((device_name, start, end), layers) in zip(slots, groups.items(), strict=False):
        pattern = f"^{_escape(start)}({'|'.join(layers)}){_escape(end)}$"
        texts.append(ffi.new("char[]", pattern.encode()))
        slot.pattern = texts[-1]
        slot.buft = lib.ggml_backend_dev_buffer_type(handles[device_name])
    return slots, texts


def _escape(text: str) -> str:
    """Return a text escaped for an ECMAScript pattern."""
    return re.sub(r"[^\w]", lambda match: "\\" + match[0] if match[0].isascii() else match[0], text)


def log_placement(info: GgufInfo, placed: Mapping[str, Device]) -> None:
    """Log how many tensors were placed on each device."""
    n = Counter(device.name for device in placed.values())
    for device, n_tensors in n.items():
        logging.getLogger("llamapipe").info("%s: %d tensors on %s", info.path.name, n_tensors, device)
