"""Shows whether a request that takes long, or is refused, slows other requests of the same engine.

    python benchmarks/bench_isolation.py [MODEL.gguf] [--only TEXT] [--seconds 3] [--json FILE]

Four streams run all the time, each in a thread. A fifth thread starts a short stream again and again, for the times to
the first token. For each hostile input there is a quiet period and one in which a sixth thread submits the input over
and over. Printed are quantiles of the gaps between tokens of the four streams, and the median time to the first token,
of both periods. Goals: gaps at most 3 times the quiet ones at the 99.9th percentile, first tokens at most twice.
Without a model: the bundled one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any

sys.path[0:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from hostile_inputs import hostile_inputs  # noqa: E402

import llamapipe as lp  # noqa: E402
from llamapipe.errors import LlamapipeError  # noqa: E402

_N_STREAMS = 4
_PAUSE_S = 0.02  # between two short streams
_MAX_ITL_MS = 25.0  # cuts prompts into chunks
_REST_S = 0.005  # after an answer to a hostile input: a thread that only computes keeps the GIL from others


class Observer:
    """Streams that run until ``close`` and record gaps between tokens and times to the first token, in seconds."""

    def __init__(self, engine: lp.Engine) -> None:
        self.gaps: list[float] = []
        self.first: list[float] = []
        self._engine = engine
        self._ended = Event()
        self._threads = [Thread(target=self._read, args=(i,)) for i in range(_N_STREAMS)]
        self._threads.append(Thread(target=self._probe))
        for thread in self._threads:
            thread.start()

    def _read(self, i: int) -> None:
        n_ctx = self._engine.n_ctx
        while not self._ended.is_set():
            params = lp.SamplingParams(max_tokens=n_ctx - 100, ignore_eos=True, seed=i)
            last = None
            for _ in self._engine.stream([310 + i, 320, 330], params):
                now = perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                if self._ended.is_set():
                    break

    def _probe(self) -> None:
        params = lp.SamplingParams(max_tokens=2, ignore_eos=True)
        n = 0
        while not self._ended.is_set():
            n += 1
            began = perf_counter()
            for _ in self._engine.stream([400 + n % 97, *range(300, 330)], params):
                self.first.append(perf_counter() - began)
                break
            sleep(_PAUSE_S)

    def reset(self) -> tuple[list[float], list[float]]:
        """The gaps and times recorded since the last call."""
        gaps, first = self.gaps, self.first
        self.gaps, self.first = [], []
        return gaps, first

    def close(self) -> None:
        """Ends the streams."""
        self._ended.set()
        for thread in self._threads:
            thread.join()


@dataclass
class Row:
    """One hostile input: milliseconds, quiet and beside it."""

    name: str
    n_gaps: int
    n_submitted: int
    answer: str
    p50_ms: tuple[float, float]
    p999_ms: tuple[float, float]
    max_ms: tuple[float, float]
    first_ms: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The 99.9th percentile beside the input over the quiet one."""
        return self.p999_ms[1] / self.p999_ms[0]

    @property
    def first_ratio(self) -> float:
        """The median time to the first token beside the input over the quiet one."""
        return self.first_ms[1] / self.first_ms[0]


def quantile(values: list[float], q: float) -> float:
    """A quantile, in milliseconds."""
    ordered = sorted(values)
    return 1e3 * ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def measured(name: str, attack: Any, engine: lp.Engine, observer: Observer, seconds: float) -> Row:
    """A quiet period, and one in which ``attack`` is called again and again."""
    if hasattr(attack, "is_lazy"):
        attack(engine)
    observer.reset()
    sleep(seconds)
    quiet = observer.reset()
    ended, answers = Event(), [0, ""]

    def work() -> None:
        while not ended.is_set():
            try:
                attack(engine)
                answers[1] = "answered"
            except (LlamapipeError, ValueError, TypeError, RuntimeError, TimeoutError) as e:
                answers[1] = f"{type(e).__name__}: {str(e)[:90]}"
            answers[0] += 1  # type: ignore[operator]
            sleep(_REST_S)

    thread = Thread(target=work)
    thread.start()
    sleep(seconds)
    ended.set()
    loud = observer.reset()
    thread.join()
    pairs: dict[str, tuple[float, float]] = {}
    for key, q in (("p50_ms", 0.5), ("p999_ms", 0.999), ("max_ms", 1.0)):
        pairs[key] = (quantile(quiet[0], q), quantile(loud[0] or [seconds], q))
    first = tuple(1e3 * statistics.median(times or [seconds]) for times in (quiet[1], loud[1]))
    return Row(name, len(loud[0]), answers[0], answers[1], first_ms=first, **pairs)  # type: ignore[arg-type]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="inputs whose name holds this text")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each period")
    parser.add_argument("--switch-interval", type=float, help="of the interpreter, in seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.switch_interval is not None:
        sys.setswitchinterval(args.switch_interval)
    rows = []
    print(
        f"{'input':42s} {'p99.9 gap, ms':>16s} {'times':>6s} {'first, ms':>14s} {'times':>6s} {'max gap':>8s}  answer"
    )
    with (
        lp.Model.demo() if args.model is None else lp.Model(args.model) as model,
        lp.Engine(model, n_ctx=2048, n_seq_max=16, max_itl_ms=_MAX_ITL_MS) as engine,
    ):
        observer = Observer(engine)
        try:
            sleep(1.0)
            for name, attack in hostile_inputs(model.n_vocab).items():
                if args.only not in name:
                    continue
                row = measured(name, attack, engine, observer, args.seconds)
                rows.append(row)
                print(
                    f"{name:42s} {row.p999_ms[0]:7.1f} {row.p999_ms[1]:8.1f} {row.ratio:6.1f} "
                    f"{row.first_ms[0]:6.1f} {row.first_ms[1]:7.1f} {row.first_ratio:6.1f} {row.max_ms[1]:8.1f}"
                    f"  {row.n_submitted} x {row.answer}",
                    flush=True,
                )
        finally:
            observer.close()
    missed = [row.name for row in rows if row.ratio > 3 or row.first_ratio > 2]
    print(f"{len(rows)} inputs; {len(missed)} miss a goal: {', '.join(missed)}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"machine": platform.processor(), "rows": [asdict(r) for r in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
