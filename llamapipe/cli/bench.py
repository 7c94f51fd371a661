"""``llamapipe bench``: measures tokens per second and the time to the first token for several numbers of requests.

``LoadRunner`` runs requests with random prompts and takes medians; ``llamapipe tune`` uses it too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from statistics import median

import llamapipe as lp
from llamapipe.arguments import path_of
from llamapipe.cli import _guesses
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import add_engine_options, add_model, open_model_and_engine
from llamapipe.cli.parser import UsageError, usage_errors
from llamapipe.host.cores import usable_cores
from llamapipe.host.cpu_load import OtherWork, free_cores
from llamapipe.jobs.records import read_records

USAGE = "llamapipe bench [options]"
DESCRIPTION = """\
Measure a model on this machine: the generated tokens per second of all requests together, and the time to the first
token, for several numbers of concurrent requests. Prompts are random tokens."""
_BAR = 32  # maximum length of a bar in characters
_LOOK_S = 0.2  # how long the machine's load is measured
BUSY_CORES = 0.5  # cores used by other work from which a measurement counts as disturbed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    parser.add_argument(
        "--requests",
        type=_numbers,
        default=(1, 2, 4, 8),
        metavar="N,N",
        help="numbers of concurrent requests (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, metavar="N", help="length of a prompt (default: 64)"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)"
    )
    parser.add_argument(
        "--prompts",
        type=path_of,
        metavar="FILE",
        help="answer a file of records as llamapipe batch reads it, without guesses and with them, and tell whether "
        "guesses pay",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    if args.prompt_tokens < 1 or args.max_tokens < 1:
        raise UsageError("--prompt-tokens and --max-tokens must be at least 1")
    terminal = Terminal(sys.stdout)
    most = max(args.requests)
    if (note := busy_note()) is not None:
        Terminal(sys.stderr).line(f"llamapipe: {note}")
    if args.prompts is not None:
        return _guesses_of(args, terminal)
    with open_model_and_engine(
        args, {"n_ctx": args.prompt_tokens + args.max_tokens, "n_seq_max": most}
    ) as engine:
        model = engine.model
        if not args.json:
            terminal.line(
                f"{model.path.name}: prompts of {args.prompt_tokens} tokens, {args.max_tokens} generated"
            )
            terminal.line(terminal.style(" requests   tokens/s   first token", "dim"))
        runner, speeds = LoadRunner(model), {}
        for n in args.requests:
            speed = runner.measure(engine, Load(n, args.prompt_tokens, args.max_tokens))
            speeds[n] = speed.tokens_per_s
            if args.json:
                record = {"n": n, "tokens_per_s": speed.tokens_per_s, "first_token_s": speed.first_token_s}
                terminal.line(json.dumps(record))
            else:
                terminal.line(f"{n:9}  {speed.tokens_per_s:9,.0f}  {1e3 * speed.first_token_s:9,.1f} ms")
    if not args.json:
        _draw(terminal, speeds)
    return 0


def _guesses_of(args: argparse.Namespace, terminal: Terminal) -> int:
    """Answer a file of prompts with and without guesses. Return the exit status."""
    with usage_errors():
        records = list(read_records(args.prompts))
    if not records:
        raise UsageError(f"{args.prompts} has no records")
    with open_model_and_engine(args, {"n_seq_max": max(args.requests)}) as engine:
        measured = []
        for n in args.requests:
            folder = args.prompts.parent
            measured.append(_guesses.measure(engine, records, args.max_tokens, n, folder))
            if args.json:
                terminal.line(_guesses.as_json(measured[-1]))
        if not args.json:
            terminal.line(
                f"{engine.model.path.name}: {len(records):,} records, at most {args.max_tokens} tokens each"
            )
            _guesses.show(terminal, measured, engine.stats().no_guesses)
    return 0


def busy_note() -> str | None:
    """Return a warning if other work uses the cores now, which slows every step; None if not, or if unknown."""
    free, n = free_cores(_LOOK_S), usable_cores()
    if free is None or free > n - BUSY_CORES:
        return None
    return (
        f"the machine is busy: {max(free, 0):.1f} of {n} cores are free now, so the model is slower than it could be; "
        "measure while nothing else runs"
    )


def _draw(terminal: Terminal, speeds: dict[int, float]) -> None:
    """Draw a bar for each number of requests. The longest bar is the fastest."""
    terminal.line()
    for n, tokens_per_s in speeds.items():
        bar = terminal.symbol("█") * max(round(_BAR * tokens_per_s / max(speeds.values())), 1)
        terminal.line(f"{n:9}  {terminal.style(bar, 'cyan')} {tokens_per_s:,.0f} tokens/s")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to 1024, as in 1,4,16")
    return numbers


# ---- measurement, also for tune
_ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """``n`` concurrent requests with prompts of ``n_prompt`` tokens, which generate ``n_tokens`` each."""

    n: int
    n_prompt: int
    n_tokens: int


@dataclass(frozen=True)
class Speed:
    """Medians of a few rounds.

    ``tokens_per_s``: generated tokens of all requests, from the first submission to the end of the last request.
    ``first_token_s``: the time from submission to the first token for the median request. ``n_other_cores``: cores that
    other processes used during the measurement, on average; 0 if unknown.
    """

    tokens_per_s: float
    first_token_s: float
    n_other_cores: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other work probably slowed the measurement."""
        return self.n_other_cores > BUSY_CORES


def _other_work() -> OtherWork | None:
    try:
        return OtherWork()
    except OSError:
        return None


class LoadRunner:
    """Runs loads on engines of one model. Prompts share no prefix, so the prefix cache has no effect."""

    def __init__(self, model: lp.Model) -> None:
        vocab = model.vocab
        self._tokens = [t for t in range(vocab.n_vocab) if not vocab.is_control(t)]
        self._random = random.Random(1)

    def __repr__(self) -> str:
        return f"<LoadRunner n_tokens={len(self._tokens)}>"

    def measure(self, engine: lp.Engine, load: Load) -> Speed:
        """Measure the speed of a load, after a short load that warms the engine up."""
        self._run(engine, Load(load.n, min(load.n_prompt, 4), min(load.n_tokens, 8)))
        others = _other_work()
        try:
            speeds = [self._run(engine, load) for _ in range(_ROUNDS)]
            n_other_cores = 0.0 if others is None else others.read()
        finally:
            if others is not None:
                others.close()
        return Speed(
            median(s.tokens_per_s for s in speeds), median(s.first_token_s for s in speeds), n_other_cores
        )

    def _run(self, engine: lp.Engine, load: Load) -> Speed:
        prompts = [self._random.choices(self._tokens, k=load.n_prompt) for _ in range(load.n)]
        params = lp.SamplingParams(max_tokens=load.n_tokens, ignore_eos=True, cache=False)
        began = time.perf_counter()
        completions = engine.generate(prompts, params)
        seconds = time.perf_counter() - began
        firsts = [out.timings.first_token_s or 0.0 for out in completions]
        return Speed(sum(out.n_completion_tokens for out in completions) / seconds, median(firsts))
