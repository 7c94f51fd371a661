"""Damaged models: each loads and runs or is refused with an error; none ends, hangs or confuses the process."""

from __future__ import annotations

import collections
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import every_architecture
from support.assistant_models import assistant, assistant_target
from support.dflash_models import dflash_draft
from support.eagle3_models import eagle3_draft, eagle3_target
from support.every_architecture import architectures
from support.gguf_fuzz_worker import use
from support.gguf_models import tiny_model, tiny_variant

N_MUTANTS = int(os.environ.get("LLAMAPIPE_MUTANTS", "600"))  # `nox -s fuzz`: 50,000
N_PROCESSES = 2
# A mutant takes milliseconds; a machine that is busy with other things may stall for a while.
HUNG_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``loaded``, ``refused``, ``wrong``, ``died`` or ``hung``, and why."""

    index: int
    seed: int
    kind: str
    reason: str
    seconds: float


class Runner:
    """Feeds mutants to worker processes; a worker that dies or hangs is replaced and its mutant noted."""

    def __init__(self, folder: Path, bases: list[Path], jobs: list[tuple[int, int]]) -> None:
        self.outcomes: list[Outcome] = []
        self._folder, self._bases = folder, bases
        self._jobs = collections.deque(jobs)
        self._lock = threading.Lock()

    def run(self, n_processes: int) -> list[Outcome]:
        threads = [threading.Thread(target=self._work) for _ in range(n_processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(self.outcomes, key=lambda outcome: outcome.seed)

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs else None

    def _work(self) -> None:
        job = self._next()
        while job is not None:
            job = self._one_process(job)

    def _one_process(self, job: tuple[int, int] | None) -> tuple[int, int] | None:
        """Work with one process until it ends; returns the job to go on with."""
        command = [
            sys.executable,
            "-u",
            str(Path(__file__).parents[1] / "support" / "gguf_fuzz_worker.py"),
            str(self._folder),
        ]
        # Without the second, ggml starts a debugger to show where it aborts.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "GGML_NO_BACKTRACE": "1",
        }
        errors = (self._folder / f"stderr-{threading.get_ident()}").open("w+b")
        worker = subprocess.Popen(
            [*command, *map(str, self._bases)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        with errors, worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            while job is not None:
                began = time.monotonic()
                worker.stdin.write(b"%d %d\n" % job)
                worker.stdin.flush()
                ready, _, _ = select.select([worker.stdout], [], [], HUNG_S)
                line = worker.stdout.readline().decode() if ready else ""
                if line.endswith("\n"):
                    kind, _, reason = line.strip().partition(" ")
                    self.outcomes.append(Outcome(*job, kind, reason, time.monotonic() - began))
                    job = self._next()
                    continue
                worker.kill() if not ready else worker.wait()
                status = worker.wait()
                name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                errors.seek(0)
                reason = f"{name}: {errors.read().decode(errors='replace')[-600:]}"
                self.outcomes.append(
                    Outcome(*job, "died" if ready else "hung", reason, time.monotonic() - began)
                )
                return self._next()
            worker.stdin.close()
        return None


@pytest.mark.timeout(900 + N_MUTANTS // 10)
def test_damaged_models(tmp_path: Path) -> None:
    bases = [tiny_model(tmp_path / f"{name}.gguf", f"builtin-{name}") for name in ("spm", "bpe")]
    bases += [tiny_model(tmp_path / "q8.gguf", "builtin-spm", "q8_0")]
    bases += [tiny_variant(tmp_path / f"{name}.gguf", name) for name in ("bert", "t5", "rwkv", "gemma4")]
    jobs = [(seed % len(bases), seed) for seed in range(N_MUTANTS)]
    outcomes = Runner(tmp_path, bases, jobs).run(N_PROCESSES)
    assert len(outcomes) == N_MUTANTS
    bad = [outcome for outcome in outcomes if outcome.kind not in ("loaded", "refused")]
    assert not bad, f"{len(bad)} of {N_MUTANTS}, such as {bad[:3]}"
    # Loading and refusing must both occur in numbers, else the damage is too wild or too tame to show anything.
    kinds = collections.Counter(outcome.kind for outcome in outcomes)
    assert kinds["loaded"] > N_MUTANTS // 8
    assert kinds["refused"] > N_MUTANTS // 3
    # Most refusals are ours, with a message of our own; llama.cpp's own come through as its log says them.
    assert sum("llama.cpp could not load" in outcome.reason for outcome in outcomes) < kinds["refused"] // 3
    assert not [outcome for outcome in outcomes if "no reason was logged" in outcome.reason]


@pytest.mark.timeout(900 + N_MUTANTS // 10)
def test_damaged_drafts(tmp_path: Path) -> None:
    """Files that draft for a model and read what it computes, or its cells; they must fit it."""
    models = [eagle3_target(tmp_path / "m0.gguf"), assistant_target(tmp_path / "m1.gguf")]
    models += [models[0]] * 2
    drafts = [
        eagle3_draft(tmp_path / "d0.gguf", models[0], 0.6),
        assistant(tmp_path / "d1.gguf", models[1], 0.6),
        dflash_draft(tmp_path / "d2.gguf", models[0], None, window=24, has_sections=True),
        dflash_draft(tmp_path / "d3.gguf", models[0], None, is_dspark=True),
    ]
    bases = [Path(f"{draft}={model}") for draft, model in zip(drafts, models, strict=True)]
    n = N_MUTANTS // 3
    outcomes = Runner(tmp_path, bases, [(seed % len(bases), seed) for seed in range(n)]).run(N_PROCESSES)
    bad = [outcome for outcome in outcomes if outcome.kind not in ("loaded", "refused")]
    assert not bad, f"{len(bad)} of {n}, such as {bad[:3]}"
    for i in range(len(bases)):
        kinds = collections.Counter(outcome.kind for outcome in outcomes if outcome.index == i)
        assert min(kinds["loaded"], kinds["refused"]) > n // len(bases) // 12, kinds


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture of the pinned llama.cpp, by name; made in other processes, which must live."""
    folder = tmp_path_factory.mktemp("architectures")
    names = architectures()
    program = [sys.executable, str(Path(every_architecture.__file__)), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    workers = [
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(N_PROCESSES)
    ]
    with ThreadPoolExecutor(N_PROCESSES) as pool:
        lots = [names[i::N_PROCESSES] for i in range(N_PROCESSES)]
        done = list(pool.map(lambda worker, lot: worker.communicate("\n".join(lot))[0], workers, lots))
    assert [worker.returncode for worker in workers] == [0] * N_PROCESSES
    reasons = dict(zip(itertools.chain(*lots), "".join(done).splitlines(), strict=True))
    missing = {name: reason for name, reason in reasons.items() if reason != "loads"}
    assert len(missing) <= len(names) // 15, missing
    return {name: folder / f"{name}.gguf" for name in names}


def test_every_architecture(tmp_path: Path, grown: dict[str, Path]) -> None:
    """Whole models of random sizes, and those that the loader still refuses: none ends the process."""
    jobs = [(i, -1) for i in range(len(grown))]
    outcomes = Runner(tmp_path, list(grown.values()), jobs).run(N_PROCESSES)
    bad = [outcome for outcome in outcomes if outcome.kind not in ("loaded", "refused")]
    assert not bad, f"{len(bad)} of {len(grown)}, such as {bad[:3]}"
    # The others fail at their first step: their layers are all of one kind, or they belong to another model.
    assert sum(outcome.kind == "loaded" for outcome in outcomes) > len(grown) // 2


@pytest.mark.timeout(900 + N_MUTANTS // 10)
def test_damaged_models_of_every_architecture(tmp_path: Path, grown: dict[str, Path]) -> None:
    jobs = [(seed % len(grown), seed) for seed in range(N_MUTANTS)]
    outcomes = Runner(tmp_path, list(grown.values()), jobs).run(N_PROCESSES)
    names = list(grown)
    bad = [
        (names[outcome.index], outcome) for outcome in outcomes if outcome.kind not in ("loaded", "refused")
    ]
    assert not bad, f"{len(bad)} of {N_MUTANTS}, such as {bad[:3]}"
    assert sum(outcome.kind == "loaded" for outcome in outcomes) > N_MUTANTS // 10


def test_undamaged_models(tmp_path: Path) -> None:
    """What the workers do works, and the runner notices a worker that dies."""
    path = tiny_model(tmp_path / "spm.gguf")
    assert use(path) == "loaded"
    absent = [path, tmp_path / "absent.gguf"]
    outcomes = Runner(tmp_path, absent, [(0, 0), (0, 1)]).run(1)
    assert [outcome.kind for outcome in outcomes] == ["died", "died"]
    assert all("FileNotFoundError" in outcome.reason for outcome in outcomes)
