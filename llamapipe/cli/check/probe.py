"""The checks that `llamapipe doctor` runs in a child process, which a library for another processor would kill.

``main`` writes one JSON object a line, ``{"name": …, …}``, each as soon as it is known,
so the parent knows which probe failed.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamapipe.cli.check.model_file import look_at
from llamapipe.errors import LlamapipeError


def native() -> dict[str, Any]:
    """Load the native module and the backends."""
    from llamapipe.native.load import backends_not_loaded
    from llamapipe.native.load import native as load

    module = load()
    lib, texts = module.lib, {}
    for name, text in (("level", lib.lp_kernels_level()), ("problem", lib.lp_kernels_problem())):
        texts[name] = None if text == module.ffi.NULL else module.ffi.string(text).decode()
    return {"file": module.__file__, "not_loaded": backends_not_loaded(), "kernels": texts}


def devices() -> dict[str, Any]:
    """Ask the backends for their devices."""
    import llamapipe as lp

    return {"devices": [dataclasses.asdict(device) for device in lp.devices()]}


def demo_model() -> dict[str, Any]:
    """Load the bundled model and generate from it."""
    import llamapipe as lp
    from llamapipe.llama.kv_memory import kv_bytes

    start = time.perf_counter()
    with lp.Model.demo() as model, lp.Engine(model) as engine:
        loaded = time.perf_counter()
        out = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=8, temperature=0))
        done = time.perf_counter()
        kv = kv_bytes(model, engine.n_cells, "f16", "f16")  # the default cache types
        n_cells, n_seq_max = engine.n_cells, engine.n_seq_max
    return {
        "path": str(lp.demo_model_path()),
        "n_tokens": len(out.token_ids),
        "text": out.text,
        "n_cells": n_cells,
        "n_seq_max": n_seq_max,
        "kv_bytes": kv,
        "load_s": round(loaded - start, 3),
        "generate_s": round(done - loaded, 3),
    }


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "native module": native,
    "devices": devices,
    "demo model": demo_model,
}


def main(files: Sequence[str] = ()) -> int:
    """Run the probes in order, then look at model files, and stop at the first failure."""
    probes = PROBES | {f"model {file}": lambda file=file: look_at(Path(file)) for file in files}
    for name, probe in probes.items():
        print(json.dumps({"name": name, "begin": True}), flush=True)
        try:
            result = {"name": name, "ok": True, **probe()}
        except Exception as error:
            text = str(error) if isinstance(error, LlamapipeError) else f"{type(error).__name__}: {error}"
            result = {"name": name, "ok": False, "error": text}
        print(json.dumps(result), flush=True)
        if not result["ok"]:
            return 1
    return 0
