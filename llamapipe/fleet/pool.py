"""Several models, each in a process that is started when a request needs it, within a budget of memory.

Open this file to change when a model is loaded and when it ends.

A model's process is a worker (see ``worker``). It has one model and ends when the model is unloaded. A crash therefore
affects only this model's requests, and all memory returns to the system.

A model is *unloaded*, *loading*, *loaded* or *unloading*. The first request for it starts the load, and later requests
wait for the same load. A failed load is not tried again for a few seconds, so that a client that retries does not cause
a loop of loads.

A load needs room. Idle models end for it, the least recently used first, except pinned ones. The load begins when their
processes are gone. If none can end, the load waits until one becomes idle. A model that always has a request never
becomes idle: after some seconds it gets no new requests, answers the ones it has, and ends. ``budget`` chooses the
models. A load that waits for room is given up when its last client hangs up.

Use everything here on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from llamapipe import cache_file
from llamapipe._messages import did_you_mean, listed, quoted
from llamapipe.fleet._process import State, WorkerProcess
from llamapipe.fleet._tasks import Tasks
from llamapipe.fleet._totals import Totals, with_labels
from llamapipe.fleet._upstream import Upstream, Upstreams
from llamapipe.fleet.budget import Budget, Memory, Tenure, total
from llamapipe.fleet.catalog import FileFacts, ModelEntry, taken_names
from llamapipe.fleet.link import ServedModel, Subject
from llamapipe.fleet.placement import Placement
from llamapipe.host.memory import resident_bytes
from llamapipe.server.errors import ApiError, shutting_down
from llamapipe.server.metrics import Family

if TYPE_CHECKING:
    from types import EllipsisType

_PATIENCE_S = 3.0  # after this time a load may end models that are never idle
_RETRY_S = 10.0  # a failed load is tried again only after this time
_STOP_S = 30.0  # a process that was asked to end is killed after this time
_END_S = 3.0  # how long to wait for the end of a process that closed a connection without an answer
_SCRAPE_S = 2.0
_MOST_COPIES = 100
_LATEST = ":latest"
_log = logging.getLogger("llamapipe.server")


class ModelState(enum.Enum):
    """The state of a model in a pool."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class PooledModel:
    """One model of a pool. Only the pool changes it.

    ``copies``: more names, which clients gave it until the server ends. ``n_users``: the number of requests that it is
    answering or that wait for it. ``n_running``: the number that it is answering. ``ttl_s``: seconds without a request
    until it ends; None: never. ``expires_at``: the time of that end, by ``monotonic``. ``failure``: why its last load
    failed or its last process ended. ``load_s``: how long the last load took; ``loaded_at``: when it finished, by
    ``monotonic``. ``memory``: the memory it takes; nothing while unloaded. ``measured_bytes``: the most system memory
    that its processes have taken.
    """

    def __init__(self, entry: ModelEntry) -> None:
        self.entry = entry
        self.copies: tuple[str, ...] = ()
        self.state = ModelState.UNLOADED
        self.facts: FileFacts | None = None
        self.process: WorkerProcess | None = None
        self.n_users = self.n_running = 0
        self.memory = Memory()
        self.measured_bytes = 0
        self.used_at = self.loaded_at = 0.0
        self.ttl_s = entry.ttl_s
        self.expires_at: float | None = None
        self.failure: str | None = None
        self.failed_at = 0.0
        self.load_s = 0.0
        self._looking = asyncio.Lock()  # its file is read once, even if several tasks need its facts
        self._loading: asyncio.Task[None] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._upstreams = Upstreams()

    def __repr__(self) -> str:
        return f"<PooledModel {self.entry.name} {self.state.value} n_users={self.n_users}>"

    @property
    def name(self) -> str:
        """Its first name."""
        return self.entry.name

    @property
    def names(self) -> tuple[str, ...]:
        """All of its names, the first one first."""
        return (*self.entry.names, *self.copies)

    @property
    def embeds(self) -> bool | None:
        """Whether it embeds or ranks texts instead of generating them; None if not known yet."""
        return self.entry.embeds if self.facts is None else self.facts.embeds

    @property
    def progress(self) -> float:
        """The fraction that is loaded, from 0 to 1."""
        return 0.0 if self.process is None else self.process.progress

    def patience_s(self, waited_s: float) -> float:
        """Return the seconds until it may end for another model that has waited ``waited_s``.

        0 means now, and infinity means that waiting does not help. A model with requests stays loaded for at least
        ``_PATIENCE_S``. Otherwise, two models that do not fit together would end each other before they answer.
        """
        if self.state is not ModelState.LOADED or self.entry.keep:
            return math.inf
        return max(_PATIENCE_S - min(waited_s, monotonic() - self.loaded_at), 0.0) if self.n_users else 0.0

    def tenure(self, waited_s: float) -> Tenure:
        """Return the memory it holds, and whether it may end for another model that has waited ``waited_s``."""
        used_at = math.inf if self.n_users else self.used_at
        return Tenure(self.memory, used_at, self.patience_s(waited_s) == 0.0)


Look = Callable[[ModelEntry], Coroutine[Any, Any, FileFacts]]


class Pool:
    """The models of one server.

    ``entries``: the models that may be loaded. ``command``: starts a process when ``--worker OPTIONS`` is appended.
    ``look``: returns the facts that a load needs, downloads the file if necessary, and raises OSError or ValueError if
    there is no file. ``budget``: memory that all processes together may take; None: no limit. ``folder``: the parent of
    the folders in which ended models keep their cached prefixes until they are loaded again; None: they are not kept.
    ``cache_dir``: the command-line option, for models whose entry does not set it; ``folder`` is not used for these.
    ``n_requests``: the maximum number of entries of ``GET /requests``. Raises ValueError if two models have the same
    name.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        command: Sequence[str],
        placement: Placement,
        look: Look,
        budget: Budget | None = None,
        folder: Path | None = None,
        cache_dir: str | None = None,
        n_requests: int = 0,
    ) -> None:
        taken_names(entries)  # raises
        self.models = [PooledModel(entry) for entry in entries]
        self._by_name = _by_name(self.models)
        self._leaving: list[PooledModel] = []  # not served any more, but still running
        self._added: list[ModelEntry] = []  # entries that clients added
        self.budget = budget or Budget()
        self._folder = folder
        self._cache_dir = cache_dir
        self._command = command
        self._placement = placement
        self._look = look
        self._n_started = 0
        self._totals = Totals(n_requests)
        self._turn = asyncio.Lock()  # loads make room one after the other, in the order of their requests
        self._changed = asyncio.Event()
        self._n_news = 0  # the number of changes that ``/models/sse`` reports
        self._news = asyncio.Event()
        self._is_ending = False
        self._tasks = Tasks()

    def __repr__(self) -> str:
        n_loaded = sum(model.state is ModelState.LOADED for model in self.models)
        return f"<Pool n_models={len(self.models)} n_loaded={n_loaded}>"

    def find(self, name: str) -> PooledModel:
        """Return the model with this name, with or without ``:latest``. Raises ApiError 404."""
        model = self.get(name)
        if model is not None:
            return model
        names = list(self._by_name)
        raise ApiError(
            404,
            f"the model {quoted(name)} is not served here; there is {listed(names)}{did_you_mean(name, names)}",
            "model",
            "model_not_found",
        )

    def get(self, name: str) -> PooledModel | None:
        """Return the model with this name, with or without ``:latest``; None if there is none."""
        known = (name, name.removesuffix(_LATEST), name + _LATEST)
        return next((self._by_name[form] for form in known if form in self._by_name), None)

    async def identify(self, models: Sequence[PooledModel]) -> None:
        """Read the local files whose facts are not known yet. Skips bad files, because their loads report the error."""
        for model in models:
            async with model._looking:
                if model.facts is None and not self._has_just_failed(model) and model.entry.is_local:
                    with suppress(OSError, ValueError):
                        model.facts = await self._look(model.entry)

    @property
    def used(self) -> Memory:
        """The memory of all current processes."""
        return total(model.memory for model in self._all)

    @property
    def _all(self) -> list[PooledModel]:
        return [*self.models, *self._leaving]

    # ---- watching
    async def news(self, seen: int) -> int | None:
        """Wait until states, names or the progress of a load have changed. Returns None if the server is ending.

        ``seen``: the previous result, at first 0. Several changes since then give one result.
        """
        while self._n_news == seen and not self._is_ending:
            self._news.clear()
            await self._news.wait()
        return None if self._is_ending else self._n_news

    def end_watches(self) -> None:
        """End all calls of ``news``, so that the server can end. Requests that wait for a load still get it."""
        self._is_ending = True
        self._news.set()

    def _tell(self) -> None:
        self._n_news += 1
        self._news.set()

    def _set(self, model: PooledModel, state: ModelState) -> None:
        model.state = state
        self._tell()

    # ---- requests
    @asynccontextmanager
    async def lease(
        self, model: PooledModel, ttl_s: float | EllipsisType | None = ...
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Load a model and count a request for it in the block. Yields a task that is done when it is loaded.

        ``ttl_s``: the seconds that the model stays loaded after this request; None: forever; by default, its entry's
        ``ttl_s``. The task raises ApiError if the model cannot be loaded.
        """
        model.n_users += 1
        model.ttl_s = model.entry.ttl_s if ttl_s is ... else ttl_s
        if model._expiry is not None:
            model._expiry.cancel()
            model._expiry = None
        waiting = asyncio.ensure_future(self._ready(model))
        try:
            yield waiting
        finally:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                model.n_running -= 1
            waiting.cancel()
            model.n_users -= 1
            model.used_at = monotonic()
            if not any(other.n_running for other in self._all):
                for other in self._all:
                    if other.state is ModelState.LOADING and other.process is not None:
                        other.process.let_yield(False)
            if not model.n_users:
                self._measure(model)
                self._expire_later(model)
            self._changed.set()

    async def _ready(self, model: PooledModel) -> None:
        while model.state is not ModelState.LOADED:
            if model._loading is None:
                if model.failure is not None and self._has_just_failed(model):
                    raise _cannot_load(model, model.failure)
                model._loading = self._tasks.start(self._load(model))
            loading = model._loading
            await asyncio.wait([loading])
            if loading.cancelled():
                raise shutting_down() if self._is_ending else _unloaded_error(model)
            if (error := loading.exception()) is not None:
                raise error.again() if isinstance(error, ApiError) else error
        model.n_running += 1

    def _has_just_failed(self, model: PooledModel) -> bool:
        return model.failure is not None and monotonic() - model.failed_at < _RETRY_S

    @asynccontextmanager
    async def connection(self, model: PooledModel) -> AsyncIterator[Upstream]:
        """Lend a connection to a loaded model's process. Raises ConnectionError if the process has ended."""
        upstream = model._upstreams.take()
        if upstream is None:
            # Connections that the process has not taken wait in its socket, which holds few.
            while (
                model.process is not None
                and model.process.state is State.READY
                and not model.process.can_take
            ):
                await self._next_change()
            if model.process is None:
                raise ConnectionError(f"the process of {model.name} has ended")
            upstream = await Upstream.over(model.process.connect())
        try:
            yield upstream
        finally:
            model._upstreams.put_back(upstream)

    async def has_ended(self, model: PooledModel, process: WorkerProcess | None) -> bool:
        """Wait ``_END_S`` at most, and return whether a process that closed a connection has ended.

        ``process``: None if it had ended before.
        """
        if process is None:
            return True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.ended.wait(), _END_S)
        while process.state is State.ENDED and model.process is process:  # `_bury` forgets the process
            await self._next_change()
        return process.state is State.ENDED

    # ---- loads
    def load(self, model: PooledModel) -> asyncio.Task[None]:
        """Load a model, even after a failure. The task raises ApiError."""
        if model._loading is None and model.state is not ModelState.LOADED:
            model.failure = None
        return self._tasks.start(self._load_once(model))

    async def _load_once(self, model: PooledModel) -> None:
        async with self.lease(model) as ready:
            await ready

    async def _load(self, model: PooledModel) -> None:
        began = monotonic()
        try:
            if model._unloading is not None:
                await asyncio.wait([model._unloading])
            while model.process is not None:
                await self._next_change()
            model.failure = None
            self._set(model, ModelState.LOADING)
            try:
                model.facts = facts = await self._look(model.entry)
            except (OSError, ValueError) as e:
                model.facts = None  # the file may be gone
                raise _cannot_load(model, str(e)) from None
            await self._make_room(model, Memory(facts.n_bytes, facts.gpu_bytes))
            await self._start(model, facts)
            self._measure(model)
            model.loaded_at = monotonic()
            model.load_s = model.loaded_at - began
            self._set(model, ModelState.LOADED)
            _log.info("%s is loaded after %.1f s", model.name, model.load_s)
        except ApiError as e:
            if e.code == _LOAD_FAILED:
                _log.error("%s", e.message)
            raise
        finally:
            model._loading = None
            if model.state is ModelState.LOADING:
                self._set(model, ModelState.UNLOADED)
                if model.process is None:  # otherwise `_bury` resets it, when the memory is free
                    model.memory = Memory()
            self._changed.set()

    def _measure(self, model: PooledModel) -> None:
        """Count the process's resident memory, if it is more than the estimate from the file."""
        if model.process is not None and model.state is not ModelState.UNLOADED:
            n_bytes = max(model.memory.n_bytes, resident_bytes(model.process.pid))
            model.memory = Memory(n_bytes, model.memory.gpu_bytes)
            model.measured_bytes = max(model.measured_bytes, n_bytes)

    async def _start(self, model: PooledModel, facts: FileFacts) -> None:
        entry = model.entry
        self._n_started += 1
        options = {**entry.options, **facts.options}
        kept = None if facts.embeds else self._private_folder(model)
        yields = any(other.n_running for other in self._all)  # running streams come before the load
        served = ServedModel(
            facts.file, entry.names, facts.embeds, options, None if kept is None else str(kept), yields
        )
        try:
            process = model.process = WorkerProcess(
                self._n_started, self._command, self._placement, self._process_changed, served=served
            )
        except OSError as e:  # for example, no descriptors or memory are left
            raise _cannot_load(model, f"its process cannot be started: {e}") from None
        _log.info("%s loads in process %d", model.name, process.pid)
        self._tasks.start(self._bury(model, process))
        try:
            await process.settled.wait()
        except asyncio.CancelledError:
            process.cancel()
            raise
        if process.state is not State.READY:
            await process.ended.wait()
            why = process.failure[0] if process.failure is not None else f"its process {process.exit_text}"
            raise _cannot_load(model, why)

    def _operators_folder(self, model: PooledModel) -> Path | None:
        """Return the operator's folder for a model's cached prefixes."""
        folder = model.entry.options.get("cache_dir", self._cache_dir)
        return None if folder is None else Path(folder).expanduser()

    def _private_folder(self, model: PooledModel) -> Path | None:
        """Return the folder for an unloaded model's cached prefixes, unless the operator has chosen one."""
        if self._folder is None or self._operators_folder(model) is not None:
            return None
        return self._folder / sha256(model.name.encode()).hexdigest()

    async def forget_prefixes(self, model: PooledModel, is_wanted: Callable[[Hashable], bool]) -> None:
        """Delete the cached prefixes that an ended model has left and whose keys are wanted. Raises OSError.

        If models share a folder, this also deletes the prefixes of other models, because only an engine can tell which
        files are its own.
        """
        if model._unloading is not None:
            await asyncio.wait([model._unloading])
        folder = self._operators_folder(model) or self._private_folder(model)
        if folder is not None:
            await asyncio.to_thread(cache_file.forget, folder, is_wanted)

    async def _bury(self, model: PooledModel, process: WorkerProcess) -> None:
        """Wait for the end of a process, keep its last report, and mark its model as unloaded."""
        await process.ended.wait()
        self._totals.keep(with_labels(process.families, model=model.name), process.requests)
        was_loaded = model.state is ModelState.LOADED
        model.process = None
        model._upstreams.close()
        if was_loaded:  # it ended by itself; `_load` handles a process that ends while it loads
            why = process.exit_text if process.failure is None else f"failed: {process.failure[0]}"
            model.failure = f"process {process.pid} {why}"
            model.failed_at = 0.0  # the next request loads it again
            _log.warning("%s: %s", model.name, model.failure)
        if model.state is not ModelState.LOADING:
            model.memory = Memory()
            self._set(model, ModelState.UNLOADED)
        self._changed.set()

    # ---- room
    async def _make_room(self, model: PooledModel, needed: Memory) -> None:
        pinned = total(other.memory for other in self.models if other.entry.keep and other is not model)
        why = self.budget.refusal(needed, pinned)
        if why is not None:
            raise _cannot_load(model, why)
        # The memory that it took before counts only up to the budget, so that it is never a reason to refuse the load.
        most = int(min(model.measured_bytes, self.budget.most_bytes(pinned)))
        needed = Memory(max(needed.n_bytes, most), needed.gpu_bytes)
        if self.budget.fits(self.used + needed):  # there is room: it need not wait for its turn
            model.memory = needed
            return
        began = monotonic()
        async with self._turn:
            while not self.budget.fits(self.used + needed):
                if not model.n_users:  # its clients have hung up, so no other model should end for it
                    raise _unloaded_error(model)
                there = [other for other in self._all if other.memory]
                waited_s = monotonic() - began
                victims = self.budget.choose(needed, [other.tenure(waited_s) for other in there])
                if victims is not None and not any(other._unloading for other in there):
                    _log.info(
                        "%s takes the place of %s", model.name, listed([there[i].name for i in victims])
                    )
                    await asyncio.wait([self.unload(there[i]) for i in victims])
                else:
                    left_s = [
                        left for other in there if 0.0 < (left := other.patience_s(waited_s)) < math.inf
                    ]
                    await self._next_change(min(left_s, default=None))
            model.memory = needed

    def unload(self, model: PooledModel) -> asyncio.Task[None]:
        """End a model's process when its requests are answered. The returned task is done when the process is gone."""
        if model._unloading is None:
            if model.state is ModelState.LOADED:
                self._set(model, ModelState.UNLOADING)
            model._unloading = self._tasks.start(self._unload(model))
        return model._unloading

    async def _unload(self, model: PooledModel) -> None:
        try:
            if model._loading is not None and model.state is ModelState.LOADING:
                model._loading.cancel()
                await asyncio.wait([model._loading])
            process = model.process
            if process is None:
                return
            while model.n_running and process.state is not State.ENDED:  # it gets no further requests
                await self._next_change()
            await process.refresh(_SCRAPE_S)  # get its last counters
            process.stop(keeps_cache=model in self.models)
            try:
                await asyncio.wait_for(process.ended.wait(), _STOP_S)
            except asyncio.TimeoutError:
                process.kill()
                await process.ended.wait()
            while model.process is process:
                await self._next_change()
            _log.info("%s is unloaded", model.name)
        finally:
            model._unloading = None
            self._changed.set()

    def expire_after(self, model: PooledModel, ttl_s: float | None) -> None:
        """Set how many seconds a model stays loaded without a request; None: forever."""
        model.ttl_s = ttl_s
        if not model.n_users:
            self._expire_later(model)

    def _expire_later(self, model: PooledModel) -> None:
        if model._expiry is not None:
            model._expiry.cancel()
        model._expiry = model.expires_at = None
        if model.ttl_s is not None:
            model.expires_at = monotonic() + model.ttl_s
            model._expiry = asyncio.get_running_loop().call_later(model.ttl_s, self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        model._expiry = None
        if not model.n_users and model.state is ModelState.LOADED:
            self.unload(model)

    # ---- the whole
    def start(self) -> None:
        """Load the models to preload, and read the files of all models."""
        self._tasks.start(self.identify(self.models))
        for model in self.models:
            if model.entry.preload and model.state is ModelState.UNLOADED:
                self.load(model).add_done_callback(_log_failure)

    def replace(self, entries: Sequence[ModelEntry]) -> None:
        """Replace the list of models. Models whose process would be the same stay loaded.

        Other models answer their requests and end. Models and names that clients added stay, unless a new model has the
        same name. Raises ValueError if two models have the same name, and then changes nothing.
        """
        before = {model.name: model for model in self.models}
        taken = taken_names(entries)
        self._added = [entry for entry in self._added if taken.isdisjoint(entry.taken_names)]
        taken.update(name for entry in self._added for name in entry.taken_names)
        models: list[PooledModel] = []
        for entry in (*entries, *self._added):
            model, old = PooledModel(entry), before.get(entry.name)
            if old is not None and old.entry.is_same_process(entry):
                model = old
                if model.entry.ttl_s != entry.ttl_s:
                    self.expire_after(model, entry.ttl_s)
                model.entry = entry
            if old is not None:
                model.copies = tuple(name for name in old.copies if name not in taken)
            models.append(model)
        self._by_name = _by_name(models)
        gone = [model for model in self.models if model not in models]
        self.models = models
        self._tell()
        for model in gone:
            _log.info("%s is served no longer, or otherwise", model.name)
            self._leaving.append(model)
            self._tasks.start(self._leave(model))
        self.start()

    def add(self, entry: ModelEntry) -> None:
        """Serve one more model, which a client downloaded, or a known model under more names.

        Raises ValueError if another model has one of the names.
        """
        others = [model.entry for model in self.models if model.name != entry.name]
        taken_names((*others, entry))
        entries = [other for other in self._given_entries if other.name != entry.name]
        self._added = [*(other for other in self._added if other.name != entry.name), entry]
        self.replace(entries)

    def copy(self, model: PooledModel, name: str) -> None:
        """Give a model one more name until the server ends. A name that clients gave to another model is moved.

        Raises ApiError 400, 403.
        """
        name = name.removesuffix(_LATEST)
        other = self.get(name)
        if other is model:
            return
        if other is not None and name not in other.copies:
            raise ApiError(
                403,
                f"{quoted(name)} is a name of the model {quoted(other.name)} in the list of --models; choose another",
                "destination",
            )
        if other is None and sum(len(served.copies) for served in self.models) >= _MOST_COPIES:
            raise ApiError(
                400,
                f"clients gave the models {_MOST_COPIES} names, which is the limit; delete one",
                "destination",
            )
        if other is not None:
            self._forget(other, name)
        model.copies += (name,)
        self._by_name[name] = model
        self._tell()

    def forget(self, name: str) -> None:
        """Remove a name that ``copy`` gave."""
        name = name.removesuffix(_LATEST)
        self._forget(self._by_name[name], name)
        self._tell()

    def _forget(self, model: PooledModel, name: str) -> None:
        model.copies = tuple(copy for copy in model.copies if copy != name)
        del self._by_name[name]

    def drop(self, model: PooledModel) -> None:
        """Stop serving a model whose file is deleted."""
        entries = [entry for entry in self._given_entries if entry != model.entry]
        self._added = [entry for entry in self._added if entry != model.entry]
        self.replace(entries)

    @property
    def _given_entries(self) -> list[ModelEntry]:
        return [model.entry for model in self.models if model.entry not in self._added]

    async def _leave(self, model: PooledModel) -> None:
        while model.n_users:  # requests that wait for the load are also answered
            await self._next_change()
        if model._loading is not None:
            model._loading.cancel()
            await asyncio.wait([model._loading])
        while model.process is not None:
            await asyncio.wait([self.unload(model)])
        if (folder := self._private_folder(model)) is not None and model.name not in self._by_name:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._leaving.remove(model)

    async def close(self) -> None:
        """End all processes when their requests are answered."""
        for model in self._all:
            if model._loading is not None:
                model._loading.cancel()
            if model.state is ModelState.LOADED:
                self._set(model, ModelState.UNLOADING)
            if model.process is not None:
                model.process.stop()
        while any(model.process is not None for model in self._all):
            await self._next_change()

    def stop_tools(self) -> None:
        """End the tool calls that run in the processes."""
        for model in self._all:
            if model.process is not None:
                model.process.stop_tools()

    def cancel(self, kill: bool = False) -> None:
        """End all processes without waiting for answers. Requests that wait for a load get an error."""
        self.end_watches()
        for model in self._all:
            if model._loading is not None:
                model._loading.cancel()
            if model.process is not None:
                if kill:
                    model.process.kill()
                else:
                    model.process.cancel()

    async def families(self) -> list[Family]:
        """Return the metrics of all models, with a label for each."""
        live = await self._refresh("families")
        return self._totals.with_live(
            with_labels(process.families, model=model.name) for model, process in live
        )

    async def requests(self) -> list[dict[str, Any]]:
        """Return the entries of ``GET /requests`` of all models, the newest first."""
        return self._totals.requests_with(process.requests for _, process in await self._refresh("requests"))

    async def _refresh(self, about: Subject) -> list[tuple[PooledModel, WorkerProcess]]:
        """Refresh the reports of all processes, and return the models whose process has not ended meanwhile."""
        asked = [model.process for model in self._all if model.process is not None]
        await asyncio.gather(*(process.refresh(_SCRAPE_S, about) for process in asked))
        return [(model, model.process) for model in self._all if model.process is not None]

    def _process_changed(self) -> None:
        """Close connections that a process could not take because it had no descriptors left or has ended.

        Their requests are answered with 503.
        """
        for model in self._all:
            process = model.process
            if model.state is ModelState.LOADING:  # its progress may have changed
                self._tell()
            if process is not None:
                leaves = process.state is State.LEAVING and process.failure is None
                if leaves and model.state is ModelState.LOADED:
                    self.unload(model)  # a signal ended the process; new requests wait for the next one
                refused = [*process.refused, *(process.untaken if process.state is State.ENDED else ())]
                for sock in refused:
                    sock.close()
                process.refused.clear()
        self._changed.set()

    async def _next_change(self, timeout_s: float | None = None) -> None:
        self._changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)


def _by_name(models: Sequence[PooledModel]) -> dict[str, PooledModel]:
    return {name: model for model in models for name in (*model.names, *model.entry.adapters)}


_LOAD_FAILED = "model_load_failed"


def _cannot_load(model: PooledModel, why: str) -> ApiError:
    """Return the error for a request whose model cannot be loaded, and record the reason in the model."""
    if model.failure != why:
        model.failure, model.failed_at = why, monotonic()
    return ApiError(503, f"the model {quoted(model.name)} cannot be loaded: {why}", "model", _LOAD_FAILED)


def _unloaded_error(model: PooledModel) -> ApiError:
    """Return the error for a request whose load was given up."""
    return ApiError(503, f"the model {quoted(model.name)} was unloaded", "model", "model_unloaded")


def _log_failure(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it; the reason is in the log already."""
    if not task.cancelled():
        task.exception()
