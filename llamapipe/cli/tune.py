"""``llamapipe tune``: measures threads, slots and KV types, and prints the constructor call that was fastest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import llamapipe as lp
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.bench import BUSY_CORES, Load, LoadRunner, Speed, busy_note
from llamapipe.cli.options import (
    MODEL,
    add_model,
    add_options,
    defaults_of,
    open_engine,
    open_model,
    read_options,
)
from llamapipe.cli.parser import UsageError
from llamapipe.host.cores import usable_cores

USAGE = "llamapipe tune [options]"
DESCRIPTION = """\
Measure compute threads, the number of slots and the types of the KV cache for a model on this machine. Print the
fastest constructor call. Run it while nothing else runs: a measurement that other work disturbed is repeated, and what
remains disturbed is told."""
# The gain that a larger number must bring. Less is noise, and a smaller number saves memory or leaves cores free.
_GAIN = 1.05
_TRIES = 3  # maximum number of attempts if other work disturbs a measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    parser.add_argument(
        "-c",
        "--n-ctx",
        type=int,
        default=1024,
        metavar="N",
        help="context of a request; 0: the model's (default: 1024)",
    )
    parser.add_argument(
        "--slots", type=int, default=32, metavar="N", help="maximum number of slots to try (default: 32)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, metavar="N", help="length of a prompt (default: 64)"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=32, metavar="N", help="tokens to generate (default: 32)"
    )
    add_options(parser, "model", MODEL, defaults_of(lp.Model))


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    if args.prompt_tokens < 1 or args.max_tokens < 1 or args.slots < 1:
        raise UsageError("--prompt-tokens, --max-tokens and --slots must be at least 1")
    if args.n_ctx and args.prompt_tokens + args.max_tokens > args.n_ctx:
        raise UsageError(
            f"--n-ctx is {args.n_ctx}; prompts and output have {args.prompt_tokens + args.max_tokens}"
        )
    if (note := busy_note()) is not None:
        Terminal(sys.stderr).line(f"llamapipe: {note}")
    with open_model(args.model, read_options(args, MODEL)) as model:
        tuning = _Tuning(model, args.n_ctx or model.n_ctx_train, args.prompt_tokens, args.max_tokens)
        n_cores = usable_cores()
        counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128, n_cores) if n <= n_cores})
        tuning.choose("n_threads", counts, n=1)
        tuning.choose("n_threads_batch", counts, n=8)
        tuning.choose("n_seq_max", [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= args.slots])
        tuning.choose_types()
        tuning.show()
    return 0


def least_disturbed(measure: Callable[[], Speed]) -> Speed:
    """Repeat a measurement, at most twice, while other work disturbs it. Return the least disturbed result."""
    tries = [measure()]
    while tries[-1].is_disturbed and len(tries) < _TRIES:
        tries.append(measure())
    return min(tries, key=lambda speed: speed.n_other_cores)


class _Tuning:
    """Changes one option at a time and keeps the best value."""

    def __init__(self, model: lp.Model, n_ctx: int, n_prompt: int, n_tokens: int) -> None:
        self._model, self._n_prompt, self._n_tokens = model, n_prompt, n_tokens
        self._options: dict[str, Any] = {"n_ctx": n_ctx}
        self._runner = LoadRunner(model)
        self._terminal = Terminal(sys.stdout)
        self._n_other_cores = 0.0  # the maximum over all measurements that count

    def choose(self, name: str, values: Sequence[int], n: int | None = None) -> None:
        """Measure an option with ``n`` concurrent requests; None: as many as the option's value."""
        self._title(name, "requests at once: " + ("as many" if n is None else str(n)))
        best: tuple[int, float] | None = None
        for value in values:
            n_requests = value if n is None else n
            speed = self._measure({name: value}, n_requests)
            self._row(str(value), speed)
            if best is None or speed.tokens_per_s > best[1] * _GAIN:
                best = value, speed.tokens_per_s
        assert best is not None
        self._options[name] = best[0]

    def choose_types(self) -> None:
        """Measure the types of the KV cache at the chosen number of slots."""
        n = self._options["n_seq_max"]
        self._title("type_k, type_v", f"requests at once: {n}")
        speeds = {}
        for name in ("f16", "q8_0"):
            try:
                speeds[name] = self._measure({"type_k": name, "type_v": name}, n).tokens_per_s
            except (lp.errors.LlamapipeError, ValueError) as error:
                self._terminal.line(f"  {name:>8}  {error}")
                continue
            self._terminal.line(f"  {name:>8}  {speeds[name]:9,.0f} tokens/s")
        if speeds.get("q8_0", 0) > speeds.get("f16", 0) * _GAIN:
            self._options |= {"type_k": "q8_0", "type_v": "q8_0"}

    def show(self) -> None:
        """Print the constructor call with the best values."""
        terminal = self._terminal
        tuned = {name: value for name, value in self._options.items() if name not in defaults_of(lp.Engine)}
        arguments = "".join(
            f", {name}={value!r}" for name, value in self._options.items() if name not in tuned
        )
        if tuned:
            fields = ", ".join(f"{name}={value!r}" for name, value in tuned.items())
            arguments += f", tuning=lp.EngineTuning({fields})"
        if self._n_other_cores > BUSY_CORES:
            Terminal(sys.stderr).line(
                f"llamapipe: other work used up to {self._n_other_cores:.1f} cores during measurements, also when they "
                "were repeated; run tune again when nothing else runs"
            )
        terminal.line()
        terminal.line(f"lp.Engine({str(self._model.path)!r}{arguments})")
        terminal.line(
            terminal.style(
                "Without n_threads and n_threads_batch an engine gives up threads while other work needs the cores.",
                "dim",
            )
        )

    def _measure(self, change: dict[str, Any], n: int) -> Speed:
        options = {"n_seq_max": n, **self._options, **change}
        with open_engine(self._model, options) as engine:
            load = Load(n, self._n_prompt, self._n_tokens)
            speed = least_disturbed(lambda: self._runner.measure(engine, load))
        self._n_other_cores = max(self._n_other_cores, speed.n_other_cores)
        return speed

    def _title(self, name: str, note: str) -> None:
        self._terminal.line(f"{name} {self._terminal.style(f'({note})', 'dim')}")

    def _row(self, value: str, speed: Speed) -> None:
        first_ms = 1e3 * speed.first_token_s
        self._terminal.line(
            f"  {value:>8}  {speed.tokens_per_s:9,.0f} tokens/s  first token {first_ms:,.1f} ms"
        )
