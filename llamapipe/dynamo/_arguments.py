"""The command line of ``python -m llamapipe.dynamo``.

Options of Dynamo's runtime have the names and environment variables that Dynamo gives them.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import llamapipe as lp
from llamapipe._messages import quoted
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    add_adapters,
    add_engine_options,
    add_model,
    load_adapters,
    open_engine,
    open_model,
    read_options,
)
from llamapipe.cli.parser import CommandParser, HelpFormatter, UsageError
from llamapipe.gguf.reader import fingerprint
from llamapipe.host.folders import cache_folder

_log = logging.getLogger("llamapipe")
_DESCRIPTION = "Run a worker for NVIDIA Dynamo. Without -m, use the bundled model."
_EPILOG = """\
example, on one machine and without etcd:
  python -m llamapipe.dynamo -m model.gguf --discovery-backend file --event-plane zmq
  python -m dynamo.frontend --discovery-backend file --event-plane zmq --migration-limit 3

After SIGTERM the worker accepts no new requests, finishes the running ones and exits."""
# Options of Dynamo's runtime: the environment variable that sets each, its default, its help.
_RUNTIME = {
    "--namespace": ("DYN_NAMESPACE", "dynamo", "namespace of the worker"),
    "--endpoint": ("DYN_ENDPOINT", None, "dyn://NAMESPACE.COMPONENT.ENDPOINT; replaces --namespace"),
    "--discovery-backend": ("DYN_DISCOVERY_BACKEND", "etcd", "discovery: etcd, kubernetes, file or mem"),
    "--request-plane": ("DYN_REQUEST_PLANE", "tcp", "how requests are sent: tcp or nats"),
    "--event-plane": ("DYN_EVENT_PLANE", None, "how events are published: zmq or nats"),
    "--endpoint-types": ("DYN_ENDPOINT_TYPES", "chat,completions", "endpoints that the frontend serves"),
    "--dyn-tool-call-parser": ("DYN_TOOL_CALL_PARSER", None, "parser that the frontend uses for tool calls"),
    "--dyn-reasoning-parser": ("DYN_REASONING_PARSER", None, "parser that the frontend uses for reasoning"),
}


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    command = CommandParser(
        prog="python -m llamapipe.dynamo",
        usage="python -m llamapipe.dynamo [options]",
        allow_abbrev=False,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_model(command)
    command.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file that replaces the model's template"
    )
    command.add_argument(
        "--served-model-name", metavar="NAME", help="model name that clients use (default: the file's name)"
    )
    command.add_argument(
        "--tokenizer-dir",
        type=Path,
        metavar="DIR",
        help="where to write tokenizer.json for the frontend (default: a folder in the user's cache)",
    )
    add_adapters(command, "clients use its name as a model's")
    command.add_argument(
        "-v", "--verbose", action="store_true", help="llama.cpp's log and tracebacks on stderr"
    )
    runtime = command.add_argument_group("Dynamo's runtime")
    for flag, (variable, default, text) in _RUNTIME.items():
        shown = f"{variable}" if default is None else f"{variable}; {default}"
        runtime.add_argument(
            flag, metavar="TEXT", default=os.environ.get(variable) or default, help=f"{text} ({shown})"
        )
    add_engine_options(command)
    return command


class WorkerOptions(NamedTuple):
    """The settings of a worker.

    ``open_engine`` makes the engine and registers its closing with the ExitStack that it gets; it runs in a thread.
    ``folder``: where the frontend's tokenizer files are written. ``registration``: how the model and its adapters are
    registered, as fields of Dynamo's ``WorkerConfig``.
    """

    open_engine: Callable[[ExitStack], lp.Engine]
    folder: Path
    name: str
    registration: dict[str, Any]


def worker_options(args: argparse.Namespace) -> WorkerOptions:
    """Return the settings from parsed arguments. Raises UsageError, OSError."""
    file: Path = lp.demo_model_path() if args.model is None else args.model
    name = args.served_model_name or file.stem
    for adapter, _ in (*args.lora, *args.control_vector):
        if adapter == name:
            raise UsageError(f"{quoted(name)} is also the name of the model; give the adapter another name")
    namespace, component, endpoint = _address(args)
    folder = (args.tokenizer_dir or default_folder(file, args.chat_template)).absolute()

    def opened(undo: ExitStack) -> lp.Engine:
        options = {"chat_template": args.chat_template, **read_options(args, MODEL)}
        model = undo.enter_context(open_model(file, options, show_progress=False))
        load_adapters(model, args)
        return undo.enter_context(open_engine(model, read_options(args, ENGINE)))

    registration = {
        "namespace": namespace,
        "component": component,
        "endpoint": endpoint,
        "model_name": str(folder),
        "served_model_name": name,
        "endpoint_types": args.endpoint_types,
        "discovery_backend": args.discovery_backend,
        "request_plane": args.request_plane,
        "event_plane": args.event_plane,
        "tool_call_parser": args.dyn_tool_call_parser,
        "reasoning_parser": args.dyn_reasoning_parser,
    }
    return WorkerOptions(opened, folder, name, registration)


def _address(args: argparse.Namespace) -> tuple[str, str, str]:
    if args.endpoint is None:
        return args.namespace, "backend", "generate"
    parts = args.endpoint.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts):
        raise UsageError(
            f"--endpoint is {args.endpoint!r}, which is not dyn://NAMESPACE.COMPONENT.ENDPOINT; write it in that form"
        )
    return parts[0], parts[1], parts[2]


def default_folder(file: Path, chat_template: str | None) -> Path:
    """Return a folder in the user's cache for the frontend's files. Workers with the same model and template share it.

    It remains after the worker exits, because a frontend may read it for another worker of the same model. Without a
    home folder it is a temporary folder that no other worker shares, and a warning is logged.
    """
    key = fingerprint(file)
    if chat_template is not None:
        key += Path(chat_template).read_bytes()
    name = hashlib.blake2b(key, digest_size=16).hexdigest()
    try:
        return cache_folder() / "tokenizers" / name
    except RuntimeError as error:  # the user has no name, and HOME is not set
        folder = Path(tempfile.mkdtemp(prefix="llamapipe-tokenizers-"))
        _log.warning(
            "%s; tokenizer.json is in %s: give --tokenizer-dir, or set LLAMAPIPE_CACHE_DIR", error, folder
        )
        return folder / name
