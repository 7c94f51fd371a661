"""Programs that end while another thread is in the middle of a call: never by a signal, and they never hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.bert_model import bert_model
from support.gguf_models import tiny_model
from support.run_script import environment, run_script

import llamapipe as lp

PROGRAM = Path(__file__).resolve().parent.parent / "support" / "exits.py"
# Those whose first grammar reads the vocabulary: with a large one, which takes long enough to be hit.
_GRAMMARS = ("schema, checked", "schema, async", "regex", "lark")


def sweep(n: int, model: Path, embedding_model: Path, *names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, str(n), "1", model, embedding_model, *names],
        env=environment(),
        cwd=model.parent,
        stdout=None if n else subprocess.PIPE,  # who waits for 200 of each sees how far they are
        stderr=subprocess.PIPE,
        text=True,
        timeout=None if "LLAMAPIPE_EXITS" in os.environ else 300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout or "") + done.stderr


@pytest.mark.native
@pytest.mark.timeout(0 if "LLAMAPIPE_EXITS" in os.environ else 900)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks for each run")
def test_at_random_instants(tmp_path: Path) -> None:
    """Ten ends of all calls, four at once; ``nox -s exits`` tries 200 of each one, real vocabularies included."""
    pytest.importorskip("llguidance")
    pytest.importorskip("starlette")
    n = int(os.environ.get("LLAMAPIPE_EXITS", "0"))
    embedding_model, _ = bert_model(tmp_path / "bert.gguf")
    sweep(n, lp.demo_model_path(), embedding_model)
    real = [Path(path) for path in os.environ.get("LLAMAPIPE_EXIT_MODELS", "").split(os.pathsep) if path]
    vocabulary = "qwen2" if n else "gpt-2"  # of 152,000 tokens, and of 50,000, which are written in less time
    for path in real or [tiny_model(tmp_path / "tiny.gguf", vocabulary)]:
        sweep(n, path, embedding_model, *_GRAMMARS)


def test_while_a_daemon_thread_compiles_a_grammar(tiny: lp.Model) -> None:
    """The thread must not ask for the interpreter's lock inside llguidance when the interpreter is gone."""
    pytest.importorskip("llguidance")
    program = """
import atexit, threading
import llamapipe as lp
from llamapipe.structured.compile import compile_guide

GRAMMAR = "start: " + " | ".join(f'"{i:x}" w' for i in range(2500)) + "\\nw: /[a-z]{3,60}/"

def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "_matcher":
        compiling.set()

def work():
    compile_guide(model, lark=GRAMMAR)
    compiled.set()

model = lp.Model(sys.argv[1])
compiling, compiled = threading.Event(), threading.Event()
threading.setprofile(watch)
threading.Thread(target=work, daemon=True).start()
compiling.wait()
"""
    run_script(program, tiny.path)
    run_script(program + "atexit.register(lambda: say(compiled.is_set()))\n", tiny.path)


@pytest.mark.native
@pytest.mark.parametrize("what", ["embedding", "_engine.runtime.thread"])
def test_between_registering_and_starting_a_thread(
    what: str, tmp_path: Path, demo: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is closed at the exit before its thread has begun waits until it has."""
    errors: list[BaseException] = []
    closers: list[threading.Thread] = []

    def close(item: Any) -> None:
        try:
            item.close(False)
        except BaseException as e:
            errors.append(e)

    def close_already(item: Any) -> None:
        closers.append(threading.Thread(target=close, args=(item,)))
        closers[0].start()
        closers[0].join(0.2)  # time to fail

    monkeypatch.setattr(f"llamapipe.{what}.close_at_exit", close_already)
    if what == "embedding":
        with lp.Embedder(bert_model(tmp_path / "bert.gguf")[0], n_threads=1):
            closers[0].join()
    else:
        with lp.Engine(demo, n_ctx=64, n_seq_max=1):
            closers[0].join()
    assert errors == []
