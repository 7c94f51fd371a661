"""Damaged adapter files: each is loaded and computes, or is refused with an error; none ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.adapters import make_adapter
from support.gguf_models import tiny_model

N_MUTANTS = int(os.environ.get("LLAMAPIPE_MUTANTS", "600")) // 2
PROGRAM = """
import sys
from pathlib import Path
import llamapipe as lp
from llamapipe.errors import LlamapipeError
from llamapipe.llama import Context, DecodeBatch
from support.gguf_mutations import mutate

folder, first, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
whole, counts = (folder / "a.gguf").read_bytes(), {"loaded": 0, "refused": 0}
with lp.Model(folder / "tiny.gguf") as model, Context(model, n_ctx=64, n_threads=1) as context:
    for seed in range(first, first + n):
        print("seed", seed, flush=True)
        file = folder / "mutant.gguf"
        file.write_bytes(mutate(whole, seed)[0])
        try:
            with model.load_adapter(file, "mutant") as adapter:
                context.set_adapters(model.adapters.choose(adapter))
                context.clear()
                context.decode(DecodeBatch([1, 40, 77], [0, 1, 2], [0] * 3, [0, 0, 1]))
                context.logits(2)
                context.set_adapters(None)
            counts["loaded"] += 1
        except LlamapipeError as error:
            assert str(error)
            counts["refused"] += 1
    context.clear()
    context.decode(DecodeBatch([1], [0], [0], [1]))
print(counts)
"""


def test_no_mutant_ends_the_process(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf", type_name="f32")
    make_adapter(tmp_path / "a.gguf", model, name="a", invocation=[5, 6])
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "0", str(N_MUTANTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-200:] + process.stderr[-2000:]
    assert "'refused': 0" not in process.stdout and "'loaded': 0" not in process.stdout
