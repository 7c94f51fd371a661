"""``llamapipe demo``: shows the library on the bundled model.

``Board`` draws several growing texts; ``compare`` runs the same requests one by one and concurrently.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import llamapipe as lp
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.parser import UsageError
from llamapipe.host.cores import usable_cores
from llamapipe.host.cpu_load import free_cores

DESCRIPTION = (
    "Show what llamapipe does, with the bundled model: concurrent streams side by side, cancelling one "
    "of them, a burst, and a measured comparison of one request at a time with all at once."
)
_N_TOGETHER = 16
_N_TOKENS = 64
_N_CTX = 256
_MEASURING_LIMIT_S = 8.0
_READING_PACE = 60  # tokens per second in each column: the model is much faster than anyone can read
_FRAME_S = 1 / 25
_LOOK_S = 0.2  # how long the machine's load is measured
_BUSY = 0.3  # cores used by other programs from which the machine counts as busy
_WIDTHS = (10, 15, 12, 10)  # of the table's columns after the first; the table has 60 characters
_GREEDY = lp.SamplingParams(max_tokens=120, temperature=0)


@dataclass(frozen=True)
class Request:
    """A prompt and the title above its text."""

    title: str
    prompt: str


THREE = [
    Request("a story", "Once upon a time, there was a little fox named Lily."),
    Request("counting", "Counting from 7 to 30:"),
    Request("a question", "Question: Say the alphabet.\nAnswer:"),
]
_CANCELLED, _CANCEL_AFTER = 1, 18  # index of the cancelled request, and its number of tokens
BURST = [
    f"Once upon a time, there was a {hero}."
    for hero in (
        "little fox named Lily", "brave rabbit named Ben", "happy bear named Mia", "shy mouse named Tom",
        "clever cat named Anna", "curious dog named Max", "gentle owl named Zoe", "cheerful hedgehog named Sam",
        "young squirrel named Ella", "quiet frog named Leo", "friendly duck named Ruby", "playful turtle named Pip",
        "small pig named Rosie", "kind lamb named Finn", "little pony named Daisy", "brave otter named Jack",
    )
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--pace",
        type=float,
        metavar="N",
        help=f"tokens per second shown in a column; 0: no limit (default: {_READING_PACE} on a terminal)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="runs to take medians of, if they fit into 8 seconds (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    terminal = Terminal(sys.stdout)
    pace = args.pace if args.pace is not None else _READING_PACE if terminal.redraws else 0
    if args.runs < 1:
        raise UsageError(f"--runs is {args.runs}; it must be at least 1")
    if not pace >= 0:
        raise UsageError(f"--pace is {pace}; it must be 0 or more")
    with lp.Model.demo() as model, lp.Engine(model, n_ctx=_N_CTX, n_seq_max=_N_TOGETHER) as engine:
        path = lp.demo_model_path()
        names = ", ".join(device.description for device in lp.devices())
        size_mb = path.stat().st_size / 1e6
        terminal.line(terminal.clip(f"{path.name}: {size_mb:.1f} MB, the bundled model; {names}", 0))
        if pace:
            terminal.line(
                f"Streams are slowed to {pace:g} tokens per second for reading; measurements are not."
            )
        demo = _Demo(terminal, engine, pace)
        demo.stream_one()
        undisturbed = asyncio.run(demo.stream_three())
        asyncio.run(demo.cancel_one_of_three(undisturbed))
        demo.run_burst()
        engine.close()  # its threads must not compete with the measured engines
        demo.show_table(model, args.runs)
    return 0


class _Demo:
    """The parts of the demo, on one engine and terminal. ``pace``: tokens per second for each column; 0: no limit."""

    def __init__(self, terminal: Terminal, engine: lp.Engine, pace: float) -> None:
        self._terminal = terminal
        self._engine = engine
        self._pace = pace

    def stream_one(self) -> None:
        """Stream one request."""
        self._heading("1", "one request", "for delta in engine.stream(prompt, params): ...")
        with Board(self._terminal, [THREE[0].title], n_lines=5) as board:
            board.add(0, THREE[0].prompt)
            n_tokens = 0
            with closing(self._engine.stream(THREE[0].prompt, _GREEDY)) as deltas:
                for delta in deltas:
                    n_tokens += len(delta.token_ids)
                    board.add(0, delta.text)
                    board.note(0, f"{n_tokens} tokens")
                    board.draw()
                    if self._pace:
                        time.sleep(len(delta.token_ids) / self._pace)
            board.end(0, self._end_note(n_tokens))

    async def stream_three(self) -> list[str]:
        """Run three requests concurrently, side by side. Return their texts."""
        self._heading("2", "three at once", "async for delta in engine.astream(prompt, params): ...")
        return await self._side_by_side(cancelled=None)

    async def cancel_one_of_three(self, undisturbed: list[str]) -> None:
        """Run the same three requests and cancel one midway. ``undisturbed``: the texts without cancellation."""
        self._heading("3", "the same, the second cancelled", "break, task.cancel(), or a timeout")
        texts = await self._side_by_side(cancelled=_CANCELLED)
        same = all(a == b for i, (a, b) in enumerate(zip(texts, undisturbed, strict=True)) if i != _CANCELLED)
        if same:
            self._terminal.line(f"  {self._tick()} the other two texts are exactly the same as before")

    def run_burst(self) -> None:
        """Run many requests in one call."""
        self._heading("4", f"a burst of {len(BURST)}", "engine.generate(list_of_prompts, params)")
        before = self._engine.stats()
        start = time.perf_counter()
        outs = self._engine.generate(BURST, replace(_GREEDY, max_tokens=_N_TOKENS))
        seconds = time.perf_counter() - start
        steps = self._engine.stats().steps - before.steps
        for number, (prompt, out) in enumerate(zip(BURST, outs, strict=True), 1):
            text = " ".join((prompt + out.text).split())
            text = self._terminal.clip(self._terminal.text(text), 6)
            self._terminal.line(f"  {self._terminal.style(f'{number:2}', 'cyan')}  {text}")
        n_tokens = sum(len(out.token_ids) for out in outs)
        self._terminal.line(
            f"  {self._tick()} {n_tokens} tokens in {seconds:.2f} s and {steps} steps of the model"
        )

    def show_table(self, model: lp.Model, n_runs: int) -> None:
        """Compare requests one by one with concurrent requests."""
        self._heading("5", "one by one, or concurrently", "")
        params = replace(_GREEDY, max_tokens=_N_TOKENS, ignore_eos=True)
        n_cores, free = usable_cores(), free_cores(_LOOK_S)

        def make(n_seq_max: int) -> lp.Engine:
            return lp.Engine(model, n_ctx=_N_CTX, n_seq_max=n_seq_max)

        slow, fast, n_runs = compare(
            partial(make, 1),
            partial(make, _N_TOGETHER),
            BURST,
            params,
            n_runs,
            _MEASURING_LIMIT_S,
            self._progress,
        )
        self._progress(0, 0)
        runs = f"medians of {n_runs} runs" if n_runs > 1 else "one run"
        rows = [
            ("", "tokens/s", "range", "first token", "all done"),
            ("one by one", *_cells(slow)),
            ("concurrent", *_cells(fast)),
            (
                "speed-up",
                f"{fast.tokens_per_s / slow.tokens_per_s:.1f} x",
                "",
                f"{slow.first_token_s / fast.first_token_s:.1f} x",
                f"{slow.seconds / fast.seconds:.1f} x",
            ),
        ]
        terminal = self._terminal
        terminal.line(f"  {len(BURST)} requests of {_N_TOKENS} tokens arrive at once; {runs}")
        if free is not None and free < n_cores - _BUSY:
            terminal.line(
                terminal.style(f"  this machine is busy: {free:.1f} of {n_cores} cores are free", "yellow")
            )
        terminal.line()
        for row, style in zip(rows, ("dim", "", "", "green"), strict=True):
            line = f"  {row[0]:<10}" + "".join(
                f"{cell:>{width}}" for cell, width in zip(row[1:], _WIDTHS, strict=True)
            )
            terminal.line(terminal.style(line, style) if style else line)
        terminal.line()
        for line in (
            "  one by one: n_seq_max=1, one call after another",
            f"  concurrent: n_seq_max={_N_TOGETHER}, all requests in one call",
            "  first token: median, since the arrival of all requests",
        ):
            terminal.line(terminal.style(line, "dim"))

    async def _side_by_side(self, cancelled: int | None) -> list[str]:
        with Board(self._terminal, [request.title for request in THREE]) as board:
            tasks = [
                asyncio.create_task(self._into(board, column, _CANCEL_AFTER if column == cancelled else None))
                for column in range(len(THREE))
            ]
            try:
                while not all(task.done() for task in tasks):
                    board.draw()
                    await asyncio.wait(tasks, timeout=_FRAME_S)
                return [task.result() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()

    async def _into(self, board: Board, column: int, cancel_after: int | None) -> str:
        """Stream a request into its column, up to ``cancel_after`` tokens. Return the text."""
        board.add(column, THREE[column].prompt)
        text, n_tokens = "", 0
        async with aclosing(self._engine.astream(THREE[column].prompt, _GREEDY)) as deltas:
            async for delta in deltas:
                n_tokens += len(delta.token_ids)
                text += delta.text
                board.add(column, delta.text)
                board.note(column, f"{n_tokens} tokens")
                if cancel_after is not None and n_tokens >= cancel_after:
                    board.end(
                        column, f"{self._terminal.symbol('■')} cancelled at {n_tokens} tokens", "yellow"
                    )
                    return text
                if self._pace:
                    await asyncio.sleep(len(delta.token_ids) / self._pace)
        board.end(column, self._end_note(n_tokens))
        return text

    def _end_note(self, n_tokens: int) -> str:
        return f"{self._tick()} {n_tokens} tokens"

    def _tick(self) -> str:
        return self._terminal.symbol("✓")

    def _heading(self, number: str, title: str, code: str) -> None:
        terminal = self._terminal
        terminal.line()
        heading = terminal.style(f"{number}. {title}", "bold")
        terminal.line(f"{heading}   {terminal.style(code, 'dim')}".rstrip())
        terminal.line()

    def _progress(self, done: int, total: int) -> None:
        """Show the progress of the measurement on a terminal; ``total`` 0 clears the line."""
        bar = f"  measuring {self._terminal.symbol('█') * done}{self._terminal.symbol('░') * (total - done)}"
        self._terminal.redraw(bar if total else "")


def _cells(measured: Measured) -> tuple[str, str, str, str]:
    return (
        f"{measured.tokens_per_s:.0f}",
        "" if measured.spread is None else "{:.0f} to {:.0f}".format(*measured.spread),
        f"{1000 * measured.first_token_s:.0f} ms",
        f"{measured.seconds:.2f} s",
    )


# ---- texts side by side
_GAP = 3
_NARROWEST = 22  # characters; narrower columns are hard to read


class Board:
    """Shows one column for each title and redraws it as text comes in.

    On a terminal that is wide enough, the columns are side by side and each shows its last ``n_lines`` lines. Elsewhere
    every finished sentence becomes a line that begins with its column's title, so that a log also shows the
    interleaving.

    As a context manager, a board hides the cursor, and at the end draws the last state and shows the cursor again. Use
    it from one thread.
    """

    def __init__(self, terminal: Terminal, titles: list[str], n_lines: int = 7) -> None:
        self._terminal = terminal
        self._titles = titles
        self._texts = ["" for _ in titles]
        self._notes = ["" for _ in titles]
        self._note_styles: list[tuple[str, ...]] = [("dim",) for _ in titles]
        self._printed = [0 for _ in titles]  # characters already written as labelled lines
        self._width = (terminal.columns - 1 - _GAP * (len(titles) - 1)) // len(titles)
        self._n_lines = max(2, min(n_lines, terminal.lines - 5))
        self._side_by_side = terminal.redraws and self._width >= _NARROWEST
        self._drawn = False

    def __enter__(self) -> Board:
        if self._side_by_side:
            self._terminal.write("\x1b[?25l")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenPipeError):
            return
        self.draw()
        if self._side_by_side:
            self._terminal.write("\x1b[?25h")
            return
        for column in range(len(self._titles)):
            self._print_to(column, len(self._texts[column]))

    def add(self, column: int, text: str) -> None:
        """Append a text to a column; the next ``draw`` shows it."""
        self._texts[column] += text
        if not self._side_by_side:
            so_far = self._texts[column]
            self._print_to(column, max(so_far.rfind(end) + 1 for end in (". ", "! ", "? ", "\n")))

    def note(self, column: int, text: str, *styles: str) -> None:
        """Set the line under a column."""
        self._notes[column] = text
        self._note_styles[column] = styles or ("dim",)

    def end(self, column: int, text: str, *styles: str) -> None:
        """Set the line under a column whose text is complete."""
        self.note(column, text, *styles)
        if not self._side_by_side:
            self._print_to(column, len(self._texts[column]))
            self._label(column, text)

    def draw(self) -> None:
        """Redraw the columns in place; do nothing if the output cannot be redrawn."""
        if not self._side_by_side:
            return
        terminal, width = self._terminal, self._width
        rows = [
            [terminal.style(title[:width].ljust(width), "bold", "cyan") for title in self._titles],
            [terminal.style(terminal.symbol("─") * width, "dim") for _ in self._titles],
        ]
        bodies = [self._wrap(text) for text in self._texts]
        rows += [[body[i].ljust(width) for body in bodies] for i in range(self._n_lines)]
        rows.append(
            [
                terminal.style(note[:width].ljust(width), *styles)
                for note, styles in zip(self._notes, self._note_styles, strict=True)
            ]
        )
        up = f"\x1b[{len(rows)}A" if self._drawn else ""
        # The whole picture is written in one call; otherwise it flickers.
        terminal.write(up + "".join("\r\x1b[2K" + (" " * _GAP).join(row) + "\n" for row in rows))
        self._drawn = True

    def _wrap(self, text: str) -> list[str]:
        """Return the last ``n_lines`` lines of ``text`` broken at the column's width, padded with empty ones."""
        text = self._terminal.text(text).expandtabs(4)
        lines = [line for part in text.split("\n") for line in textwrap.wrap(part, self._width) or [""]]
        return lines[-self._n_lines :] + [""] * (self._n_lines - len(lines))

    def _print_to(self, column: int, end: int) -> None:
        """Write the column's text up to ``end`` as labelled lines."""
        start = self._printed[column]
        if end <= start:
            return
        self._printed[column] = end
        for line in self._texts[column][start:end].splitlines():
            if line.strip():
                self._label(column, line.strip())

    def _label(self, column: int, text: str) -> None:
        label = self._titles[column].ljust(max(len(title) for title in self._titles))
        self._terminal.line(f"  {label} {self._terminal.symbol('│')} {self._terminal.text(text)}")


# ---- the comparison
@dataclass(frozen=True)
class Measured:
    """Measurements of one way to serve a set of requests that all arrive at time zero.

    ``n_tokens``: tokens generated by all requests. ``seconds``: the time until the last request was done.
    ``first_token_s``: the median time to the first token. ``spread``: the lowest and the highest tokens per second of
    several runs.
    """

    n_tokens: int
    seconds: float
    first_token_s: float
    spread: tuple[float, float] | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, over all requests."""
        return self.n_tokens / self.seconds


def measure_one_by_one(engine: lp.Engine, prompts: Sequence[str], params: lp.SamplingParams) -> Measured:
    """Run the requests one after another, as callers that share a lock would."""
    firsts, n_tokens = [], 0
    start = time.perf_counter()
    for prompt in prompts:
        waited = time.perf_counter() - start
        out = engine.generate(prompt, params)
        firsts.append(waited + (out.timings.first_token_s or 0.0))
        n_tokens += len(out.token_ids)
    return Measured(n_tokens, time.perf_counter() - start, statistics.median(firsts))


def measure_concurrently(engine: lp.Engine, prompts: Sequence[str], params: lp.SamplingParams) -> Measured:
    """Run all requests concurrently."""
    start = time.perf_counter()
    outs = engine.generate(list(prompts), params)
    seconds = time.perf_counter() - start
    firsts = [out.timings.first_token_s or 0.0 for out in outs]
    return Measured(sum(len(out.token_ids) for out in outs), seconds, statistics.median(firsts))


def compare(
    blocking: Callable[[], lp.Engine],
    shared: Callable[[], lp.Engine],
    prompts: Sequence[str],
    params: lp.SamplingParams,
    n_runs: int,
    limit_s: float,
    progress: Callable[[int, int], None],
) -> tuple[Measured, Measured, int]:
    """Return medians of alternating runs, so that other load affects both ways equally, and the number of runs.

    Each way has ``n_runs`` runs; fewer, but at least one, if another run would exceed ``limit_s`` seconds. Each run has
    a new engine, which is warmed up first, and no other engine exists at that time: OpenMP keeps threads for every
    engine thread, and all of them slow down once there are more threads than cores.
    """
    slow: list[Measured] = []
    fast: list[Measured] = []
    left_s = limit_s
    while not slow or (len(slow) < n_runs and left_s > slow[-1].seconds + fast[-1].seconds):
        progress(len(slow), n_runs)
        for make, way, runs in ((blocking, measure_one_by_one, slow), (shared, measure_concurrently, fast)):
            with make() as engine:
                measure_concurrently(engine, prompts, replace(params, max_tokens=4))
                runs.append(way(engine, prompts, params))
        left_s -= slow[-1].seconds + fast[-1].seconds
    return _median(slow), _median(fast), len(slow)


def _median(runs: Sequence[Measured]) -> Measured:
    rates = [run.tokens_per_s for run in runs]
    return Measured(
        runs[0].n_tokens,
        statistics.median(run.seconds for run in runs),
        statistics.median(run.first_token_s for run in runs),
        (min(rates), max(rates)) if len(runs) > 1 else None,
    )
