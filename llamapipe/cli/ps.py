"""``llamapipe ps``: the models of a running server, and what each takes."""

from __future__ import annotations

import argparse
import json
import sys

from llamapipe.cli._server import add_server_arguments, ask
from llamapipe.cli._terminal import Terminal
from llamapipe.model_pool import size

HELP = "list the models of a running server, and what they take"
DESCRIPTION = (
    "List the models of a running server: whether each is loaded, the memory that it takes, and its requests. With "
    "several models, llamapipe stop ends one."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    terminal = Terminal(sys.stdout)
    for model in ask(args, "/v1/models")["data"]:
        if "root" in model and "status" in model:  # one more name of a model
            continue
        status = model.get("status", {"value": "loaded"})  # a server with one model does not say
        record = {
            "model": model["id"],
            "state": status["value"],
            "memory_bytes": model.get("memory_bytes"),
            "n_requests": model.get("n_requests"),
        }
        if args.json:
            terminal.line(json.dumps(record))
            continue
        memory = "" if record["memory_bytes"] is None else size(record["memory_bytes"])
        requests = "" if record["n_requests"] is None else f"{record['n_requests']} requests"
        why = f"  {status['error']}" if "error" in status else ""
        terminal.line(f"{memory:>12}  {record['state']:<9}  {requests:<12}  {record['model']}{why}")
    return 0
