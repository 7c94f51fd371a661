"""The settings of a server, from the options of ``llamapipe serve`` and from the environment."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from llamapipe.arguments import nearest
from llamapipe.cli.options import UsageError

KEYS_VARIABLE = "LLAMAPIPE_API_KEYS"
_OPTIONS = {  # fields whose option has another name
    "model_names": "--alias",
    "embedding_names": "--embeddings-alias",
    "api_keys": "--api-key-file",
    "cors_origins": "--cors",
    "allow_hosts": "--allow-host",
}


def settings_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` that were given."""
    values: dict[str, Any] = {
        "model_names": tuple(args.alias),
        "embedding_names": tuple(args.embeddings_alias),
        "api_keys": _keys(args.api_key_file),
        "cors_origins": tuple(args.cors),
        "allow_hosts": tuple(args.allow_host),
        "timeout_s": args.timeout,
        "strict": args.strict,
        "page": not args.no_page,
    }
    seconds = {
        "head_timeout_s": args.head_timeout,
        "body_timeout_s": args.body_timeout,
        "ping_s": args.ping,
        "grammar_timeout_s": args.grammar_timeout,
    }
    values |= {name: given for name, given in seconds.items() if given is not None}
    for name in (
        "max_requests",
        "max_n",
        "max_messages",
        "max_text_characters",
        "max_body_bytes",
        "max_bodies_bytes",
        "max_connections_per_address",
    ):
        if getattr(args, name) is not None:
            values[name] = getattr(args, name)
    return values


def with_option_name(message: str) -> str:
    """A message of ``ServerSettings`` that begins with a field's name, with the option's name in its place."""
    from llamapipe.server import ServerSettings

    field = re.split(r"\W", message, maxsplit=1)[0]
    if field not in ServerSettings.__dataclass_fields__:
        return message
    option = _OPTIONS.get(field) or "--" + field.removesuffix("_s").replace("_", "-")
    return option + message[len(field) :]


def _keys(path: Path | None) -> tuple[str, ...]:
    """The keys of the file and of the environment. A misspelt variable is an error, not a server without keys."""
    prefix = "LLAMAPIPE_"
    known = KEYS_VARIABLE.removeprefix(prefix)
    for name in os.environ:
        # Without what all variables of llamapipe have in common, which would make any two of them alike.
        if name.startswith(prefix) and name != KEYS_VARIABLE and nearest(name.removeprefix(prefix), [known]):
            raise UsageError(f"the variable {name} is unknown; did you mean {KEYS_VARIABLE}?")
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise UsageError(f"--api-key-file: {path} holds no key")
        keys += found
    return tuple(key.strip() for key in keys if key.strip())
