"""``llamapipe rm``: deletes a model from the cache of the Hugging Face Hub."""

from __future__ import annotations

import argparse
import sys

from llamapipe.cli._terminal import Terminal
from llamapipe.cli.pull import reference_of
from llamapipe.hub import delete

DESCRIPTION = (
    "Delete a model from the cache of the Hugging Face Hub, and print the paths of its files. "
    "Needs the extra hub."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", metavar="NAME", help="what llamapipe models shows, such as hf:OWNER/REPO/FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    terminal = Terminal(sys.stdout)
    for path in delete(*reference_of(args.name)):
        terminal.line(str(path))
    return 0
