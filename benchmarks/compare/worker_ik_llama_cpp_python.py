"""ik-llama-cpp-python, a fork of llama.cpp with other CPU kernels: one after another, as behind a lock.

The binding samples in a Python loop over the vocabulary, which takes longer than the step of a small model, and it
always ends with the end of generation. Here numpy finds the best token of its logits, so that its kernels are measured.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import numpy as np
from ik_llama_cpp import IkLlama, _ctypes_api
from ik_llama_cpp._internals import make_batch_range
from worker import Measured, Run, serve
from workload import Work


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """Whole completions with their text; it keeps no prefixes."""
    if work.schema:
        raise SystemExit("it has no grammars")
    llama = IkLlama(str(path), n_ctx=work.n_ctx, n_threads=work.n_threads)
    context = llama._context
    n_vocab = llama._model.n_vocab

    def decode(tokens: list[int], pos: int) -> int:
        batch = make_batch_range(tokens, pos_start=pos)
        code = context.decode(batch)
        _ctypes_api.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return int(np.ctypeslib.as_array(context.get_logits(), (n_vocab,)).argmax())

    def run(prompts: list[list[int]]) -> Measured:
        n = 0
        began = perf_counter()
        for prompt in prompts:
            context.kv_cache_clear()
            tokens = [decode(prompt, 0)]
            while len(tokens) < work.n_generate:
                tokens.append(decode(tokens[-1:], len(prompt) + len(tokens) - 1))
            llama.detokenize(tokens)
            n += len(tokens)
        return Measured(perf_counter() - began, n, [])

    return run


serve(start)
