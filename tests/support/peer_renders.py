"""Renders conversations with xllamacpp's servers: JSON of templates on standard input, a line for each on its output.

The servers are not closed: the process ends without that.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

import xllamacpp


def serve(model: str, template: str) -> Any:
    """A server that renders with this template."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, 256, 1, False
    params.use_jinja, params.chat_template = True, template
    return xllamacpp.Server(params)


def applied(address: str, conversation: dict[str, Any]) -> str | None:
    """The prompt of a conversation, or None where the template refuses it."""
    body = json.dumps(conversation).encode()
    request = urllib.request.Request(f"{address}/apply-template", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            text: str = json.loads(answer.read())["prompt"]
            return text
    except urllib.error.HTTPError:
        return None


if __name__ == "__main__":
    request = json.load(sys.stdin)
    servers = []
    for name, template in request["templates"].items():
        servers.append(serve(request["model"], template))
        address = servers[-1].listening_address
        prompts = {
            key: applied(address, conversation) for key, conversation in request["conversations"].items()
        }
        print(json.dumps({name: prompts}))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)
