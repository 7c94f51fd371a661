"""``llamapipe stop NAME``: unloads a model of a running server that has several models."""

from __future__ import annotations

import argparse

from llamapipe.cli.ps import add_server_arguments, ask

DESCRIPTION = (
    "End a model of a running server with several (llamapipe serve --models) when its requests are answered. The next "
    "request that names it loads it again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", metavar="NAME", help="what llamapipe ps shows")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    ask(args, "/models/unload", {"model": args.name})
    return 0
