"""``llamapipe ps``: lists the models of a running server and their memory. Also sends other commands' requests."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

from llamapipe._messages import size_text
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.parser import UsageError

DESCRIPTION = (
    "List the models of a running server: whether each is loaded, the memory that it takes or would take, and its "
    "requests. With several models, llamapipe stop ends one."
)

URL_VARIABLE, KEY_VARIABLE = "LLAMAPIPE_URL", "LLAMAPIPE_API_KEY"
_URL = "http://127.0.0.1:8080"
_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    terminal = Terminal(sys.stdout)
    for model in ask(args, "/v1/models")["data"]:
        if "root" in model and "status" in model:  # another name of a listed model
            continue
        status = model.get("status", {"value": "loaded"})  # a server with one model sends no status
        record = {
            "model": model["id"],
            "state": status["value"],
            "memory_bytes": model.get("memory_bytes"),
            "n_requests": model.get("n_requests"),
        }
        if args.json:
            terminal.line(json.dumps(record))
            continue
        memory = "" if record["memory_bytes"] is None else size_text(record["memory_bytes"])
        n = record["n_requests"]
        requests = "" if n is None else f"{n} request{'s' * (n != 1)}"
        why = f"  {status['error']}" if "error" in status else ""
        terminal.line(f"{memory:>12}  {record['state']:<9}  {requests:<12}  {record['model']}{why}")
    return 0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the server's address."""
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE, _URL),
        metavar="URL",
        help=f"of the server (default: {_URL}, or the variable {URL_VARIABLE}); a key is read from the variable "
        f"{KEY_VARIABLE}",
    )


def ask(args: argparse.Namespace, path: str, body: Any = None) -> Any:
    """Request a path of the server and decode the answer. ``body``: None for GET. Raises UsageError, OSError."""
    from http.client import HTTPException, InvalidURL
    from urllib.error import HTTPError, URLError  # slow to import, and `serve` does not call this function
    from urllib.request import ProxyHandler, Request, build_opener

    wrong_url = UsageError(f"--url is {args.url!r}; write http://HOST:PORT")
    try:
        address = urlsplit(args.url)
        (address.hostname or "").encode("idna")
    except ValueError:
        raise wrong_url from None
    if address.scheme not in ("http", "https") or not address.hostname:
        raise wrong_url
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"the variable {KEY_VARIABLE} must hold a key in printable ASCII")
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    request = Request(args.url.rstrip("/") + path, data, headers)
    try:
        directly = build_opener(ProxyHandler({}))  # without a proxy
        with directly.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        with error:
            try:
                message = json.load(error)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = None
        if not isinstance(message, str):
            message = f"{error.code} {error.reason}"
        if error.code == 401:
            message = f"{message.partition(';')[0]}; put the key into the variable {KEY_VARIABLE}"
        raise OSError(f"{args.url}: {message}") from None
    except URLError as error:
        raise OSError(f"{args.url} cannot be reached: {error.reason}; is llamapipe serve running?") from None
    except InvalidURL:
        raise wrong_url from None
    except HTTPException as error:
        text = str(error).strip() or type(error).__name__
        raise OSError(f"{args.url} does not answer as an HTTP server does: {text}") from None
    except ValueError:
        raise OSError(f"{args.url}{path}: the answer is not JSON") from None
