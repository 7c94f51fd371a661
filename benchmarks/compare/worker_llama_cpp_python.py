"""llama-cpp-python: one after another, as behind a lock."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

from llama_cpp import Llama, LlamaGrammar
from worker import Measured, Run, serve
from workload import SCHEMA, Work


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """Whole completions with their text."""
    llama = Llama(
        str(path),
        n_ctx=work.n_ctx,
        n_threads=work.n_threads,
        n_threads_batch=work.n_threads,
        verbose=False,
    )

    grammar = LlamaGrammar.from_json_schema(json.dumps(SCHEMA), verbose=False) if work.schema else None

    def run(prompts: list[list[int]]) -> Measured:
        n = 0
        began = perf_counter()
        for prompt in prompts:
            if not work.n_shared:
                llama.reset()  # without it, the prefix shared with the previous prompt stays cached
            out = llama.create_completion(
                prompt, max_tokens=work.n_generate, temperature=0.0, grammar=grammar
            )
            n += out["usage"]["completion_tokens"]
        return Measured(perf_counter() - began, n, [])

    return run


serve(start)
