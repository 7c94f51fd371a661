"""llamapipe: GGUF models through llama.cpp, in process, for many callers at once.

    import llamapipe as lp

    with lp.Model.demo() as model, lp.Engine(model) as engine:  # or lp.Model("model.gguf")
        out = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=32))
        print(out.text)

``Model`` loads a file. ``Engine`` completes prompts and holds conversations for all threads and tasks: ``generate``,
``stream``, ``chat``, ``score``, and ``agenerate`` … for asyncio. ``SamplingParams`` has the options of a request.
``run_batch`` processes many records, ``Embedder`` makes vectors, ``llamapipe.compat`` stands in for llama-cpp-python.
"""

from llamapipe import errors, telemetry
from llamapipe._sync.streams import ChatStream, Generation, Stream
from llamapipe.chat.results import ToolCall, ToolCallDelta
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
from llamapipe.pipeline.output import StepOutput
from llamapipe.pipeline.pipeline import Pipeline, PipelineStats
from llamapipe.pipeline.trace import Span, Trace
from llamapipe.results import (
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    Choice,
    Completion,
    Delta,
    EngineStats,
    Score,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
)
from llamapipe.streams import AsyncChatStream, AsyncGeneration, AsyncStream

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AsyncChatStream",
    "AsyncGeneration",
    "AsyncStream",
    "BatchResult",
    "BatchSummary",
    "ChatChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatStream",
    "Choice",
    "Completion",
    "ControlVector",
    "DecodeBatch",
    "Delta",
    "Device",
    "Embedder",
    "Engine",
    "EngineStats",
    "EngineTuning",
    "Generation",
    "KvEvents",
    "Model",
    "Pipeline",
    "PipelineStats",
    "Ranked",
    "SamplingParams",
    "Score",
    "Span",
    "StepOutput",
    "Stream",
    "Timings",
    "Token",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Trace",
    "__version__",
    "demo_model_path",
    "devices",
    "errors",
    "run_batch",
    "telemetry",
]


_NOT_IMPORTED = ("compat", "dynamo", "lm_eval", "ray", "server")


def __getattr__(name: str) -> object:
    """Raises AttributeError with the nearest public name, or with the import that is missing."""
    from llamapipe._messages import unknown_attribute

    if name in _NOT_IMPORTED:
        raise AttributeError(f"llamapipe.{name} is not imported yet: import llamapipe.{name}", name=name)
    raise unknown_attribute("llamapipe", name, __all__, "llamapipe")


def __dir__() -> list[str]:
    """The public names, for completion in an editor or notebook."""
    return list(__all__)
