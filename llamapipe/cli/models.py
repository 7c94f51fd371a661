"""``llamapipe models``: lists the models of the Hugging Face Hub and of Ollama that are on this machine."""

from __future__ import annotations

import argparse
import json
import sys

from llamapipe.cli._terminal import Terminal
from llamapipe.hub import CachedModel, cached_models
from llamapipe.ollama_models import PREFIX, stored_models

DESCRIPTION = (
    "List the GGUF files in the cache of the Hugging Face Hub (extra hub) and those that Ollama has downloaded, with "
    "the text that -m takes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    terminal = Terminal(sys.stdout)
    models = [
        CachedModel(PREFIX + stored.name, stored.path, stored.path.stat().st_size)
        for stored in stored_models()
    ]
    try:
        models = cached_models() + models
    except ImportError:
        if not models:
            raise
    for model in models:
        if args.json:
            record = {"model": model.reference, "path": str(model.path), "size_bytes": model.size_bytes}
            terminal.line(json.dumps(record))
        else:
            terminal.line(f"{model.size_bytes / 2**30:8.2f} GiB  {model.reference}")
    if not models and not args.json:
        print("no models yet; llamapipe chat -m hf:OWNER/REPO downloads one", file=sys.stderr)
    return 0
