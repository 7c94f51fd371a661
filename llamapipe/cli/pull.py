"""``llamapipe pull``: downloads a model from the Hugging Face Hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamapipe.cli._terminal import Terminal
from llamapipe.cli.parser import UsageError, usage_errors
from llamapipe.hub import Reference, hub_name, model_file, parse
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.ollama_models import short_names

DESCRIPTION = (
    "Download a model from the Hugging Face Hub to its cache, where -m finds it, and print the path of its file. Needs "
    "the extra hub."
)
EPILOG = """\
examples:
  llamapipe pull hf:OWNER/REPO:Q4_K_M
  llamapipe pull hf.co/OWNER/REPO:Q4_K_M     # like ollama pull
  llamapipe pull hf:OWNER/REPO/FILE.gguf"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", metavar="NAME", help="hf:OWNER/REPO[/FILE], hf:OWNER/REPO:QUANT or its address"
    )


def reference_of(name: str) -> Reference:
    """Return the Hub file that a name refers to. Raises UsageError."""
    on_hub = hub_name(name)  # Ollama keeps what it downloaded from there under such a name
    if name.startswith(OLLAMA) or (on_hub is None and name in short_names()):
        raise UsageError(f"{name} belongs to Ollama: use ollama pull or ollama rm")
    with usage_errors():
        return parse(on_hub or name)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    path: Path = model_file(*reference_of(args.name), progress=sys.stderr.isatty())
    Terminal(sys.stdout).line(str(path))
    return 0
