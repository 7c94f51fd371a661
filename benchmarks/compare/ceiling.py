"""The throughput of llama.cpp itself, without sampling or waiting callers: llama-batched-bench."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from workload import Work

_TRIES = 5  # it may end before its log is written


class Ceiling:
    """Prompts and decoding at one concurrency; a process a round, which loads the model outside its own timing."""

    def __init__(self, program: Path, model: Path, work: Work, unified: bool) -> None:
        self._work = work
        self._took_s = 0.0  # the last time
        self._command = [
            str(program), "-m", str(model), "-c", str(work.n * work.n_ctx), "-b", "2048", "-ub", "512",
            "-npp", str(work.n_prompt), "-ntg", str(work.n_generate),
            "-t", str(work.n_threads), "-tb", str(work.n_threads),
            "-kvu" if unified else "-no-kvu", "-ngl", "all",
        ]  # fmt: skip

    def close(self) -> None:
        """Nothing is left of a round."""

    def run(self) -> dict[str, Any]:
        """Generated tokens per second, prompts included, and the two parts by themselves."""
        warm = int(self._work.warms_up(self._took_s))
        n_timed = self._work.n_timed(self._took_s)
        times = [str(self._work.n)] * (warm + n_timed)
        for _ in range(_TRIES):
            done = subprocess.run(
                [*self._command, "-npl", ",".join(times)], capture_output=True, text=True, check=False
            )
            lines = done.stdout.splitlines()
            rows = [line.strip("|").split("|") for line in lines if re.match(r"\| *\d", line)]
            if len(rows) == len(times):
                break
        else:
            raise RuntimeError(f"llama-batched-bench said nothing: {done.stderr[-2000:]}")
        prefill_s = decode_s = n_tokens = 0.0
        for row in rows[warm:]:
            n_prompt, n_generate, n, _, _, prompt_rate, _, rate, *_ = map(float, row)
            prefill_s += n_prompt * n / prompt_rate  # its seconds have three decimals
            decode_s += n_generate * n / rate
            n_tokens += n_generate * n
        self._took_s = (prefill_s + decode_s) / n_timed
        return {"rate": n_tokens / (prefill_s + decode_s), "prefill_s": prefill_s, "decode_s": decode_s}
