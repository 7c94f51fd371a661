"""Several models in this process, loaded when a call names them, within a budget of memory.

Open it for who makes room for whom, which ``llamapipe serve --models`` decides in the same way: ``choose`` is the
policy, and knows neither models nor processes.

``ModelPool`` runs its engines in this process: every call of an engine works, with Python functions as tools and arrays
as results, and nothing is copied. A crash of llama.cpp ends the program, as with one engine; where that matters, use a
server, which has a process for each model.

A model is *unloaded*, *loading*, *loaded* or *unloading*. Who calls it first loads it, and all others wait for that.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from inspect import signature
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from llamapipe._messages import did_you_mean, listed, quoted
from llamapipe.arguments import check_int
from llamapipe.embedding import Embedder, Ranked
from llamapipe.engine import Engine, EngineTuning, with_tuning
from llamapipe.errors import BackendError, EngineClosedError
from llamapipe.gguf.check import GgufInfo, check_gguf, head_texts, tensor_bytes
from llamapipe.host.memory import free_memory
from llamapipe.llama.devices import free_gpu_memory
from llamapipe.llama.kv_memory import TYPE_BYTES, cell_bytes
from llamapipe.llama.model import MODEL_OPTIONS, Model
from llamapipe.locks import Lock
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.ollama_models import model_of
from llamapipe.params import SamplingParams

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    import numpy.typing as npt

    from llamapipe._engine.chat_requests import Conversation
    from llamapipe._engine.submit import Prompt
    from llamapipe.embedding import Text
    from llamapipe.results import ChatCompletion, ChatDelta, Completion, Delta

OF_FREE_MEMORY = 0.9
PATIENCE_S = 3.0  # after this time a load may end models that are never idle
# Beside weights and cells, what a step computes with, which grows with the vocabulary. Measured with SmolLM2 135M and
# Qwen2.5 0.5B, the interpreter included: 140 and 238 MiB; this gives 158 and 258 with 110 MiB for the interpreter.
_STEP_ROWS = 256
_CACHE_SHARE = 0.1  # of weights and cells, for cached prefixes that have lost their slot
_USUAL_CONTEXT, _USUAL_SLOTS = 4096, 8
_USUAL_TEXT = 2048  # tokens of a text to embed
_OPTIONS = (  # of what a pool makes
    {*signature(Engine).parameters, *signature(Embedder).parameters, *EngineTuning.__dataclass_fields__}
    | {*MODEL_OPTIONS}
) - {"model", "tuning"}
_BLOCK = re.compile(r"blk\.(\d+)\.")
_TOKENS = "token_embd.weight"
_INPUT = re.compile(r"token_embd|token_types|position_embd|per_layer_token_embd")
_log = logging.getLogger("llamapipe")


# ---- the policy
class Tenure(NamedTuple):
    """A model that has memory, for ``choose``. ``may_end``: it is loaded and not pinned, and idle if that matters."""

    n_bytes: int
    used_at: float
    may_end: bool
    gpu_bytes: int = 0


def choose(
    needed: int,
    budget: int | None,
    there: Sequence[Tenure],
    gpu_needed: int = 0,
    gpu_budget: int | None = None,
) -> list[int] | None:
    """The places of the models to end, so that ``needed`` bytes fit beside the rest; None: they cannot all be idle.

    The same for the memory of GPUs. The least recently used first, no more than needed. Pure.
    """
    missing = gpu_missing = 0
    if budget is not None:
        missing = sum(tenure.n_bytes for tenure in there) + needed - budget
    if gpu_budget is not None:
        gpu_missing = sum(tenure.gpu_bytes for tenure in there) + gpu_needed - gpu_budget
    chosen = []
    for i in sorted(range(len(there)), key=lambda i: there[i].used_at):
        helps = (missing > 0 and there[i].n_bytes > 0) or (gpu_missing > 0 and there[i].gpu_bytes > 0)
        if helps and there[i].may_end:
            chosen.append(i)
            missing -= there[i].n_bytes
            gpu_missing -= there[i].gpu_bytes
    return chosen if missing <= 0 and gpu_missing <= 0 else None


def refusal(needed: int, budget: int | None, pinned: int, option: str) -> str | None:
    """Why a model can never be loaded; None: it can."""
    if budget is None or needed + pinned <= budget:
        return None
    beside = f", of which pinned models have {size(pinned)}" if pinned else ""
    return (
        f"it needs {size(needed)}, and {size(budget)} are allowed{beside}; raise {option}, or give it a smaller n_ctx "
        "or n_seq_max"
    )


def gpu_refusal(needed: int, budget: int | None, pinned: int) -> str | None:
    """The same for the memory of GPUs."""
    if budget is None or needed + pinned <= budget:
        return None
    beside = f", of which pinned models have {size(pinned)}" if pinned else ""
    return (
        f"its layers on GPUs need {size(needed)}, and models may take {size(budget)} of the memory that GPUs had free"
        f"{beside}; give it a smaller n_gpu_layers, n_ctx or n_seq_max"
    )


class Need(NamedTuple):
    """What a model takes once it is loaded.

    ``n_bytes``: memory, without that of the process. ``n_ctx``: tokens of a request. ``cache_bytes``: the option of the
    engine with which it takes no more. ``gpu_bytes``: memory of GPUs.
    """

    n_bytes: int
    n_ctx: int
    cache_bytes: int
    gpu_bytes: int


def need_of(info: GgufInfo, embeds: bool, options: Mapping[str, Any], has_gpus: bool = False) -> Need:
    """What a file's model takes with these options of ``Engine`` or ``Embedder``, and of ``Model``.

    ``has_gpus``: there are GPUs with dedicated memory, which get layers. Raises ModelLoadError.
    """
    n_on_gpu = _n_on_gpu(info, options) if has_gpus else 0
    weights, held = _weights_bytes(info, n_on_gpu)
    beside = more = 0
    if embeds:
        n_ctx, n_cache_bytes = options.get("n_ctx") or min(info.n_ctx_train, _USUAL_TEXT), 0
    else:
        given = options.get("n_ctx")  # 0 on the command line: the model's
        n_ctx = min(info.n_ctx_train, _USUAL_CONTEXT) if given is None else given or info.n_ctx_train
        cells = _cells_bytes(head_texts(info.path), info, n_ctx, options)
        n_cache_bytes = options.get("cache_bytes", int((info.size_bytes + cells) * _CACHE_SHARE))
        share = max(n_on_gpu - 1, 0) / max(info.n_layer, 1)
        weights, held = weights + cells * (1 - share), held + cells * share
        if isinstance(draft := options.get("draft"), (str, os.PathLike)):
            stored = model_of(draft)
            of_draft = {"n_ctx": n_ctx, "n_seq_max": options.get("n_seq_max"), "cache_bytes": 0}
            found = need_of(check_gguf(draft if stored is None else stored[0]), False, of_draft, n_on_gpu > 0)
            beside, more = found.n_bytes, found.gpu_bytes
    steps = 4 * info.n_vocab * _STEP_ROWS
    return Need(
        int(weights + n_cache_bytes + steps) + beside,
        n_ctx,
        n_cache_bytes,
        int(held + steps) + more if n_on_gpu else 0,
    )


def _n_on_gpu(info: GgufInfo, options: Mapping[str, Any]) -> int:
    """How many layers GPUs get: the last ones, of which the output is the very last."""
    devices = options.get("devices")
    if options.get("rpc") or (devices is not None and all(str(one) == "CPU" for one in devices)):
        return 0  # workers get layers first: how many this machine keeps is not known
    given = options.get("n_gpu_layers", -1)
    return info.n_layer + 1 if not isinstance(given, int) or given < 0 else min(given, info.n_layer + 1)


def _weights_bytes(info: GgufInfo, n_on_gpu: int) -> tuple[float, float]:
    """Bytes of the weights in the system's memory, and in that of GPUs."""
    first = info.n_layer + 1 - n_on_gpu
    on_gpu, has_output = 0, False
    for tensor in info.tensors if n_on_gpu else ():
        block = _BLOCK.match(tensor.name)
        has_output = has_output or tensor.name == "output.weight"
        if int(block[1]) >= first if block else not _INPUT.match(tensor.name):
            on_gpu += tensor_bytes(tensor)
    # Where the output uses the weights of the input, GPUs get a copy.
    copied = (
        0 if has_output or not n_on_gpu else sum(tensor_bytes(t) for t in info.tensors if t.name == _TOKENS)
    )
    return info.size_bytes - on_gpu, on_gpu + copied


def embeds_of(info: GgufInfo) -> bool:
    """Whether a file's model can only embed or rank texts."""
    return not info.is_causal or info.has_rank_head


def _cells_bytes(texts: Mapping[str, str], info: GgufInfo, n_ctx: int, options: Mapping[str, Any]) -> float:
    """Bytes of the KV cells. At most: layers with a sliding window hold fewer."""
    window = f"{info.architecture}.attention.sliding_window"
    sizes = {key: value for key, value in texts.items() if key != window}
    types = (str(options.get(name, "f16")) for name in ("type_k", "type_v"))
    k, v = (kind if kind in TYPE_BYTES else "f16" for kind in types)  # the engine refuses others
    n_cells = options.get("n_cells") or n_ctx * (options.get("n_seq_max") or _USUAL_SLOTS)
    return n_cells * (cell_bytes(sizes, info.n_layer, info.n_embd, k, v) or 0.0)


def size(n_bytes: float) -> str:
    """A number of bytes for people."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= one:
            return f"{n_bytes / one:,.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


# ---- the pool
State = Literal["unloaded", "loading", "loaded", "unloading"]


class ModelStatus(NamedTuple):
    """One model of a ``ModelPool``.

    ``n_bytes``: memory that it is expected to take, 0 while it is unloaded. ``n_calls``: calls that use it now.
    ``pinned``: it is not ended for another model. ``gpu_bytes``: the same as ``n_bytes`` of GPUs' own memory.
    """

    name: str
    state: State
    n_bytes: int
    n_calls: int
    pinned: bool
    gpu_bytes: int = 0


class _Pooled:
    """One model. Only the pool changes it, and only with its lock."""

    def __init__(
        self,
        name: str,
        file: str | os.PathLike[str],
        options: dict[str, Any],
        common: dict[str, Any],
        embeds: bool | None,
    ) -> None:
        self.name = name
        self.file = file
        self.options = options
        self.common = common  # for a model that generates
        self.embeds = embeds
        self.pinned = False
        self.state: State = "unloaded"
        self.owner: Engine | Embedder | None = None
        self.is_leaving = False  # it gets no further calls, and ends after those that it has
        self.users: set[object] = set()  # one for each call
        self.n_bytes = self.gpu_bytes = self.n_failed = 0
        self.used_at = 0.0
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return f"<_Pooled {self.name} {self.state} n_users={len(self.users)}>"

    def ended(self) -> None:
        """It has no memory any longer."""
        self.owner, self.state = None, "unloaded"
        self.n_bytes = self.gpu_bytes = 0


class ModelPool(NotCopyable):
    """Several models, of which those stay loaded that fit a budget of memory.

    A ``with`` block closes it at its end::

        with lp.ModelPool({"chat": "qwen.gguf", "embed": "minilm.gguf"}) as pool:
            print(pool.chat("Hello", model="chat").content)
            vectors = pool.embed(["a text", "another one"], model="embed")

    - ``models``: names, and for each the path of a GGUF file (or ``ollama:NAME``), or a mapping with the key ``"file"``
      and options: those of ``Engine``, ``EngineTuning`` and ``Model``, or of ``Embedder`` for a model that embeds.
      ``"embeddings"``: it embeds or ranks texts instead of generating them; default: what the file is made for.
    - ``budget_bytes``: memory that all loaded models together may take; default: nine tenths of what is free now. What
      one takes is computed from its file: weights, KV cells and cached prefixes. What is on GPUs with memory of their
      own (``n_gpu_layers``) does not count; of that memory, models may take nine tenths of what the first load finds.
    - ``keep``: names of models that are not ended for others. ``options``: for all models that generate.

    A call loads its model if need be, and calls of several threads and tasks share one load. Idle models make room, the
    least recently used first, and only those that no call uses. Where all have calls the load waits; after 3 s a model
    that is never idle gets no further ones until it has made room. The cached prefixes of a model that is ended are
    kept in a file of the user's cache folder, and are there when it is loaded again.

    Calls have the options of the engine's and the embedder's, and ``model``, a name. ``engine`` and ``embedder`` give
    what has the further ones. Any thread. Not after ``fork()``.

    Raises TypeError and ValueError for bad arguments. Calls raise ValueError for an unknown name, BackendError for a
    model that is larger than the budget, and what ``Model``, ``Engine`` and ``Embedder`` raise.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        budget_bytes: int | None = None,
        *,
        keep: Collection[str] = (),
        **options: Any,
    ) -> None:
        if not isinstance(models, Mapping):
            raise TypeError(f"models must be a mapping from names to files, not {type(models).__name__}")
        if not models:
            raise ValueError("models is empty; give at least one name with a file")
        self._models = {name: _pooled(name, given, options) for name, given in models.items()}
        for name in [keep] if isinstance(keep, str) else keep:
            self._find(name).pinned = True
        if budget_bytes is None:
            free = free_memory()
            self.budget_bytes = None if free is None else int(free * OF_FREE_MEMORY)
        else:
            self.budget_bytes = check_int("budget_bytes", budget_bytes, 1, 2**63 - 1)
        self._changed = threading.Condition(Lock())
        self._turn = Lock()  # to make room, in the order of the calls
        # Memory of GPUs that all models may take; None before the first load.
        self._gpu_bytes: int | None = None
        self._closed = False
        self._kept = ExitStack()
        self._folder: Path | None = None

    def __repr__(self) -> str:
        n_loaded = sum(model.state == "loaded" for model in self._models.values())
        return (
            f"<ModelPool n_models={len(self._models)} n_loaded={n_loaded}{' closed' if self._closed else ''}>"
        )

    # ---- which models are loaded
    def load(self, name: str) -> None:
        """Loads a model, and returns when it is loaded."""
        with self._use(self._find(name)):
            pass

    def unload(self, name: str) -> None:
        """Ends a model when the calls that use it have returned, and returns then.

        Not inside ``engine`` or ``embedder`` of this model, which would wait for itself.
        """
        model = self._find(name)
        with self._changed:
            while model.state == "loading":
                self._changed.wait()
            model.is_leaving = model.state == "loaded"
            while model.state != "unloaded":
                if not self._end_one():
                    self._changed.wait()

    def status(self) -> list[ModelStatus]:
        """The models, in the order in which they were given."""
        with self._changed:
            return [
                ModelStatus(
                    model.name, model.state, model.n_bytes, len(model.users), model.pinned, model.gpu_bytes
                )
                for model in self._models.values()
            ]

    @contextmanager
    def engine(self, name: str) -> Iterator[Engine]:
        """The engine of a model, which stays loaded in the ``with`` block."""
        with self._use(self._able(name, embeds=False)) as owner:
            assert isinstance(owner, Engine)
            yield owner

    @contextmanager
    def embedder(self, name: str) -> Iterator[Embedder]:
        """The embedder of a model, which stays loaded in the ``with`` block."""
        with self._use(self._able(name, embeds=True)) as owner:
            assert isinstance(owner, Embedder)
            yield owner

    @asynccontextmanager
    async def aengine(self, name: str) -> AsyncIterator[Engine]:
        """``engine`` for asyncio."""
        async with self._ause(self._able(name, embeds=False)) as owner:
            assert isinstance(owner, Engine)
            yield owner

    @asynccontextmanager
    async def aembedder(self, name: str) -> AsyncIterator[Embedder]:
        """``embedder`` for asyncio."""
        async with self._ause(self._able(name, embeds=True)) as owner:
            assert isinstance(owner, Embedder)
            yield owner

    @contextmanager
    def _use(self, model: _Pooled) -> Iterator[Engine | Embedder]:
        user = object()
        try:
            yield self._acquire(model, user)
        finally:
            self._release(model, user)

    @asynccontextmanager
    async def _ause(self, model: _Pooled) -> AsyncIterator[Engine | Embedder]:
        import asyncio

        user = object()
        waiting = asyncio.ensure_future(asyncio.to_thread(self._acquire, model, user))
        try:
            yield await asyncio.shield(waiting)
        finally:
            if waiting.done():
                self._release(model, user)
            else:  # cancelled: the thread cannot be

                def ended(done: asyncio.Future[Any]) -> None:
                    done.exception()
                    self._release(model, user)

                waiting.add_done_callback(ended)

    def _able(self, name: str, embeds: bool) -> _Pooled:
        """The model of a name. Raises ValueError if it does not generate, or not embed."""
        model = self._find(name)
        if model.embeds is None:
            stored = model_of(model.file)
            model.embeds = embeds_of(check_gguf(model.file if stored is None else stored[0]))
        if model.embeds and not embeds:
            raise ValueError(f"the model {quoted(name)} embeds texts; it does not generate any")
        if embeds and not model.embeds:
            raise ValueError(
                f"the model {quoted(name)} generates texts; to embed with it, list its file a second time with "
                "'embeddings': True"
            )
        return model

    def _find(self, name: str) -> _Pooled:
        model = self._models.get(name)
        if model is None:
            names = list(self._models)
            raise ValueError(
                f"there is no model {quoted(str(name))}; there is {listed(names)}{did_you_mean(str(name), names)}"
            )
        return model

    def _acquire(self, model: _Pooled, user: object) -> Engine | Embedder:
        """Counts a call of a model, which is loaded when this returns."""
        n_failed = model.n_failed
        with self._changed:
            while True:
                if self._closed:
                    raise EngineClosedError("the pool is closed; make another")
                if model.state == "loaded" and not model.is_leaving and model.owner is not None:
                    model.users.add(user)
                    return model.owner
                if model.state == "unloaded":
                    if model.n_failed > n_failed and model.error is not None:  # the load that this waited for
                        raise model.error
                    model.state = "loading"
                    break
                self._changed.wait()
        try:
            owner = self._load(model)
        except BaseException as e:
            with self._changed:
                model.ended()
                model.n_failed += 1
                model.error = e if isinstance(e, Exception) else None
                self._changed.notify_all()
            raise
        with self._changed:
            model.owner, model.state = owner, "loaded"
            model.users.add(user)
            self._changed.notify_all()
        return owner

    def _release(self, model: _Pooled, user: object) -> None:
        with self._changed:
            model.users.discard(user)
            model.used_at = monotonic()
            self._changed.notify_all()

    # ---- loads
    def _load(self, model: _Pooled) -> Engine | Embedder:
        stored = model_of(model.file)
        info = check_gguf(model.file if stored is None else stored[0])
        embeds = embeds_of(info) if model.embeds is None else model.embeds
        given = model.options if embeds else {**model.common, **model.options}
        if self._gpu_bytes is None:
            self._gpu_bytes = int(free_gpu_memory() * OF_FREE_MEMORY)
        need = need_of(info, embeds, given, self._gpu_bytes > 0)
        self._make_room(model, need)
        options = with_tuning(given)
        of_model = {name: options.pop(name) for name in MODEL_OPTIONS if name in options}
        loaded = Model(model.file, **of_model)
        try:
            if embeds:
                owner: Engine | Embedder = Embedder(loaded, **options)
            else:
                owner = engine = Engine(loaded, **{"cache_bytes": need.cache_bytes, **options})
                self._take_cache(model, engine)
        except BaseException:
            loaded.close()
            raise
        return owner

    def _make_room(self, model: _Pooled, need: Need) -> None:
        with self._changed:
            others = [other for other in self._models.values() if other is not model]
            pinned = [other for other in others if other.pinned]
            why = refusal(need.n_bytes, self.budget_bytes, sum(p.n_bytes for p in pinned), "budget_bytes")
            why = why or gpu_refusal(need.gpu_bytes, self._gpu_bytes, sum(p.gpu_bytes for p in pinned))
            if why is not None:
                raise BackendError(f"the model {quoted(model.name)} cannot be loaded: {why}")
            if self._takes_room(model, need):  # nobody waits for the load of another one without need
                return
        began = monotonic()
        with self._turn, self._changed:
            while not self._takes_room(model, need):
                if self._closed:
                    raise EngineClosedError("the pool is closed; make another")
                waited_s = monotonic() - began
                there = [other for other in others if other.n_bytes]
                budgets = need.n_bytes, self.budget_bytes
                if not any(other.is_leaving for other in there):
                    held = [_tenure(other, waited_s < PATIENCE_S) for other in there]
                    for i in choose(*budgets, held, need.gpu_bytes, self._gpu_bytes) or ():
                        there[i].is_leaving = True
                if not self._end_one():
                    self._changed.wait(max(PATIENCE_S - waited_s, 0.0) or None)

    def _takes_room(self, model: _Pooled, need: Need) -> bool:
        """Whether a model fits beside the others; it has the memory then."""
        others = [other for other in self._models.values() if other is not model]
        used, gpu_used = sum(other.n_bytes for other in others), sum(other.gpu_bytes for other in others)
        if self.budget_bytes is not None and used + need.n_bytes > self.budget_bytes:
            return False
        if self._gpu_bytes is not None and gpu_used + need.gpu_bytes > self._gpu_bytes:
            return False
        model.n_bytes, model.gpu_bytes = need.n_bytes, need.gpu_bytes
        return True

    def _end_one(self) -> bool:
        """Ends a model that is leaving and idle; False if there is none. With the lock, which it gives up meanwhile."""
        for model in self._models.values():
            if model.is_leaving and model.state == "loaded" and not model.users:
                break
        else:
            return False
        model.state, owner = "unloading", model.owner
        assert owner is not None
        self._changed.release()
        try:
            if isinstance(owner, Engine):
                self._keep_cache(model, owner)
            _close(owner)
        finally:
            self._changed.acquire()
            model.ended()
            model.is_leaving = False
            self._changed.notify_all()
        return True

    # ---- cached prefixes
    def _cache_file(self, model: _Pooled) -> Path:
        """Where those of a model are while it is not loaded. Raises OSError, RuntimeError."""
        from llamapipe.host.folders import private_folder

        with self._changed:
            if self._folder is None:
                self._folder = self._kept.enter_context(private_folder("evicted"))
            return self._folder / f"{sha256(model.name.encode()).hexdigest()}.cache"

    def _keep_cache(self, model: _Pooled, engine: Engine) -> None:
        try:
            engine._save_cache(self._cache_file(model))
        except (OSError, RuntimeError) as e:
            _log.warning("the cached prefixes of %s are lost: %s", model.name, e)

    def _take_cache(self, model: _Pooled, engine: Engine) -> None:
        if self._folder is None:
            return
        path = self._cache_file(model)
        with suppress(FileNotFoundError):
            try:
                engine._load_cache(path)
            except (OSError, ValueError) as e:
                if not isinstance(e, FileNotFoundError):
                    _log.warning("the cached prefixes of %s are lost: %s", model.name, e)
            path.unlink()

    # ---- text
    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, model: str, **options: Any,
    ) -> list[Completion]: ...  # fmt: skip

    def generate(self, prompt: Any, params: Any = None, *, model: str, **options: Any) -> Any:
        """``Engine.generate`` with a model."""
        with self.engine(model) as engine:
            return engine.generate(prompt, params, **options)

    @overload
    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> Completion: ...

    @overload
    async def agenerate(
        self, prompt: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, model: str, **options: Any,
    ) -> list[Completion]: ...  # fmt: skip

    async def agenerate(self, prompt: Any, params: Any = None, *, model: str, **options: Any) -> Any:
        """``Engine.agenerate`` with a model."""
        async with self.aengine(model) as engine:
            return await engine.agenerate(prompt, params, **options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> Iterator[Delta]:
        """The deltas of ``Engine.stream`` with a model. The request starts with the first one."""
        with self.engine(model) as engine, engine.stream(prompt, params, **options) as stream:
            yield from stream

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> AsyncIterator[Delta]:
        """``stream`` for asyncio."""
        async with (
            self.aengine(model) as engine,
            engine.astream(prompt, params, **options) as stream,
        ):
            async for delta in stream:
                yield delta

    # ---- chat
    @overload
    def chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self, messages: Sequence[Conversation], params: SamplingParams | None = None,
        *, model: str, **options: Any,
    ) -> list[ChatCompletion]: ...  # fmt: skip

    def chat(self, messages: Any, params: Any = None, *, model: str, **options: Any) -> Any:
        """``Engine.chat`` with a model."""
        with self.engine(model) as engine:
            return engine.chat(messages, params, **options)

    @overload
    async def achat(
        self, messages: Conversation, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> ChatCompletion: ...

    @overload
    async def achat(
        self, messages: Sequence[Conversation], params: SamplingParams | None = None,
        *, model: str, **options: Any,
    ) -> list[ChatCompletion]: ...  # fmt: skip

    async def achat(self, messages: Any, params: Any = None, *, model: str, **options: Any) -> Any:
        """``Engine.achat`` with a model."""
        async with self.aengine(model) as engine:
            return await engine.achat(messages, params, **options)

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> Iterator[ChatDelta]:
        """The deltas of ``Engine.stream_chat`` with a model. The request starts with the first one."""
        with self.engine(model) as engine, engine.stream_chat(messages, params, **options) as stream:
            yield from stream

    async def astream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, model: str, **options: Any
    ) -> AsyncIterator[ChatDelta]:
        """``stream_chat`` for asyncio."""
        async with (
            self.aengine(model) as engine,
            engine.astream_chat(messages, params, **options) as stream,
        ):
            async for delta in stream:
                yield delta

    # ---- embeddings
    def embed(
        self, texts: str | Sequence[Text], normalize: bool = True, *, model: str, **options: Any
    ) -> npt.NDArray[np.float32]:
        """``Embedder.embed`` with a model."""
        with self.embedder(model) as embedder:
            embed: Callable[..., Any] = embedder.embed
            made: npt.NDArray[np.float32] = embed(texts, normalize, **options)
            return made

    async def aembed(
        self, texts: str | Sequence[Text], normalize: bool = True, *, model: str, **options: Any
    ) -> npt.NDArray[np.float32]:
        """``Embedder.aembed`` with a model."""
        async with self.aembedder(model) as embedder:
            embed: Callable[..., Any] = embedder.aembed
            made: npt.NDArray[np.float32] = await embed(texts, normalize, **options)
            return made

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str, truncate: bool = False
    ) -> list[Ranked]:
        """``Embedder.rerank`` with a model."""
        with self.embedder(model) as embedder:
            return embedder.rerank(query, documents, truncate=truncate)

    async def arerank(
        self, query: str, documents: Sequence[str], *, model: str, truncate: bool = False
    ) -> list[Ranked]:
        """``Embedder.arerank`` with a model."""
        async with self.aembedder(model) as embedder:
            return await embedder.arerank(query, documents, truncate=truncate)

    # ---- end
    def close(self) -> None:
        """Ends all models when the calls that use them have returned. New calls are refused. A second call is harmless.

        Any thread, but not inside ``engine`` or ``embedder``.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for model in self._models.values():
                while model.state != "unloaded":
                    if model.state == "loaded" and not model.users:
                        owner, model.state = model.owner, "unloading"
                        assert owner is not None
                        try:
                            _close(owner)
                        finally:
                            model.ended()
                    else:
                        self._changed.wait()
        self._kept.close()

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.close)

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> ModelPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _pooled(name: object, given: object, common: Mapping[str, Any]) -> _Pooled:
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a model must be a str, not {type(name).__name__}")
    own = dict(given) if isinstance(given, Mapping) else {"file": given}
    file = own.pop("file", None)
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"models[{name!r}] must be a path, or a mapping with a path as 'file'")
    embeds = own.pop("embeddings", None)
    if not isinstance(embeds, bool | None):
        raise TypeError(f"models[{name!r}]: embeddings must be True, False or None")
    for option in (*common, *own):
        if option not in _OPTIONS:
            raise TypeError(
                f"models[{name!r}]: there is no option {quoted(option)}{did_you_mean(option, _OPTIONS)}"
            )
    return _Pooled(name, file, own, dict(common), embeds)


def _tenure(model: _Pooled, only_idle: bool) -> Tenure:
    may_end = model.state == "loaded" and not model.pinned and not (only_idle and model.users)
    used_at = math.inf if model.users else model.used_at
    return Tenure(model.n_bytes, used_at, may_end, model.gpu_bytes)


def _close(owner: Engine | Embedder) -> None:
    owner.close()
    owner.model.close()
