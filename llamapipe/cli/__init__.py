"""The ``llamapipe`` command.

Each command is a module with ``DESCRIPTION``, ``add_arguments`` and ``run``, and has a line in ``_COMMANDS`` here.
Options that several commands share are in ``options``. ``main`` parses the command line, runs the command and turns
errors into one message and an exit status. ``lm_eval`` is another program, ``llamapipe-lm-eval``.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import NoReturn

import llamapipe
from llamapipe._messages import as_options, did_you_mean, with_flags
from llamapipe.cli.parser import CommandParser, HelpFormatter, UsageError
from llamapipe.errors import LlamapipeError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_READER_GONE = 1, 2, 130, 141
# Each command with its line in the program's help. Only the module of the command that runs is imported.
_COMMANDS = {
    "demo": "show the library in under 20 seconds, offline",
    "generate": "continue one or more prompts",
    "chat": "hold a conversation with a model",
    "run": "hold a conversation with a model, named first",
    "serve": "serve a model over HTTP",
    "rpc-worker": "lend this machine's devices to a model elsewhere",
    "batch": "process a file of prompts, conversations or requests",
    "score": "print log-probabilities of continuations, or the perplexity of texts",
    "embed": "embed texts, or rerank them",
    "bench": "measure tokens per second and the time to the first token",
    "tune": "find the fastest number of threads and slots, and KV types",
    "trace": "record the timeline of an engine",
    "models": "list the models in the Hugging Face Hub's cache, and Ollama's",
    "pull": "download a model of the Hugging Face Hub",
    "rm": "delete a downloaded model of the Hugging Face Hub",
    "ps": "list the models of a running server, and what they take",
    "stop": "end a model of a running server",
    "doctor": "check the installation, or whether and how a model runs on this machine",
    "completion": "print a completion script for a shell",
}
_EPILOG = """\
exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted (serve: 0), 141 the reader closed the output

colours: only on a terminal, and only if NO_COLOR is not set"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return the exit status.

    0: done, or ``serve`` was ended by Ctrl-C or SIGTERM, even while a model loads; 1: failed, with one message on
    stderr; 2: wrong usage; 130: interrupted (Ctrl-C); 141: the reader of the output closed it, as with ``| head``.
    """
    for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
        if stream is None:  # the stream was closed before the start: discard all output to it
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect(nowhere):
                return main(argv)
    with suppress(AttributeError):  # a replaced stdout may not have this method
        # Windows' own encoding lacks most characters that models write.
        encoding = "utf-8" if sys.platform == "win32" else None
        sys.stdout.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    args = argparse.Namespace(verbose=False, argv=list(sys.argv[1:] if argv is None else argv))
    # A server that is told to end has succeeded.
    is_server = args.argv[:1] == ["serve"] and "--worker" not in args.argv
    try:
        with _sigterm_as_ctrl_c() if is_server else nullcontext():
            status = _run(args)
    except KeyboardInterrupt:
        return 0 if is_server else _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _abandon_stdout()
        return EXIT_READER_GONE
    except UsageError as error:
        args.parser.print_usage(sys.stderr)
        # A UsageError with a cause comes from the library, whose messages name arguments, not options.
        text = str(error) if error.__cause__ is None else as_options(str(error), args.parser.options())
        return _fail(f"{text} (see {args.parser.prog} --help)", EXIT_USAGE)
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        if isinstance(error, (LlamapipeError, OSError, ValueError, ImportError)):
            parser = getattr(args, "parser", None)  # None if an option's value was wrong
            known = () if parser is None else parser.options().values()
            return _fail(with_flags(_text(error), known), EXIT_FAILURE)
        return _fail(f"unexpected {type(error).__name__}: {error} (--verbose shows where)", EXIT_FAILURE)
    return status


def _run(args: argparse.Namespace) -> int:
    """Parse ``args.argv`` into ``args`` and run its command."""
    try:
        _parser(args.argv).parse_args(args.argv, args)
    except SystemExit as stop:  # argparse printed its help or its message
        status = int(stop.code or 0)
    else:
        if args.verbose:
            logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
            logging.getLogger("llamapipe").setLevel(logging.DEBUG)
        with _warnings_that_name(args.parser.options().values()):
            status = args.run(args)
    sys.stdout.flush()
    return status


@contextmanager
def _warnings_that_name(options: Container[str]) -> Iterator[None]:
    """Make the library's warnings name the command's options, as errors do."""

    def name(record: logging.LogRecord) -> bool:
        record.msg, record.args = with_flags(record.getMessage(), options), ()
        return True

    logger = logging.getLogger("llamapipe")
    logger.addFilter(name)
    try:
        yield
    finally:
        logger.removeFilter(name)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, which the first process of a container ignores without a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Parser(argparse.ArgumentParser):
    """The program's parser. Its message about an unknown command suggests the nearest one."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        match = re.search(r"invalid choice: '([^']*)'", message)
        if match is not None:
            hint = did_you_mean(match[1], _COMMANDS, "commands") or f"; commands: {', '.join(_COMMANDS)}"
            message = f"there is no command {match[1]!r}{hint}"
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"llamapipe: {message} (see llamapipe --help)\n")


def _parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Create the parser of a command line. By default, and for ``completion``, it has all commands' options."""
    parser = _Parser(
        prog="llamapipe",
        description="GGUF models through llama.cpp, in process, for many callers at once.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"llamapipe {llamapipe.__version__}")
    parser.set_defaults(command_line=parser)  # for completion
    common = CommandParser(add_help=False)
    common.add_argument(
        "-v", "--verbose", action="store_true", help="llama.cpp's log and Python tracebacks on stderr"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    wanted = "completion" if argv is None else next((word for word in argv if not word.startswith("-")), "")
    for name, summary in _COMMANDS.items():
        if wanted not in (name, "completion"):
            commands.add_parser(name, help=summary)
            continue
        command = import_module(f"llamapipe.cli.{name.replace('-', '_')}")
        added = commands.add_parser(
            name,
            parents=[common],
            usage=getattr(command, "USAGE", None),
            allow_abbrev=False,
            help=summary,
            description=command.DESCRIPTION,
            epilog=getattr(command, "EPILOG", None),
            formatter_class=HelpFormatter,
        )
        command.add_arguments(added)
        added.set_defaults(run=command.run, parser=added)
    return parser


def _text(error: Exception) -> str:
    """Return an error's message; for an OSError, the file and the reason, without the error number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(message: str, status: int) -> int:
    with suppress(OSError):  # stderr may also be closed
        print(f"llamapipe: {message}", file=sys.stderr)
    return status


def _abandon_stdout() -> None:
    """Discard buffered output; otherwise Python would report a BrokenPipeError at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
