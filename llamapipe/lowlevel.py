"""Use the pipeline without an engine: batches, outputs and traces of steps.

``llamapipe`` also exports ``Pipeline`` and ``DecodeBatch``. See the guide to the pipeline.
"""

from __future__ import annotations

from llamapipe.llama.batch import DecodeBatch
from llamapipe.pipeline.output import StepOutput
from llamapipe.pipeline.pipeline import Pipeline, PipelineStats
from llamapipe.pipeline.trace import Span, Trace

__all__ = ["DecodeBatch", "Pipeline", "PipelineStats", "Span", "StepOutput", "Trace"]
