"""A model's LoRAs and control vectors, and the sets of them that contexts compute with.

An adapter belongs to its model. llama.cpp computes each step with one set of adapters and scales. An adapter can be
closed at any time: everything that may still compute with it holds a reference to its ``Weights``, which are freed with
the last reference. The ``Directions`` of a control vector are an array. A context has only one such array, so a set's
control vectors are added up.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamapipe._messages import quoted, readable
from llamapipe.arguments import FrozenDict, check_float, check_int, path_of
from llamapipe.errors import BackendError, EngineClosedError, InvalidRequestError, ModelLoadError
from llamapipe.gguf.adapter import AdapterInfo, ControlInfo, check_adapter, check_control_vector
from llamapipe.llama._loading import mapping_guard
from llamapipe.native.load import drain_log, last_error
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.native.owner import Owner

if TYPE_CHECKING:
    from llamapipe.llama.model import Model
else:
    Model = Any  # model.py imports this module; annotations still resolve

MOST_SCALE = 1000.0
_MOST_NAME = 256


class Weights(NotCopyable):
    """The native adapter. It is freed with its last reference or with its model."""

    def __init__(self, module: Any, handle: Any, info: AdapterInfo) -> None:
        self._lib = module.lib
        self._pid = os.getpid()
        self.handle = handle
        self.digest = info.digest
        self.invocation = info.invocation
        self.matrices = info.matrices

    def forget(self) -> None:
        """Forget the weights, because they are being freed with the model."""
        self.handle = None

    def __del__(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None and self._pid == os.getpid():
            self._lib.lp_adapter_free(handle)


class Directions(NotCopyable):
    """The array of a control vector: float32 (n_layer - 1, n_embd), from the model's second layer on."""

    invocation = ()

    def __init__(self, values: npt.NDArray[np.float32], layers: tuple[int, int], digest: bytes) -> None:
        self.values = values
        self.layers = layers
        self.digest = digest
        self.is_forgotten = False

    def forget(self) -> None:
        """Forget the directions, because the model is being closed."""
        self.is_forgotten = True


Part = Weights | Directions


class Named(Owner):
    """An adapter that a request can name: a LoRA or a control vector."""

    def __init__(self, model: Model, path: Path, size_bytes: int, name: str, part: Part) -> None:
        self.model = model
        self.name = name
        self.path = path
        self.size_bytes = size_bytes
        self.digest = part.digest
        self._part: Part | None = part

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._part is None

    def close(self) -> None:
        """Free the memory when no request uses it any more; a second call does nothing."""
        self.model.adapters.remove(self)
        self._part = None


def part_of(named: Named) -> Part:
    """Return an adapter's weights or directions. Raises InvalidRequestError if the adapter is closed."""
    part = named._part
    gone = part is None or (part.handle is None if isinstance(part, Weights) else part.is_forgotten)
    if part is None or gone:
        raise InvalidRequestError(f"the adapter {named.name!r} is closed; load it again")
    return part


class Adapter(Named):
    """A LoRA of a model; ``Model.load_adapter`` makes it.

    ``name``: the name that requests use. ``path``: its file. ``rank``: the largest rank of its pairs of matrices,
    ``n_pairs`` their number. ``alpha``: the products are scaled by ``alpha / rank``; 0: they are not scaled.
    ``size_bytes``: the file's size. ``invocation_tokens``: an activated LoRA applies from the last occurrence of these
    tokens in the prompt onward; empty for other LoRAs.

    Any thread. ``close`` removes the adapter's name from the model immediately; the memory is freed when the requests
    that use it have ended. The adapter is closed with its model.
    """

    def __init__(self, model: Model, info: AdapterInfo, name: str, weights: Weights) -> None:
        super().__init__(model, info.path, info.size_bytes, name, weights)
        self.rank = info.ranks[1]
        self.n_pairs = info.n_pairs
        self.alpha = info.alpha
        self.invocation_tokens = info.invocation

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Adapter {self.name!r} rank={self.rank} n_pairs={self.n_pairs}{state}>"


class ControlVector(Named):
    """A control vector of a model; ``Model.load_control_vector`` makes it.

    It adds a direction to the outputs of layers. ``name``: the name that requests use (``SamplingParams.adapter``).
    ``path``: its file. ``layers``: the first and the last layer with a direction, counted from 1. ``size_bytes``: the
    file's size.

    Any thread. ``close`` removes its name from the model immediately. It is closed with its model.
    """

    def __init__(self, model: Model, info: ControlInfo, name: str, directions: Directions) -> None:
        super().__init__(model, info.path, info.size_bytes, name, directions)
        self.layers = directions.layers

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<ControlVector {self.name!r} layers={self.layers[0]}-{self.layers[1]}{state}>"


AnyAdapter = Adapter | ControlVector


class AdapterKey(NamedTuple):
    """The identity of a set of adapters: the digests of their files, in order, and their scales."""

    entries: tuple[tuple[bytes, float], ...]

    @property
    def digest(self) -> bytes:
        """A 16-byte digest of the entries."""
        return blake2b(repr(self.entries).encode(), digest_size=16).digest()


class AdapterSet:
    """The adapters and scales that a request asks for. Sets with equal files and scales are equal. Immutable.

    ``invocation``: all of the set's adapters apply from these tokens onward, and only those in ``before`` apply
    earlier; empty: all always apply. ``widest``: see ``carries``; None: the set cannot be assigned to single rows.
    Hashes are the same in every process, because keys in cache files are computed from them.
    """

    __slots__ = ("_hash", "before", "entries", "invocation", "key", "widest")

    def __init__(self, entries: Sequence[tuple[Part, float]]) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: entry[0].digest))
        self.key = AdapterKey(tuple((part.digest, scale) for part, scale in self.entries))
        self._hash = int.from_bytes(self.key.digest[:8], "little")
        self.widest = _widest([part for part, _ in entries])
        self.invocation: tuple[int, ...] = next((p.invocation for p, _ in entries if p.invocation), ())
        others = [entry for entry in entries if not entry[0].invocation]
        self.before = AdapterSet(others) if self.invocation and others else None

    def __repr__(self) -> str:
        return "<AdapterSet " + " ".join(f"{d.hex()[:8]}:{scale:g}" for d, scale in self.key.entries) + ">"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterSet) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash


def carries(carrier: Hashable, adapters: Hashable) -> bool:
    """Return whether a step with this carrier can contain rows with these adapters.

    A carrier is the set that is loaded for a step; each row uses it, another set or no adapter. The carrier must have a
    ``widest`` LoRA: one that changes every matrix that its other LoRAs change. ``adapters`` must be None or have a
    ``widest`` LoRA that changes only matrices that the carrier's changes.
    """
    widest = carrier.widest if isinstance(carrier, AdapterSet) else None
    if widest is None or adapters is None or adapters is carrier:
        return widest is not None
    other = adapters.widest if isinstance(adapters, AdapterSet) else None
    return other is not None and (other.matrices is widest.matrices or other.matrices <= widest.matrices)


def _widest(parts: Sequence[Part]) -> Weights | None:
    """Return the LoRA that changes every matrix that the others change; None if no LoRA does."""
    loras = [part for part in parts if isinstance(part, Weights) and part.matrices]
    if len(loras) < len(parts):
        return None
    most = max(loras, key=lambda part: len(part.matrices))
    return most if all(part.matrices <= most.matrices for part in loras) else None


class SetArguments:
    """A set's arguments for a native call. They own the memory that the call reads, so keep them until it returns."""

    def __init__(self, module: Any, adapters: AdapterSet | None, carries: bool = False) -> None:
        ffi = module.ffi
        entries = () if adapters is None else ((adapters.widest, 1.0),) if carries else adapters.entries
        loras = [(part, scale) for part, scale in entries if isinstance(part, Weights)]
        vectors = [(part, scale) for part, scale in entries if isinstance(part, Directions)]
        handles = [weights.handle for weights, _ in loras]
        if any(handle is None for handle in handles):
            raise EngineClosedError("the model of an adapter is closed")
        self._handles = ffi.new("struct llama_adapter_lora *[]", handles)
        self._scales = ffi.new("float[]", [scale for _, scale in loras])
        fields = {"n": len(loras), "adapters": self._handles, "scales": self._scales, "carries": carries}
        if vectors:
            with np.errstate(over="ignore"):
                self._control = np.sum([part.values * np.float32(scale) for part, scale in vectors], axis=0)
            fields["control"] = ffi.from_buffer("float[]", self._control)
            fields["n_control"] = self._control.size
            fields["n_embd"] = self._control.shape[1]
            fields["first"] = min(part.layers[0] for part, _ in vectors)
            fields["last"] = max(part.layers[1] for part, _ in vectors)
        self.native = ffi.new("lp_adapter_set *", fields)


AdapterChoice = (
    str | AnyAdapter | Mapping[Any, float]
)  # of names and adapters: keys of a Mapping are invariant


class ModelAdapters:
    """The adapters that a model has loaded, by name. Any thread; the model's lock guards changes."""

    def __init__(self, model: Model) -> None:
        self._owner = weakref.ref(model)  # a cycle would delay the warning about a model that nobody closed
        self._by_name: dict[str, AnyAdapter] = {}
        self._parts: list[weakref.ref[Part]] = []  # closed adapters may still be in use

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def _model(self) -> Model:
        model = self._owner()
        assert model is not None  # the caller holds the model
        return model

    def loaded(self) -> list[AnyAdapter]:
        """Return the adapters that are not closed, in the order of loading."""
        return list(self._by_name.values())

    def load(self, module: Any, path: str | os.PathLike[str], name: str | None) -> Adapter:
        """Load a LoRA; see ``Model.load_adapter``."""
        model = self._model
        file, handle = self._check(path, name)
        with mapping_guard(module, file):
            info = check_adapter(file, model.architecture, model.tensors, model.n_vocab)
        name = self._free(info.name if name is None else name)
        drain_log(module)
        model.adopt(info, "the load of an adapter")
        try:
            loaded = module.lib.lp_adapter_load(handle, os.fsencode(file))
        finally:
            model.release(info)
        problems = drain_log(module)
        if loaded == module.ffi.NULL:
            reason = "; ".join(problems[-2:]) or last_error(module)
            raise ModelLoadError(f"{file} could not be loaded as an adapter ({reason})")
        weights = Weights(module, loaded, info)
        if change := info.stamp.change():
            raise ModelLoadError(f"{change} while it was loaded; load it again when it is complete")
        adapter = Adapter(model, info, name, weights)
        self._add(adapter)
        return adapter

    def load_control_vector(
        self, module: Any, path: str | os.PathLike[str], layers: tuple[int, int] | None, name: str | None
    ) -> ControlVector:
        """Load a control vector; see ``Model.load_control_vector``."""
        model = self._model
        window = (1, model.n_layer - 1) if layers is None else _check_layers(layers, model.n_layer)
        file, _ = self._check(path, name)
        with mapping_guard(module, file):
            info = check_control_vector(file, model.architecture, model.n_layer, model.n_embd)
        name = self._free(info.name if name is None else name)
        first, last = max(window[0], info.layers[0]), min(window[1], info.layers[1])
        values = info.directions.copy()
        values[: window[0] - 1] = 0
        values[window[1] :] = 0
        if not values.any():
            raise ModelLoadError(
                f"{file}: it has directions for layers {info.layers[0]} to {info.layers[1]}; for layers "
                f"{window[0]} to {window[1]} all are zero, so it would change nothing: choose other layers"
            )
        digest = blake2b(values.tobytes(), digest_size=16).digest()
        vector = ControlVector(model, info, name, Directions(values, (first, last), digest))
        self._add(vector)
        return vector

    def _check(self, path: str | os.PathLike[str], name: str | None) -> tuple[Path, Any]:
        """Return the checked path and the model's handle. Raises as a load does."""
        if name is not None:
            check_adapter_name(name)
        file = local_file(path)
        handle = self._model.handle
        if self._model.vocab_only:
            raise InvalidRequestError(
                f"{self._model.path} was loaded with vocab_only=True; an adapter needs its weights"
            )
        return file, handle

    def _free(self, name: str) -> str:
        """Return ``name`` if no adapter has it. Raises ValueError."""
        if check_adapter_name(name) in self._by_name:
            raise ValueError(
                f"the model already has an adapter {name!r}; give another name, or close that adapter"
            )
        return name

    def _add(self, adapter: AnyAdapter) -> None:
        part = part_of(adapter)
        if self._by_name.setdefault(adapter.name, adapter) is not adapter:
            self._free(adapter.name)
        self._parts = [known for known in self._parts if known() is not None]
        self._parts.append(weakref.ref(part))

    def remove(self, adapter: Named) -> None:
        """Remove an adapter, which frees its name."""
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]

    def close(self) -> None:
        """Forget the adapters, because they will be freed with the model."""
        self._by_name.clear()
        for known in self._parts:
            part = known()
            if part is not None:
                part.forget()

    def select(self, adapters: Iterable[AnyAdapter | str]) -> list[AnyAdapter]:
        """Return the adapters that ``Engine(adapters=…)`` holds or names. Raises TypeError, InvalidRequestError."""
        if isinstance(adapters, (str, Named)) or not isinstance(adapters, Iterable):
            raise TypeError(f"adapters must be a list of adapters or names, not {type(adapters).__name__}")
        result = []
        for adapter in adapters:
            if not isinstance(adapter, Named):
                check_adapter_name(adapter)
            result.append(self._find(adapter, ()))
            part_of(result[-1])  # raises if it is closed
        return result

    def choose(self, choice: AdapterChoice | None, allowed: Sequence[AnyAdapter] = ()) -> AdapterSet | None:
        """Return the set that ``SamplingParams.adapter`` means. Raises InvalidRequestError.

        ``allowed``: the adapters that may be named; empty: all that are loaded.
        """
        if choice is None:
            return None
        scales = choice.items() if isinstance(choice, Mapping) else [(choice, 1.0)]
        # A scale of 0 changes nothing, but its adapter must be there, too.
        chosen = [(part_of(self._find(name, allowed)), float_of(scale)) for name, scale in scales]
        if len({id(part) for part, _ in chosen}) < len(chosen):
            raise InvalidRequestError("adapter names one adapter twice")
        entries = [(part, scale) for part, scale in chosen if scale != 0]
        if sum(bool(part.invocation) for part, _ in entries) > 1:
            raise InvalidRequestError(
                "adapter names several activated LoRAs, and only one can apply at a time; name one of them"
            )
        return AdapterSet(entries) if entries else None

    def _find(self, choice: str | AnyAdapter, allowed: Sequence[AnyAdapter]) -> AnyAdapter:
        known = list(allowed) or self.loaded()
        if isinstance(choice, Named):
            if choice.model is not self._model:
                raise InvalidRequestError(f"the adapter {choice.name!r} was loaded for another model object")
            if allowed and choice not in known:
                raise InvalidRequestError(f"the adapter {choice.name!r} is not one of Engine(adapters=…)")
            return choice
        for adapter in known:
            if adapter.name == choice:
                return adapter
        names = ", ".join(repr(adapter.name) for adapter in known) or "none"
        raise InvalidRequestError(f"there is no adapter {choice!r}; loaded are: {names}")


def float_of(scale: float) -> float:
    """Return a scale rounded to the C API's precision, so that equal scales compare equal."""
    import struct

    return float(struct.unpack("<f", struct.pack("<f", scale))[0])


def local_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file; one named ``hf:…`` is downloaded from the hub.

    Raises ModelLoadError for an address that is no file's path, and as ``hub.model_file`` does.
    """
    from llamapipe.hub import PREFIX, hub_name, model_file, parse

    if isinstance(path, str) and path.startswith(PREFIX):
        return model_file(*parse(path))
    file = path_of(path)
    if isinstance(path, str) and ("://" in path or hub_name(path) is not None):
        with suppress(OSError):  # too long for a path
            if file.exists():
                return file
        name = hub_name(path)
        fix = "download the file and give its path" if name is None else f"write {name}"
        raise ModelLoadError(f"{path} is an address, not a file; {fix}")
    return file


def check_adapter_name(name: object) -> str:
    """Return the name of an adapter if it is valid. Raises TypeError, ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an adapter must be a str, not {type(name).__name__}")
    if not 0 < len(name) <= _MOST_NAME:
        raise ValueError(f"the name of an adapter has {len(name)} characters; it must have 1 to {_MOST_NAME}")
    if readable(name) != name:
        raise ValueError(f"the name of an adapter is {quoted(name)}; it must have no control characters")
    return name


def check_choice_of_adapter(value: object) -> AdapterChoice:
    """Return a checked ``SamplingParams.adapter``. Raises TypeError, ValueError."""
    if isinstance(value, (Adapter, ControlVector)):
        return value
    if isinstance(value, str):
        return check_adapter_name(value)
    if isinstance(value, Mapping):
        scales: dict[str | AnyAdapter, float] = {}
        for name, scale in value.items():
            if not isinstance(name, (Adapter, ControlVector)):
                check_adapter_name(name)
            scales[name] = check_float(f"the scale of {name!r}", scale, -MOST_SCALE, MOST_SCALE)
        if not scales:
            raise ValueError("adapter is an empty mapping; give a name, or None for the model alone")
        return FrozenDict(scales)
    raise TypeError(
        f"adapter must be a name, an Adapter, a ControlVector or a mapping to scales, not {type(value).__name__}"
    )


def _check_layers(layers: object, n_layer: int) -> tuple[int, int]:
    """Return a checked ``layers`` of ``Model.load_control_vector``. Raises TypeError, ValueError."""
    if not isinstance(layers, (tuple, list)) or len(layers) != 2:
        raise TypeError(f"layers must be the first and the last layer, not {layers!r}")
    first = check_int("the first of layers", layers[0], 1, n_layer - 1)
    return first, check_int("the last of layers", layers[1], first, n_layer - 1)


def set_adapters(
    module: Any, entry: Any, owner: Any, adapters: AdapterSet | None, carries: bool = False
) -> None:
    """Call a native function that sets the adapters of ``owner``. Raises BackendError.

    ``carries``: the set is a carrier, and ``assign_adapters`` chooses the adapters of each sequence's rows.
    """
    arguments = SetArguments(module, adapters, carries)
    if entry(owner, arguments.native) < 0:
        raise BackendError(f"the adapters could not be changed: {last_error(module)}")


def assign_adapters(module: Any, entry: Any, owner: Any, seq_id: int, adapters: AdapterSet | None) -> None:
    """Call a native function that sets the adapters of a sequence's rows. Raises BackendError."""
    arguments = SetArguments(module, adapters)
    if entry(owner, seq_id, arguments.native) < 0:
        raise BackendError(f"the adapters of a sequence could not be changed: {last_error(module)}")
