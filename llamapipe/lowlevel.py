"""Use it to drive the pipeline without an engine: batches, outputs and traces of steps.

``Pipeline`` and ``DecodeBatch`` are also names of ``llamapipe``. See the guide to the pipeline.
"""

from __future__ import annotations

from llamapipe.llama.batch import DecodeBatch
from llamapipe.pipeline.output import StepOutput
from llamapipe.pipeline.pipeline import Pipeline, PipelineStats
from llamapipe.pipeline.trace import Span, Trace

__all__ = ["DecodeBatch", "Pipeline", "PipelineStats", "Span", "StepOutput", "Trace"]
