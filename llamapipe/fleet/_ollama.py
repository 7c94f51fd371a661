"""Ollama's API for the models of a pool: list, describe, download and delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from llamapipe import hub
from llamapipe._messages import quoted
from llamapipe.errors import ModelLoadError
from llamapipe.fleet._describe import Asked, describe
from llamapipe.fleet.catalog import hub_entries
from llamapipe.fleet.pool import ModelState, Pool, PooledModel
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.server.endpoint import Endpoint, Exchange, JsonResponse, get, post
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.ollama_models import full_name
from llamapipe.server.requests.permissions import check_allowed
from llamapipe.server.routes import ollama_descriptions, ollama_files, page

if TYPE_CHECKING:
    from llamapipe.server.settings import ServerSettings

_AT_ONCE = 8  # models that one child process describes
_FOR_EVER_S = 100 * 365 * 86_400.0


class OllamaModels:
    """The routes about models in Ollama's API, with cached descriptions of their files."""

    def __init__(self, pool: Pool, settings: ServerSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._described: dict[tuple[str, Asked], dict[str, Any] | None] = {}  # by the file's digest
        self._describing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<OllamaModels {len(self._described)} described>"

    def routes(self) -> list[Endpoint]:
        """Return the routes."""
        return [
            get("/", page.page_or_name, has_key=False),
            get("/api/version", ollama_descriptions.version, "The version of this API."),
            get("/api/tags", self.tags, "The models."),
            post("/api/show", self.show, ollama_descriptions.ShowRequest, "What a model is and can do."),
            get("/api/ps", self.running, "The models that are loaded."),
            post(
                "/api/pull", self.pull, ollama_files.PullRequest, "Download a model.", ("403", "404", "429")
            ),
            post(
                "/api/copy",
                self.copy,
                ollama_files.CopyRequest,
                "Give a model another name.",
                ("403", "404"),
            ),
            post(
                "/api/delete",
                self.delete,
                ollama_files.DeleteRequest,
                "Delete a downloaded model, or a name.",
                ("403", "404"),
                method="DELETE",
            ),
        ]

    async def tags(self, exchange: Exchange) -> Response:
        """``GET /api/tags``: the models whose files are on this machine."""
        await self._pool.identify(self._pool.models)
        there = [model for model in self._pool.models if model.facts is not None]
        described = await self.describe(there)
        entries = []
        for model, shown in zip(there, described, strict=True):
            for name in (*model.names, *model.entry.adapters):
                entry = _list_entry(model, name)
                if entry is not None:
                    entries.append(
                        entry if shown is None else {**entry, "capabilities": shown["capabilities"]}
                    )
        return JsonResponse({"models": entries})

    async def show(self, exchange: Exchange, request: ollama_descriptions.ShowRequest) -> Response:
        """``POST /api/show``: the description in a model's file. Loads no model that is on this machine."""
        name = request.model or request.name
        if not name:
            raise ApiError(400, "model is missing; give a name of /api/tags", "model")
        model = self._pool.find(name)
        await self._pool.identify([model])
        if model.facts is None:
            what = (
                "cannot be read"
                if model.entry.is_local
                else "is not downloaded yet: the first request does it"
            )
            raise ApiError(
                404, f"the file of the model {quoted(model.name)} {what}", "model", "model_not_found"
            )
        (shown,) = await self.describe([model])
        if shown is None:
            raise ApiError(503, f"the vocabulary of the model {quoted(model.name)} cannot be loaded", "model")
        shown = {**shown, "details": dict(model.facts.details)}  # with the sizes
        answer = ollama_descriptions.with_context_length(shown, model.facts.n_ctx)
        return JsonResponse({**answer, "modified_at": _date(model.facts.modified_s)})

    async def describe(self, models: Sequence[PooledModel]) -> list[dict[str, Any] | None]:
        """Return the answers of ``/api/show`` for models whose files are known. Each file is described once."""
        keys = []
        for model in models:
            facts = model.facts
            assert facts is not None
            template = model.entry.options.get("chat_template")
            keys.append((facts.digest, Asked(facts.file, facts.embeds, template)))
        async with self._describing:
            new = [key for key in dict.fromkeys(keys) if key not in self._described]
            if new:
                answers = await describe([asked for _, asked in new])
                self._described |= dict(zip(new, answers, strict=True))
        return [self._described[key] for key in keys]

    async def describe_all(self) -> None:
        """Describe all models before a client asks, because that takes seconds."""
        await self._pool.identify(self._pool.models)
        there = [model for model in self._pool.models if model.facts is not None]
        # A few at a time: a client that asks for one model then waits for a few, not for all.
        for start in range(0, len(there), _AT_ONCE):
            await self.describe(there[start : start + _AT_ONCE])

    async def pull(self, exchange: Exchange, request: ollama_files.PullRequest) -> Response:
        """``POST /api/pull``: downloads a model and serves it. A known model may wait for its first request."""
        name = ollama_files.named(request)
        if self._pool.get(name) is not None:
            return await ollama_files.answered(exchange, request, None)

        async def serve(path: Path) -> None:
            cached = hub_entries(await asyncio.to_thread(hub.cached_models))
            entry = next((entry for entry in cached if entry.file == str(path)), None)
            if entry is None or self._pool.get(name) is not None:
                return
            served = self._pool.get(entry.name)
            if served is not None and served.entry.file == entry.file:
                entry = served.entry
            asked = name.removesuffix(":latest")
            self._pool.add(entry if asked in entry.names else replace(entry, aliases=(*entry.aliases, asked)))

        return await ollama_files.answered(exchange, request, name, serve)

    async def delete(self, exchange: Exchange, request: ollama_files.DeleteRequest) -> Response:
        """``DELETE /api/delete``: delete a name made by a copy, or a file in the hub's cache."""
        name = ollama_files.named(request)
        model = self._pool.find(name)
        if name.removesuffix(":latest") in model.copies:
            check_allowed(exchange, self._settings.allow_delete, "--allow-delete")
            self._pool.forget(name)
            return Response()
        reference = model.entry.reference
        if model.entry.file.startswith(OLLAMA):
            raise ApiError(403, f"the model {quoted(model.name)} belongs to Ollama: use ollama rm", "model")
        if reference is None:
            raise ApiError(
                403, f"the model {quoted(model.name)} is in the list of --models; take it out there", "model"
            )
        check_allowed(exchange, self._settings.allow_delete, "--allow-delete")
        self._pool.drop(model)
        try:
            await asyncio.to_thread(hub.delete, *hub.parse(reference))
        except ModelLoadError as e:  # the file was deleted meanwhile
            raise ApiError(404, str(e), "model", "model_not_found") from None
        return Response()

    async def copy(self, exchange: Exchange, request: ollama_files.CopyRequest) -> Response:
        """``POST /api/copy``: another name for a model, until the server ends. Loads nothing."""
        check_allowed(exchange, self._settings.allow_pull, "--allow-pull")
        model = self._pool.find(request.source)
        if request.source.removesuffix(":latest") in model.entry.adapters:
            raise ApiError(400, f"{quoted(request.source)} is an adapter, which has one name", "source")
        ollama_files.check_destination(request.destination)
        self._pool.copy(model, request.destination)
        return Response()

    async def running(self, exchange: Exchange) -> Response:
        """``GET /api/ps``: the models that are loaded."""
        entries = []
        for model in self._pool.models:
            if (
                model.state is ModelState.LOADED
                and model.facts is not None
                and (entry := _list_entry(model, model.name))
            ):
                left_s = _FOR_EVER_S if model.expires_at is None else model.expires_at - monotonic()
                kept = {key: entry[key] for key in ("name", "model", "digest", "details")}
                entries.append(
                    {**kept, "size": model.memory.n_bytes + model.memory.gpu_bytes, "size_vram": model.memory.gpu_bytes,
                     "expires_at": _date(time.time() + left_s), "context_length": model.facts.n_ctx}
                )  # fmt: skip
        return JsonResponse({"models": entries})


def _list_entry(model: PooledModel, name: str) -> dict[str, Any] | None:
    """Return the entry of Ollama's lists for a model under one of its names; None if its file is not known."""
    facts = model.facts
    if facts is None:
        return None
    is_adapter = name in model.entry.adapters
    return {
        "name": full_name(name),
        "model": full_name(name),
        "modified_at": _date(facts.modified_s),
        "size": facts.size_bytes,
        "digest": facts.digest,
        "details": {
            **facts.details,
            "context_length": facts.n_ctx,
            **({"parent_model": full_name(model.name)} if is_adapter else {}),
        },
        "capabilities": ["embedding" if facts.embeds else "completion"],
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
