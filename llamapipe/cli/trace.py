"""``llamapipe trace``: records the timeline of an engine and draws it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import llamapipe as lp
from llamapipe._options import BY_NAME
from llamapipe.arguments import path_of
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    add_model,
    add_options,
    defaults_of,
    for_commands,
    open_engine,
    open_model,
    read_options,
)
from llamapipe.cli.parser import UsageError, check_folder
from llamapipe.lowlevel import Span, StepOutput, Trace

USAGE = "llamapipe trace [options]"
DESCRIPTION = (
    "Run requests through an engine and record its timeline: as .json for https://ui.perfetto.dev, or as a picture, "
    ".svg."
)
EPILOG = """\
examples:
  llamapipe trace                                   # the bundled model, trace.json and trace.svg
  llamapipe trace --rows 128 --n-threads 1          # rows that numpy reads while the next step is computed
  llamapipe trace -m model.gguf --pipeline-depth 2 --requests 32 -o busy.json"""
_PROMPT = "Once upon a time, there was a little"
_ANIMALS = ("fox", "bear", "rabbit", "hen", "mouse", "owl", "frog", "cat")
_DEPTH = for_commands(replace(BY_NAME["pipeline_depth"], metavar="N"))
_THREADS = "n_threads"  # the prefix of the pipeline options that --rows takes
_DRAWN = 6  # default number of steps in the picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=path_of,
        action="append",
        metavar="FILE",
        help=".json or .svg (default: both, trace.json and trace.svg)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="trace a pipeline instead of an engine: steps of N tokens, with every row read by numpy",
    )
    parser.add_argument(
        "--requests", type=int, default=8, metavar="N", help="concurrent requests (default: 8)"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=32, metavar="N", help="tokens per request (default: 32)"
    )
    parser.add_argument(
        "--steps", type=int, default=_DRAWN, metavar="N", help=f"steps in the picture (default: {_DRAWN})"
    )
    add_options(parser, "engine", [*ENGINE, *_DEPTH], defaults_of(lp.Engine) | defaults_of(lp.EngineTuning))
    add_options(
        parser,
        "model",
        MODEL,
        defaults_of(lp.Model),
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    for name in ("requests", "max_tokens", "steps", "rows"):
        if (getattr(args, name) or 1) < 1 or getattr(args, name) == 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; at least 1")
    outputs = args.output or [Path("trace.json"), Path("trace.svg")]
    for path in outputs:
        if path.suffix not in (".json", ".svg"):
            raise UsageError(f"{path} is neither .json (for Perfetto) nor .svg (a picture)")
        check_folder(path)
    if args.rows and (unused := [name for name in _options(args) if not name.startswith(_THREADS)]):
        option = args.parser.options()[unused[0]]
        raise UsageError(f"{option} and --rows do not go together: --rows traces a pipeline, not an engine")
    with open_model(args.model, read_options(args, MODEL)) as model:
        trace, title = _read_rows(model, args) if args.rows else _generate(model, args)
        spans = trace.spans()
        last = max((span.step for span in spans), default=0)
        first = max(last - args.steps - 2, 0)  # the steady state, without the last two steps
        title += f", {model.path.name}, {', '.join(device.name for device in model.devices)}"
        for path in outputs:
            if path.suffix == ".svg":
                trace.save(path, first_step=first, n_steps=args.steps, title=title)
            else:
                trace.save(path)
    _report(spans, outputs)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return read_options(args, [*ENGINE, *_DEPTH])


def _generate(model: lp.Model, args: argparse.Namespace) -> tuple[Trace, str]:
    params = lp.SamplingParams(max_tokens=args.max_tokens, seed=1, ignore_eos=True)
    prompts = [f"{_PROMPT} {name}" for name in islice(cycle(_ANIMALS), args.requests)]
    options = _options(args)
    options.setdefault("n_seq_max", min(args.requests, 64))
    with open_engine(model, options) as engine:
        _stream(engine, prompts, params)  # warm up, so that the picture shows no start-up
        engine.trace.start()
        _stream(engine, prompts, params)
        engine.trace.stop()
    return engine.trace, f"{len(prompts)} requests at once"


def _read_rows(model: lp.Model, args: argparse.Namespace) -> tuple[Trace, str]:
    n, n_steps = args.rows, args.steps + 6
    options = {"n_ctx": n * n_steps, "n_batch": n, "n_ubatch": n}
    options |= {k: v for k, v in _options(args).items() if k.startswith(_THREADS)}
    tokens = (7 * np.arange(n) + 3) % model.n_vocab
    with lp.Pipeline(model, **options) as pipe:
        waiting = []
        for i in range(n_steps):
            if i == 2:  # after the warm-up steps, so that the picture shows no start-up
                pipe.trace.start()
            waiting.append(
                pipe.submit(
                    lp.DecodeBatch(tokens, np.arange(i * n, i * n + n), np.zeros(n, int), np.ones(n, bool))
                )
            )
            if len(waiting) == pipe.depth:
                with waiting.pop(0) as output:
                    _read(pipe, output)
        for output in waiting:
            with output:
                _read(pipe, output)
        pipe.trace.stop()
    return pipe.trace, f"{n} rows a step, read with numpy"


def _read(pipe: lp.Pipeline, output: StepOutput) -> None:
    rows = np.asarray(output.logits)
    with pipe.trace.span("read rows", output.number):
        for _ in range(8):
            np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1))


def _stream(engine: lp.Engine, prompts: Sequence[str], params: lp.SamplingParams) -> None:
    """Run all prompts concurrently and stream their tokens."""
    for stream in [engine.stream(prompt, params) for prompt in prompts]:
        for _ in stream:
            pass


def _report(spans: Sequence[Span], outputs: Sequence[Path]) -> None:
    terminal = Terminal(sys.stdout)
    terminal.line(terminal.style(f"{'stage':10}{'n':>8}{'median':>12}{'in all':>12}", "bold"))
    stages = dict.fromkeys(span.stage for span in sorted(spans, key=lambda span: span.begin_s))
    for stage in stages:
        times = [span.end_s - span.begin_s for span in spans if span.stage == stage]
        terminal.line(f"{stage:10}{len(times):8}{median(times) * 1e6:9.1f} µs{sum(times) * 1e3:9.2f} ms")
    for path in outputs:
        terminal.line(
            f"{path}: {'a picture' if path.suffix == '.svg' else 'open it in https://ui.perfetto.dev'}"
        )
