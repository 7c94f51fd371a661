"""``llamapipe completion``: prints what a shell needs to complete commands and options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from llamapipe.arguments import path_of

DESCRIPTION = """\
Print a script that completes commands and options in a shell. Needs the extra completion.

  llamapipe completion bash > ~/.local/share/bash-completion/completions/llamapipe
  llamapipe completion zsh > ~/.zsh/_llamapipe       # a folder of fpath"""
_SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=_SHELLS, help="bash, zsh or tcsh")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    try:
        import shtab
    except ImportError:
        raise ImportError("shell completion needs shtab: pip install 'llamapipe[completion]'") from None
    for parser in _parsers(args.command_line):
        for action in parser._actions:
            if action.type is path_of or (
                isinstance(action.metavar, str) and action.metavar.startswith("FILE")
            ):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(args.command_line, shell=args.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser and its commands' parsers."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _parsers(command)
