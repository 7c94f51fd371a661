"""xllamacpp: llama-server's engine in process, a thread for each request, whole completions."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter

import xllamacpp
from worker import Measured, Run, serve
from workload import Work


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """One server object."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = work.n
    params.n_ctx = work.n * work.n_ctx
    params.n_batch, params.n_ubatch = 2048, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work.n_threads
    params.kv_unified = False
    params.cache_ram_mib = 0
    params.warmup = True
    server = xllamacpp.Server(params)

    def run(prompts: list[list[int]]) -> Measured:
        counts: list[int] = []

        def complete(prompt: list[int]) -> None:
            out = server.handle_completions(
                {
                    "prompt": prompt, "n_predict": work.n_generate, "max_tokens": work.n_generate, "temperature": 0,
                    "ignore_eos": True, "cache_prompt": False, "samplers": [],
                }
            )  # fmt: skip
            counts.append(out["usage"]["completion_tokens"])

        jobs = [threading.Thread(target=complete, args=(prompt,)) for prompt in prompts]
        began = perf_counter()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return Measured(perf_counter() - began, sum(counts), [])

    return run


serve(start)
