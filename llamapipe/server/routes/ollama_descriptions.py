"""Ollama's API for the served models: which there are, which are loaded, what each can do.

Open it to change how a model is described to Ollama's clients, which fill the context and offer images, tools and
thinking by what they read here.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from typing import Annotated, Any

from starlette.responses import Response

import llamapipe
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model
from llamapipe.server._fields import Only, Unused
from llamapipe.server.dialects.ollama import date_of
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.ollama_models import (
    NO_MODELFILE,
    Modelfile,
    OllamaRequest,
    check_chat_model,
    full_name,
    is_named,
    modelfile_for,
)
from llamapipe.server.state import ServerState

# The version of Ollama's API that this server offers. Clients ask for it before they use newer fields.
_API_VERSION = "0.13.0"
_YEARS_LOADED = 100  # until a model that stays loaded "expires" in ``/api/ps``


class ShowRequest(OllamaRequest, kw_only=True):
    """``POST /api/show``. ``name``: the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool | None, Unused(False)] = None
    system: Annotated[str | None, Only("")] = None
    template: Annotated[str | None, Only("")] = None
    options: Annotated[dict[str, Any] | None, Only({})] = None


async def version(exchange: Exchange) -> Response:
    """``GET /api/version``: the version of the API; the field ``llamapipe`` has the server's version."""
    return JsonResponse({"version": _API_VERSION, "llamapipe": llamapipe.__version__})


async def tags(exchange: Exchange) -> Response:
    """``GET /api/tags``: the served models, under all of their names."""
    state = exchange.server
    return JsonResponse({"models": await state.in_thread(_listed, state)})


async def loaded_models(exchange: Exchange) -> Response:
    """``GET /api/ps``: the served models, each with its first name: they stay loaded, and use their memory once."""
    state = exchange.server
    created = datetime.fromtimestamp(state.created, timezone.utc)
    expires_at = date_of(created.replace(year=created.year + _YEARS_LOADED))
    aliases = {full_name(name) for name in (*state.chat_names[1:], *state.embedding_names[1:])}
    entries = []
    for entry in await state.in_thread(_listed, state):
        if entry["name"] in aliases:
            continue
        embedder = state.embedder
        is_chat = any(full_name(name) == entry["name"] for name in (*state.chat_names, *state.adapter_names))
        owner = state.engine if is_chat or embedder is None else embedder
        model, n_ctx = owner.model, owner.n_ctx
        on_gpu = any(device.type in ("gpu", "igpu") for device in model.devices)
        kept = {key: entry[key] for key in ("name", "model", "size", "digest", "details")}
        size_vram = entry["size"] if on_gpu else 0
        entries.append({**kept, "expires_at": expires_at, "size_vram": size_vram, "context_length": n_ctx})
    return JsonResponse({"models": entries})


def _listed(state: ServerState) -> list[dict[str, Any]]:
    entries = [
        _entry(name, state.engine, "completion", modelfile_for(state, name).digest)
        for name in state.chat_names
    ]
    for adapter in state.adapters:
        if adapter.name in state.adapter_names:
            entry = _entry(adapter.name, state.engine, "completion", adapter.digest.hex() * 2)
            details = {**entry["details"], "parent_model": full_name(state.model_names[0])}
            entries.append({**entry, "size": adapter.size_bytes, "details": details})
    if state.embedder is not None:
        entries += [_entry(name, state.embedder, "embedding") for name in state.embedding_names]
    return list({entry["name"]: entry for entry in reversed(entries)}.values())[::-1]


def _entry(name: str, owner: Engine | Embedder, kind: str, digest: str = "") -> dict[str, Any]:
    model = owner.model
    return {
        "name": full_name(name),
        "model": full_name(name),
        "modified_at": _modified(model),
        "size": model.size_bytes,
        "digest": digest or _digest(model),
        "details": {**_details(model), "context_length": owner.n_ctx},
        "capabilities": _capabilities(model, kind),
    }


def _modified(model: Model) -> str:
    try:
        seconds = model.path.stat().st_mtime_ns / 1e9
    except OSError:  # the file was deleted after the start
        seconds = 0.0
    return date_of(datetime.fromtimestamp(seconds, timezone.utc))


def _digest(model: Model) -> str:
    """Return a digest of data that identifies the file, because to hash gigabytes would take long."""
    try:
        return hashlib.sha256(model.fingerprint).hexdigest()
    except OSError:
        return ""


def _details(model: Model) -> dict[str, Any]:
    family = model.metadata.get("general.architecture", "")
    kind = model.metadata.get("general.file_type", "")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": parameter_size(model.n_params),
        "quantization_level": QUANTIZATIONS.get(kind, "unknown"),
        "context_length": model.n_ctx_train,
        "embedding_length": model.n_embd,
    }


def _capabilities(model: Model, kind: str) -> list[str]:
    """Return the capabilities that the model has on this server. Clients offer only these."""
    names = [kind]
    if kind == "embedding":
        return names
    if model.vocab.fim_tokens is not None:
        names.append("insert")
    if model.chat_template is None:
        return names
    names += ["vision"] * model.supports_images + ["audio"] * model.supports_audio
    try:
        form = model.chat_prompts.chat_format()
    except (InvalidRequestError, ImportError):  # a broken template, which the server reported at its start
        return names
    return names + ["tools"] * form.supports_tools + ["thinking"] * (form.reasoning is not None)


def parameter_size(n: int) -> str:
    """Return a number of parameters in Ollama's form."""
    for unit, size, digits in (("B", 1e9, 1), ("M", 1e6, 2), ("K", 1e3, 2)):
        if n >= size:
            return f"{n / size:.{digits}f}{unit}"
    return str(n)


async def show(exchange: Exchange, request: ShowRequest) -> Response:
    """``POST /api/show``: returns the description of a model, from its file."""
    state = exchange.server
    name = request.model or request.name
    if not name:
        raise ApiError(400, "model is missing; give a name of /api/tags", "model")
    embedder = state.embedder
    if embedder is not None and is_named(name, *state.embedding_names):
        shown = await state.in_thread(shown_model, embedder.model, "embedding")
        return JsonResponse(with_context_length(shown, embedder.n_ctx))
    check_chat_model(state, name)
    modelfile = modelfile_for(state, name)
    shown = await state.in_thread(shown_model, state.engine.model, "completion", modelfile)
    return JsonResponse(with_context_length(shown, state.engine.n_ctx))


def with_context_length(shown: dict[str, Any], n_ctx: int) -> dict[str, Any]:
    """Return an answer of ``/api/show`` with the context length that a request may use here.

    The file has the context length of the training, but clients fill the context of the answer.
    """
    key = f"{shown['details']['family']}.context_length"
    return {
        **shown,
        "details": {**shown["details"], "context_length": n_ctx},
        "model_info": {**shown["model_info"], key: n_ctx},
    }


def shown_model(model: Model, kind: str, modelfile: Modelfile = NO_MODELFILE) -> dict[str, Any]:
    """Return the answer of ``/api/show``, with the numbers of the file. ``kind``: "completion" or "embedding"."""
    set_here = "".join(f"PARAMETER {text}\n" for text in modelfile.parameters.splitlines())
    system = f"SYSTEM {json.dumps(modelfile.system)}\n" if modelfile.system else ""
    return {
        "license": modelfile.license or model.metadata.get("general.license", ""),
        "modelfile": f"FROM {model.path.name}\n{set_here}{system}",
        "parameters": modelfile.parameters,
        "template": model.chat_template or "",
        "system": modelfile.system,
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": _capabilities(model, kind),
        "modified_at": _modified(model),
    }


_NUMBERS_OF_GENERAL = ("general.file_type", "general.quantization_version", "general.alignment")


def _model_info(model: Model) -> dict[str, Any]:
    """Return the file's metadata, with numbers instead of their texts."""
    family = model.metadata.get("general.architecture", "")
    info: dict[str, Any] = {}
    for key, text in model.metadata.items():
        is_typed = key.startswith((f"{family}.", "tokenizer.ggml.")) or key in _NUMBERS_OF_GENERAL
        info[key] = _value(text) if is_typed else text
    return {**info, "general.parameter_count": model.n_params}


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_plain = isinstance(value, (int, float, bool)) and value not in (float("inf"), float("-inf"))
    return value if is_plain and value == value else text


# Names for the values of ``general.file_type``, which are numbers of llama.h.
QUANTIZATIONS = {
    "0": "F32", "1": "F16", "2": "Q4_0", "3": "Q4_1", "7": "Q8_0", "8": "Q5_0", "9": "Q5_1", "10": "Q2_K",
    "11": "Q3_K_S", "12": "Q3_K_M", "13": "Q3_K_L", "14": "Q4_K_S", "15": "Q4_K_M", "16": "Q5_K_S", "17": "Q5_K_M",
    "18": "Q6_K", "19": "IQ2_XXS", "20": "IQ2_XS", "21": "Q2_K_S", "22": "IQ3_XS", "23": "IQ3_XXS", "24": "IQ1_S",
    "25": "IQ4_NL", "26": "IQ3_S", "27": "IQ3_M", "28": "IQ2_S", "29": "IQ2_M", "30": "IQ4_XS", "31": "IQ1_M",
    "32": "BF16", "36": "TQ1_0", "37": "TQ2_0", "38": "MXFP4", "39": "NVFP4", "40": "Q1_0", "41": "Q2_0",
}  # fmt: skip
