"""Models as Ollama's API names them: their options, Modelfiles and how long they are kept."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from llamapipe._messages import quoted
from llamapipe.llama.adapter import Adapter, ControlVector
from llamapipe.ollama_models import StoredModel, names_of
from llamapipe.params import SamplingParams
from llamapipe.server._fields import Lenient, Only, Unused
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.sampling import FROM_TABLE, Formats, Sampling, Tokenize
from llamapipe.server.requests.text_options import token_limit
from llamapipe.server.state import ServerState

_LATEST = ":latest"


_log = logging.getLogger("llamapipe.server")


_DURATION = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)


_MOST_KEPT_S = 1e8


KeepAlive = int | float | str


if TYPE_CHECKING:

    class _Table(Formats, kw_only=True):
        """The options of the table."""

else:
    _Table = msgspec.defstruct(
        "_Table", FROM_TABLE, bases=(Formats,), module=__name__, kw_only=True, forbid_unknown_fields=True
    )


class Options(_Table, Lenient, kw_only=True):
    """The field ``options``: all options of the table, and Ollama's options.

    As in Ollama, numbers may have any type that can hold one, and are clamped to their range.
    """

    n: Annotated[int | None, Only(1, instead="an answer of this API is one")] = None
    num_predict: int | None = None
    # Options for loading a model in Ollama; some clients write these numbers with a decimal point.
    num_ctx: Annotated[float | None, Unused()] = None
    num_batch: Annotated[float | None, Unused()] = None
    num_gpu: Annotated[float | None, Unused()] = None
    main_gpu: Annotated[float | None, Unused()] = None
    num_thread: Annotated[float | None, Unused()] = None
    num_keep: Annotated[float | None, Unused()] = None
    use_mmap: Annotated[bool | None, Unused()] = None
    use_mlock: Annotated[bool | None, Unused()] = None
    draft_num_predict: Annotated[float | None, Unused()] = None
    # Options that Ollama's clients still send, although its server no longer has them.
    embedding_only: Annotated[bool | None, Unused(False)] = None
    f16_kv: Annotated[bool | None, Unused()] = None
    logits_all: Annotated[bool | None, Unused(False)] = None
    low_vram: Annotated[bool | None, Unused(False)] = None
    num_gqa: Annotated[float | None, Unused()] = None
    numa: Annotated[bool | None, Unused(False)] = None
    penalize_newline: Annotated[bool | None, Unused()] = None
    rope_frequency_base: Annotated[float | None, Unused()] = None
    rope_frequency_scale: Annotated[float | None, Unused()] = None
    tfs_z: Annotated[float | None, Unused(1.0, 1)] = None
    vocab_only: Annotated[bool | None, Unused(False)] = None
    # A field of Open WebUI, which Ollama does not read either: Ollama's field is `think`.
    reasoning_effort: Annotated[str | None, Unused()] = None

    def sampling(self, state: ServerState, **more: Any) -> SamplingParams:
        """Return the options as ``SamplingParams``, with Ollama's defaults. Raises ApiError 400."""
        tokenize = partial(state.engine.model.vocab.tokenize, add_special=False)
        return self.params_with(state.settings.sampling or {}, tokenize, **more)

    def params_with(self, defaults: Mapping[str, Any], tokenize: Tokenize, **more: Any) -> SamplingParams:
        """Return the options as ``SamplingParams``, like ``sampling``.

        ``defaults``: the operator's options. ``tokenize``: tokenizes the keys of ``logit_bias``.
        """
        values = {
            name: defaults.get(name, value)
            for name, value in _DEFAULTS.items()
            if getattr(self, name) is None
        }
        for name in ("temperature", "top_k"):
            if (number := getattr(self, name)) is not None:
                values[name] = max(number, 0)
        for name in ("top_p", "min_p"):
            if (share := getattr(self, name)) is not None:
                values[name] = min(max(share, 0.0), 1.0)
        asked = None if self.num_predict is None else max(self.num_predict, -1)
        limit = token_limit(**{"options.num_predict": asked})
        values["max_tokens"] = None if limit is None else max(limit, 1)
        sampling = Sampling(**{name: getattr(self, name) for name in _Table.__struct_fields__})
        if sampling.stop is not None:
            sampling.stop = [
                text
                for text in ([sampling.stop] if isinstance(sampling.stop, str) else sampling.stop)
                if text
            ]
        return sampling.params_with(defaults, tokenize, **values, **more)

    @classmethod
    def accept_fields(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the options with numbers and texts converted to their types. Unknown options have no effect."""
        kinds = {field.name: field.type for field in msgspec.structs.fields(cls)}
        unread = _unread(fields, kinds)
        return {
            name: _as(kinds.get(name, Any), value) for name, value in fields.items() if name not in unread
        }, unread


def _as(kind: Any, value: Any) -> Any:
    """Return a value converted to a type if possible, else unchanged."""
    whole = int(value) if isinstance(value, float) and math.isfinite(value) else value
    for candidate in (value, whole):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(candidate, kind, strict=False)
    return value


_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}


class Modelfile(NamedTuple):
    """The settings that Ollama's store has for a name, in addition to the model's file."""

    options: Options
    system: str
    license: str
    parameters: str
    digest: str


NO_MODELFILE = Modelfile(Options(), "", "", "", "")


_MODELFILES: WeakKeyDictionary[ServerState, Mapping[str, Modelfile]] = WeakKeyDictionary()


def read_modelfiles(state: ServerState) -> None:
    """Read the Modelfiles that Ollama's store has for a server's model. Call it before the server starts."""
    if state.has_engine:
        _MODELFILES[state] = modelfiles(state.engine.model.path)


def modelfiles(path: Path) -> dict[str, Modelfile]:
    """Return the Modelfiles of a model's file, by name; none for a file that is not in Ollama's store."""
    return {stored.name: _modelfile(stored) for stored in names_of(path)}


def _modelfile(stored: StoredModel) -> Modelfile:
    stored_parameters = stored.parameters
    known = {name: value for name, value in stored_parameters.items() if name in Options.__struct_fields__}
    try:
        options = msgspec.convert(known, Options)
        options.params_with({}, lambda _: [])
    except (msgspec.ValidationError, ApiError) as e:
        _log.warning("the parameters of %s in Ollama's store are not used: %s", stored.name, e)
        options = Options()
    values = [
        (name, value)
        for name, several in stored_parameters.items()
        for value in (several if isinstance(several, list) else [several])
    ]
    parameters = "\n".join(f"{name} {json.dumps(value)}" for name, value in values)
    return Modelfile(options, stored.text("system"), stored.text("license"), parameters, stored.digest)


def modelfile_of(files: Mapping[str, Modelfile], *names: str) -> Modelfile:
    """Return the Modelfile of the first of these names that has one, else an empty Modelfile."""
    for wanted in names:
        for known, modelfile in files.items():
            if is_named(wanted, known):
                return modelfile
    return NO_MODELFILE


def modelfile_for(state: ServerState, name: str) -> Modelfile:
    """Return the Modelfile of a name; if it has none, that of the name with which the model was loaded."""
    return modelfile_of(_MODELFILES.get(state, {}), name, state.engine.model.name)


class OllamaRequest(Lenient, kw_only=True):
    """The base of requests that accept what Ollama accepts: Ollama ignores unknown fields."""

    @classmethod
    def accept_fields(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of this route. Unknown fields have no effect, but fields of other routes are refused."""
        unread = _unread(fields, (*cls.__struct_fields__, *_OF_ROUTES))
        return {name: value for name, value in fields.items() if name not in unread}, unread


_LIKE_A_NAME = 0.8  # difflib's ratio


def _unread(names_there: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the unknown names that resemble no known name. Others are probably misspelt, and are refused."""
    names = list(known)
    return [
        name
        for name in names_there
        if name not in names
        and not (len(name) <= _MOST_OF_NAME and get_close_matches(name, names, 1, _LIKE_A_NAME))
    ]


_MOST_OF_NAME = 64  # characters; to compare longer names takes too long


# Fields on which the answer of a route depends, if the route has them.
_OF_ROUTES = ("context", "images", "input", "messages", "prompt", "raw", "suffix", "system", "template")


def check_duration(keep_alive: KeepAlive | None) -> None:
    """Raise ApiError 400 for a text that is no duration."""
    if isinstance(keep_alive, str) and keep_alive and not _DURATION.fullmatch(keep_alive):
        raise ApiError(
            400,
            f'keep_alive is {quoted(keep_alive)}; give seconds, or a duration such as "5m" or "1h30m"',
            "keep_alive",
        )


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)


def kept_s(keep_alive: object) -> float | None:
    """Return the seconds of ``keep_alive``; None: forever. Raises ApiError 400."""
    if isinstance(keep_alive, bool) or not isinstance(keep_alive, int | float | str):
        raise ApiError(400, "keep_alive must be seconds or a duration", "keep_alive")
    if isinstance(keep_alive, str):
        check_duration(keep_alive)
        seconds = sum(float(n) * _UNITS_S[unit] for n, unit in _PART.findall(keep_alive))
        seconds = -seconds if keep_alive.startswith("-") else seconds
    else:
        seconds = float(min(max(keep_alive, -1), _MOST_KEPT_S))  # integers may be too large for a float
    return seconds if 0 <= seconds < _MOST_KEPT_S else None


def is_named(name: str, *known: str) -> bool:
    """Return whether a name is one of the known names, with or without ``:latest``."""
    return name.removesuffix(_LATEST) in [other.removesuffix(_LATEST) for other in known]


def full_name(name: str) -> str:
    """Return a name with its tag, ``:latest`` by default, as in Ollama's lists."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def check_chat_model(state: ServerState, name: str) -> None:
    """Raise ApiError 404 for a model that is not served, 400 for one that does not generate."""
    if is_named(name, *state.chat_names, *state.adapter_names):
        return
    if state.embedder is not None and is_named(name, *state.embedding_names):
        raise ApiError(
            400, f"the model {quoted(name)} embeds texts; it does not generate any", "model", "model_kind"
        )
    state.check_model(name)


def adapter_of(state: ServerState, name: str) -> Adapter | ControlVector | None:
    """Return the adapter with this name; None if it is the name of a model."""
    if is_named(name, *state.chat_names):
        return None
    return next((adapter for adapter in state.adapters if is_named(name, adapter.name)), None)
