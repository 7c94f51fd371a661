"""What `llamapipe doctor` tries in a process of its own: a library built for another processor ends its process.

``python -m llamapipe.cli.probe`` writes one JSON object a line, ``{"name": …, …}``, each as soon as it is known, so the
parent can tell how far it came.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def native() -> dict[str, Any]:
    """Load the native module and the backends."""
    from llamapipe.native.load import native as load

    module = load()
    return {"file": module.__file__}


def devices() -> dict[str, Any]:
    """Ask the backends for their devices."""
    import llamapipe as lp

    return {"devices": [dataclasses.asdict(device) for device in lp.devices()]}


def demo_model() -> dict[str, Any]:
    """Load the model in the box and generate from it."""
    import llamapipe as lp

    start = time.perf_counter()
    with lp.Model.demo() as model, lp.Engine(model, n_seq_max=1) as engine:
        loaded = time.perf_counter()
        out = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=8, temperature=0))
        done = time.perf_counter()
    return {
        "path": str(lp.demo_model_path()),
        "n_tokens": len(out.token_ids),
        "text": out.text,
        "load_s": round(loaded - start, 3),
        "generate_s": round(done - loaded, 3),
    }


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "native module": native,
    "devices": devices,
    "demo model": demo_model,
}


def main() -> int:
    """Run the probes in order, stop at the first that fails."""
    for name, probe in PROBES.items():
        print(json.dumps({"name": name, "begin": True}), flush=True)
        try:
            result = {"name": name, "ok": True, **probe()}
        except Exception as error:
            result = {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)
        if not result["ok"]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
