"""``llamapipe run MODEL``: ``llamapipe chat`` with the model's name first, as in ``ollama run``."""

from __future__ import annotations

import argparse
from pathlib import Path

from llamapipe.cli import chat
from llamapipe.cli.options import model_path
from llamapipe.hub import hub_name
from llamapipe.ollama_models import PREFIX, short_names

USAGE = "llamapipe run [options] MODEL [MESSAGE]"
DESCRIPTION = (
    "The same as llamapipe chat -m MODEL. MODEL may also be a name of a model that Ollama has downloaded, or "
    "hf.co/OWNER/REPO:QUANT."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model", type=read_model_name, metavar="MODEL", help="what -m of the other commands takes"
    )
    chat.add_chat_arguments(parser)


def read_model_name(text: str) -> Path:
    """Read a model's name as ``model_path`` does. Ollama's names and addresses of the Hub need no prefix."""
    if text in short_names() and not Path(text).exists():
        return model_path(PREFIX + text)
    return model_path(text if Path(text).exists() else hub_name(text) or text)


run = chat.run
