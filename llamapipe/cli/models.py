"""``llamapipe models``: the models of the Hugging Face Hub that are on this machine."""

from __future__ import annotations

import argparse
import json
import sys

from llamapipe.cli._terminal import Terminal
from llamapipe.hub import cached_models


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "models",
        parents=[common],
        allow_abbrev=False,
        help="list the models in the Hugging Face Hub's cache",
        description="List the GGUF files in the cache of the Hugging Face Hub, with the text that -m takes. "
        "Needs the extra hub.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    terminal = Terminal(sys.stdout)
    models = cached_models()
    for model in models:
        if args.json:
            record = {"model": model.reference, "path": str(model.path), "size_bytes": model.size_bytes}
            terminal.line(json.dumps(record))
        else:
            terminal.line(f"{model.size_bytes / 2**30:8.2f} GiB  {model.reference}")
    if not models and not args.json:
        print("no models yet; llamapipe chat -m hf:OWNER/REPO downloads one", file=sys.stderr)
    return 0
