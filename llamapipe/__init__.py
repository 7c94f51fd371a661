"""llamapipe: GGUF models through llama.cpp, in process, for many callers at once.

    import llamapipe as lp

    with lp.Model.demo() as model, lp.Engine(model) as engine:  # or lp.Model("model.gguf")
        out = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=32))
        print(out.text)

``Model`` loads a file. ``Engine`` completes prompts and holds conversations for all threads and tasks: ``generate``,
``stream``, ``chat``, ``score``, and ``agenerate`` … for asyncio. ``SamplingParams`` holds a request's options.
``run_batch`` processes many records, ``Embedder`` makes vectors, ``llamapipe.compat`` stands in for llama-cpp-python.
``lp.types`` has types that few programs name; ``lp.lowlevel`` drives the pipeline without an engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from llamapipe import errors

if TYPE_CHECKING:
    from llamapipe import lowlevel, telemetry, types
    from llamapipe._sync.streams import ChatStream, Generation, Stream
    from llamapipe.chat.results import ToolCall
    from llamapipe.chat.tools import Tool
    from llamapipe.embedding import Embedder, Ranked
    from llamapipe.engine import Engine, EngineTuning
    from llamapipe.jobs.batch import BatchResult, run_batch
    from llamapipe.jobs.run import BatchSummary
    from llamapipe.kv_events import KvEvents
    from llamapipe.llama.adapter import Adapter, ControlVector
    from llamapipe.llama.batch import DecodeBatch
    from llamapipe.llama.devices import Device, devices
    from llamapipe.llama.model import Model, demo_model_path
    from llamapipe.params import SamplingParams
    from llamapipe.pipeline.pipeline import Pipeline
    from llamapipe.results import (
        ChatCompletion,
        ChatDelta,
        Choice,
        Completion,
        Delta,
        EngineStats,
        Score,
        Token,
    )
    from llamapipe.streams import AsyncChatStream, AsyncGeneration, AsyncStream

__version__ = "0.1.0"

__all__ = [
    "Adapter", "AsyncChatStream", "AsyncGeneration", "AsyncStream", "BatchResult", "BatchSummary", "ChatCompletion",
    "ChatDelta", "ChatStream", "Choice", "Completion", "ControlVector", "DecodeBatch", "Delta", "Device",
    "Embedder", "Engine", "EngineStats", "EngineTuning", "Generation", "KvEvents", "Model", "Pipeline", "Ranked",
    "SamplingParams", "Score", "Stream", "Token", "Tool", "ToolCall", "__version__", "demo_model_path", "devices",
    "errors", "lowlevel", "run_batch", "telemetry", "types",
]  # fmt: skip
# The module of each public name. A module is imported when one of its names is first used.
_NAMES = {
    "_sync.streams": ("ChatStream", "Generation", "Stream"),
    "chat.results": ("ToolCall",),
    "chat.tools": ("Tool",),
    "embedding": ("Embedder", "Ranked"),
    "engine": ("Engine", "EngineTuning"),
    "jobs.batch": ("BatchResult", "run_batch"),
    "jobs.run": ("BatchSummary",),
    "kv_events": ("KvEvents",),
    "llama.adapter": ("Adapter", "ControlVector"),
    "llama.batch": ("DecodeBatch",),
    "llama.devices": ("Device", "devices"),
    "llama.model": ("Model", "demo_model_path"),
    "params": ("SamplingParams",),
    "pipeline.pipeline": ("Pipeline",),
    "results": (
        "ChatCompletion",
        "ChatDelta",
        "Choice",
        "Completion",
        "Delta",
        "EngineStats",
        "Score",
        "Token",
    ),
    "streams": ("AsyncChatStream", "AsyncGeneration", "AsyncStream"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("lowlevel", "telemetry", "types")  # imported on first use, too
_NOT_IMPORTED = ("compat", "dynamo", "lm_eval", "ray", "server")


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name on first use. An AttributeError suggests the nearest name, or the missing import."""
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(f"llamapipe.{_HOMES[name]}"), name)
            return value
        if name in _MODULES:
            return import_module(f"llamapipe.{name}")
        from llamapipe._messages import unknown_attribute

        if name in _NOT_IMPORTED:
            raise AttributeError(f"llamapipe.{name} is not imported yet: import llamapipe.{name}", name=name)
        for place in ("types", "lowlevel"):
            if name in import_module(f"llamapipe.{place}").__all__:
                raise AttributeError(f"llamapipe has no {name}: it is llamapipe.{place}.{name}", name=name)
        raise unknown_attribute("llamapipe", name, __all__, "llamapipe")


def __dir__() -> list[str]:
    """Return the public names, for completion in an editor or notebook."""
    return list(__all__)
