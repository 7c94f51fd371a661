"""``llamapipe batch``: answers a file of prompts, conversations or requests, and writes a file of results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llamapipe as lp
from llamapipe._messages import with_flags
from llamapipe.arguments import path_of
from llamapipe.cli._follow import follow
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import (
    SAMPLING,
    TEXTS,
    add_engine_options,
    add_model,
    add_options,
    defaults_of,
    model_path,
    open_model_and_engine,
    read_options,
)
from llamapipe.cli.parser import UsageError, usage_errors
from llamapipe.cli.ps import add_server_arguments
from llamapipe.jobs.answers import Answerer, AnswerRequest, check_template
from llamapipe.jobs.batch import AHEAD
from llamapipe.jobs.records import STDIN, check_columns, count_records, format_of, is_pipe, read_records
from llamapipe.jobs.results import is_complete, lines_of, open_output
from llamapipe.jobs.run import BatchSummary, run_job

USAGE = "llamapipe batch [options] IN -o OUT"
DESCRIPTION = """\
Answer every record of a file. Each line of IN is an object with "prompt" or "messages", and options of SamplingParams;
or a request in OpenAI's batch format (needs the extra server); or, with --template, any columns, also those of a CSV
or Parquet file.
OUT gets one line for each record. A record that fails gets a line with "error"; the others are not affected.
If the job is stopped or killed, run the same command again to continue it: OUT then has every record once."""
EPILOG = """\
examples:
  llamapipe batch prompts.jsonl -o answers.jsonl --max-tokens 64
  llamapipe batch -m model.gguf reviews.csv -o labels.jsonl --template "Positive or negative? {text}" --temperature 0
  llamapipe batch -m model.gguf requests.jsonl -o responses.jsonl
  llamapipe batch --follow prompts.jsonl -o answers.jsonl
  llamapipe batch --follow batch_0123 --url http://127.0.0.1:8080"""
_EVERY_S = 0.5  # between updates of the progress line
_EVERY_S_IN_LOGS = 60.0
_MOST_REASONS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "input",
        type=path_of,
        nargs="?",
        metavar="IN",
        help="a file of records: .jsonl, .csv (both also with .gz) or .parquet; - for JSON lines on standard input",
    )
    parser.add_argument(
        "-o", "--output", type=path_of, metavar="OUT", help="results: .jsonl, .csv or .parquet"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="compute nothing: show the progress of the job that writes OUT, or, with the id of a batch as IN, of a "
        "running server's batch",
    )
    add_server_arguments(parser)
    add_model(parser)
    parser.add_argument(
        "--template", metavar="TEXT", help="make the prompt from columns: 'Translate: {text}'"
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user message")
    parser.add_argument("--system", metavar="TEXT", help="begin each conversation with this; implies --chat")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy a column of IN to OUT (repeatable)",
    )
    parser.add_argument(
        "--unordered", action="store_true", help="write results as they finish, not in the order of IN"
    )
    parser.add_argument(
        "--media-path",
        type=_folder,
        metavar="DIR",
        help="messages may name images and sounds in this folder (default: the folder of IN)",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--overwrite", action="store_true", help="start again and discard the results in OUT")
    again.add_argument(
        "--retry-failed", action="store_true", help="retry the records whose results have an error"
    )
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that requests in OpenAI's format use for the model (repeatable; default: the file's name)",
    )
    parser.add_argument(
        "--embeddings", type=model_path, metavar="FILE", help="a GGUF file for requests to /v1/embeddings"
    )
    parser.add_argument(
        "--embeddings-alias", action="append", default=[], metavar="NAME", help="the same for --embeddings"
    )
    add_options(parser, "sampling", [*TEXTS, *SAMPLING], defaults_of(lp.SamplingParams))
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 if a result has an error."""
    if args.follow:
        return follow(args)
    if missing := [name for name, path in (("IN", args.input), ("-o OUT", args.output)) if path is None]:
        raise UsageError(f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    with usage_errors():
        params = lp.SamplingParams(**read_options(args, [*TEXTS, *SAMPLING]))
        format_of(args.input)
        lines = lines_of(args.output)
        columns = [] if args.template is None else check_template(args.template)
        check_columns(args.input, [*columns, *args.keep])
    if args.retry_failed and lines != args.output:
        raise UsageError("--retry-failed needs an OUT that ends with .jsonl")
    if args.embeddings_alias and args.embeddings is None:
        raise UsageError("--embeddings-alias needs --embeddings FILE")
    if args.input == STDIN and sys.stdin is None:
        raise UsageError("there is no standard input to read records from")
    n_records = count_records(args.input)
    if args.input != STDIN and (
        args.input in (args.output, lines) or (args.output.exists() and args.output.samefile(args.input))
    ):
        raise UsageError("IN and OUT are the same file")
    if is_complete(args.output) and not args.overwrite:
        print(f"llamapipe: {args.output} is complete already; --overwrite starts again", file=sys.stderr)
        return 0
    with (
        open_output(args.output, overwrite=args.overwrite) as results,
        open_model_and_engine(args) as engine,
        _open_embedder(args.embeddings) as embedder,
    ):
        try:
            answerer = Answerer(
                engine,
                params,
                args.template,
                args.system,
                args.chat,
                args.keep,
                media_path=args.media_path or (None if args.input == STDIN else args.input.parent),
                requests=lambda: _requests(engine, args.alias, embedder, args.embeddings_alias),
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        if args.overwrite and lines != args.output:
            args.output.unlink(missing_ok=True)
        results.begin(answerer.settings(), retry_failed=args.retry_failed)
        shown = _Shown(n_records, can_retry=lines == args.output)
        try:
            summary = run_job(
                read_records(args.input),
                answerer,
                results,
                n_ahead=AHEAD * engine.n_seq_max,
                ordered=not args.unordered,
                slow=is_pipe(args.input),
                on_progress=shown.show,
            )
        except KeyboardInterrupt:
            shown.say_stopped(args.output)
            raise
        shown.end(summary)
    return 1 if summary.n_failed + summary.n_skipped_failed else 0


def _folder(text: str) -> Path:
    path = path_of(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


@contextmanager
def _open_embedder(file: Path | None) -> Iterator[lp.Embedder | None]:
    """Open the embedder for ``--embeddings``; yield None without that option."""
    if file is None:
        yield None
        return
    with lp.Model(file) as model, lp.Embedder(model) as embedder:
        yield embedder


def _requests(
    engine: lp.Engine, names: list[str], embedder: lp.Embedder | None, embedding_names: list[str]
) -> AnswerRequest:
    try:
        from llamapipe.server.batch import BatchRequests
    except ModuleNotFoundError as error:
        raise ImportError(
            f"requests in OpenAI's format need {error.name}: pip install 'llamapipe[server]'"
        ) from None
    return BatchRequests(engine, names, embedder, embedding_names).answer


class _Shown:
    """The progress line and the closing line."""

    def __init__(self, n_records: int | None, can_retry: bool) -> None:
        self._n_records = n_records
        self._can_retry = can_retry
        self._terminal = Terminal(sys.stderr)
        self._began_s = self._next_s = time.perf_counter()
        self._n_done = 0
        if not self._terminal.redraws:
            self._next_s += _EVERY_S_IN_LOGS

    def show(self, progress: BatchSummary) -> None:
        """Show the progress: twice a second on a terminal, once a minute elsewhere."""
        now_s = time.perf_counter()
        self._n_done = progress.n_done + progress.n_skipped
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_EVERY_S if self._terminal.redraws else _EVERY_S_IN_LOGS)
        seconds = max(now_s - self._began_s, 1e-9)
        n = self._n_done
        line = f"{n:,}" if self._n_records is None else f"{n:,} of {self._n_records:,}"
        line += f", {progress.n_tokens / seconds:,.0f} tokens/s"
        if self._n_records is not None:
            left_s = max(self._n_records - n, 0) * seconds / max(progress.n_done, 1)
            line += f", {_duration(left_s)} left"
        line += f", {progress.n_failed:,} failed" if progress.n_failed else ""
        if self._terminal.redraws:
            self._terminal.redraw(line)
        else:
            self._terminal.line(line)

    def say_stopped(self, output: Path) -> None:
        """Say, after Ctrl-C, how to continue the job."""
        self._terminal.redraw()
        of = "" if self._n_records is None else f" of {self._n_records:,}"
        self._terminal.line(
            f"stopped after {self._n_done:,}{of} records; {output} keeps their results: "
            "the same command continues with the others"
        )

    def end(self, progress: BatchSummary) -> None:
        """Report the job's results."""
        self._terminal.redraw()
        seconds = max(time.perf_counter() - self._began_s, 1e-9)
        parts = [f"{progress.n_done:,} records in {_duration(seconds)}", f"{progress.n_tokens:,} tokens"]
        parts.append(f"{progress.n_tokens / seconds:,.0f} tokens/s")
        if progress.n_failed:
            parts.append(f"{progress.n_failed:,} failed")
        if progress.n_cut:
            parts.append(f"{progress.n_cut:,} cut by max_tokens or the context")
        if progress.n_skipped:
            parts.append(f"{progress.n_skipped:,} were there already")
        if progress.n_skipped_failed:
            retry = " (--retry-failed answers them again)" if self._can_retry else ""
            parts.append(f"{progress.n_skipped_failed:,} of them failed{retry}")
        self._terminal.line(", ".join(parts))
        for reason, n in progress.reasons.most_common(_MOST_REASONS):
            self._terminal.line(f"{n:,} failed: {with_flags(reason)}")


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
