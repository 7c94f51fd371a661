"""What llama.cpp itself does where nothing is sampled and nobody waits: llama-batched-bench."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from workload import Work


class Ceiling:
    """Prompts and decoding at one concurrency; a process a round, which loads the model outside its own timing."""

    def __init__(self, program: Path, model: Path, work: Work, unified: bool) -> None:
        self._work = work
        self._command = [
            str(program), "-m", str(model), "-c", str(work.n * work.n_ctx), "-b", "2048", "-ub", "512",
            "-npp", str(work.n_prompt), "-ntg", str(work.n_generate), "-npl", str(work.n),
            "-t", str(work.n_threads), "-tb", str(work.n_threads), "--output-format", "jsonl",
            "-kvu" if unified else "-no-kvu",
        ]  # fmt: skip

    def close(self) -> None:
        """Nothing is left of a round."""

    def run(self) -> dict[str, Any]:
        """Generated tokens per second, prompts included, and the two parts by themselves."""
        done = subprocess.run(self._command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"llama-batched-bench said nothing: {done.stderr[-2000:]}")
        said = json.loads(lines[-1])
        seconds = said["t_pp"] + said["t_tg"]
        n_tokens = self._work.n * self._work.n_generate
        return {"rate": n_tokens / seconds, "prefill_s": said["t_pp"], "decode_s": said["t_tg"]}
