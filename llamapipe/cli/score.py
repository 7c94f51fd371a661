"""``llamapipe score``: computes how probable continuations of a prompt are, or the perplexity of a text."""

from __future__ import annotations

import argparse
import json
import sys

import llamapipe as lp
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import add_engine_options, add_files, add_model, open_model_and_engine
from llamapipe.cli.parser import UsageError, read_file, read_stdin, stdin_is_terminal

USAGE = "llamapipe score [options] PROMPT CONTINUATION ..."
DESCRIPTION = """\
Print the log-probability of each continuation of a prompt, the most probable first. With -f, or a text on
standard input and no arguments, print the perplexity of texts."""
EPILOG = """\
examples:
  llamapipe score "What does a cow say? A cow says" " moo" " meow"
  llamapipe score -m model.gguf -f book.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a prompt and its continuations")
    add_model(parser)
    add_files(parser, "print the perplexity of this file's text; - is standard input (repeatable)")
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="compute perplexity as llama.cpp's tool does, over windows of N tokens",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    piped = "" if args.texts or args.file or stdin_is_terminal() else read_stdin()
    if bool(args.texts) == bool(args.file or piped):
        raise UsageError("give a prompt and its continuations, or files with -f")
    files = [("-", piped)] if piped else [(str(file), read_file(file)) for file in args.file]
    if args.texts and len(args.texts) < 2:
        raise UsageError("the prompt has no continuation; give one or more after it")
    if args.texts and args.window is not None:
        raise UsageError("--window is for the perplexity of texts: leave it out, or give files with -f")
    terminal = Terminal(sys.stdout)
    with open_model_and_engine(args) as engine:
        if args.texts:
            prompt, *continuations = args.texts
            scores = zip(continuations, engine.score(prompt, continuations), strict=True)
            for text, score in sorted(scores, key=lambda pair: -pair[1].total):
                if args.json:
                    record = {"continuation": text, "logprob": score.total, "n_tokens": len(score.token_ids)}
                    terminal.line(json.dumps(record | {"is_greedy": score.is_greedy}))
                else:
                    mark = "  greedy" if score.is_greedy else ""
                    terminal.line(f"{score.total:10.4f}  {terminal.text(text)}{terminal.style(mark, 'dim')}")
        for name, text in files:
            value = _perplexity(engine, text, args.window)
            record = {"file": name, "perplexity": value}
            terminal.line(json.dumps(record) if args.json else f"{value:10.4f}  {terminal.text(name)}")
    return 0


def _perplexity(engine: lp.Engine, text: str, window: int | None) -> float:
    """Return the perplexity of a text. Raises InvalidRequestError and UsageError, which name the options."""
    try:
        return engine.perplexity(text, window)
    except lp.errors.InvalidRequestError as error:
        raise lp.errors.InvalidRequestError(str(error).replace("n_window", "--window")) from error
    except ValueError as error:
        raise UsageError(str(error).replace("n_window", "--window")) from error
