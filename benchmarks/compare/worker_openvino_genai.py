"""OpenVINO GenAI, which reads some GGUF files: all prompts as one batch, whole completions."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import Measured, Run, serve
from workload import SCHEMA, Work


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """One pipeline; it caches prefixes where prompts share one."""
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": work.n_threads}
    if work.n_shared:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GB
        options["scheduler_config"] = scheduler
    pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = work.n_generate
    config.do_sample = False
    config.ignore_eos = not work.schema
    if work.schema:
        config.structured_output_config = openvino_genai.StructuredOutputConfig(
            json_schema=json.dumps(SCHEMA)
        )

    def run(prompts: list[list[int]]) -> Measured:
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        began = perf_counter()
        out = pipeline.generate(inputs, config)
        return Measured(perf_counter() - began, sum(map(len, out.tokens)), [])

    return run


serve(start)
