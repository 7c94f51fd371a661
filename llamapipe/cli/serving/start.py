"""How a server starts: the port, the chat template, and the text that tells where the server is."""

from __future__ import annotations

import errno
import mmap
import sys
from pathlib import Path
from socket import gaierror
from typing import TYPE_CHECKING

import llamapipe as lp
from llamapipe.cli.loading import template_problem
from llamapipe.cli.options import UsageError
from llamapipe.gguf.reader import parse_head

if TYPE_CHECKING:
    from socket import socket

    from llamapipe.server import ServerSettings

_ANNOUNCEMENT = """\
llamapipe serves {model} at {url}{workers}

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
{call}

{page}{events}Press Ctrl-C to stop the server."""
_CHAT = """\
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Hello"}}])
  print(answer.choices[0].message.content)"""
_COMPLETION = """\
  answer = client.completions.create(model="{model}", prompt="Once upon a time", max_tokens=64)
  print(answer.choices[0].text)"""


def listening_socket(host: str, port: int) -> socket:
    """A socket that listens on the address. Raises OSError, which names the option to change."""
    from llamapipe.server import bound_socket

    try:
        return bound_socket(host, port)
    except gaierror as error:
        raise OSError(f"--host {host} is not a valid address: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"{host}:{port} is in use; choose another port with --port") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(f"--host {host} is not an address of this machine") from error
        if error.errno == errno.EACCES:
            raise OSError(
                f"port {port} needs root privileges; choose a port of 1024 or higher with --port"
            ) from error
        raise


def check_template(model: lp.Model, file: str | None, warns: bool) -> None:
    """Raises UsageError for a broken template that was given; warns of a model without a template that works."""
    problem = template_problem(model)
    if problem is None:
        return
    if file is not None:
        raise UsageError(f"--chat-template: {problem}")
    if warns:
        print(
            f"llamapipe: {problem}: chat requests will be refused with status 400; give a template with "
            "--chat-template FILE",
            file=sys.stderr,
        )


def has_template(path: Path) -> bool:
    """Whether a GGUF file, which was loaded before, has a chat template. Loads nothing of llama.cpp."""
    with path.open("rb") as file:
        head = parse_head(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return "tokenizer.chat_template" in head.entries


def announce(
    settings: ServerSettings,
    sock: socket,
    stem: str,
    can_chat: bool,
    n_workers: int = 0,
    events: lp.KvEvents | None = None,
) -> None:
    """Tells where the server is, and shows a request that it answers."""
    host, port = sock.getsockname()[:2]
    url = f"http://{'[' + host + ']' if ':' in host else host}:{port}"
    model = (settings.model_names or (stem,))[0]
    print(
        _ANNOUNCEMENT.format(
            model=model,
            url=url,
            key="YOUR KEY" if settings.api_keys else "none",
            call=(_CHAT if can_chat else _COMPLETION).format(model=model),
            workers=f" with {n_workers} worker{'s' * (n_workers > 1)}" if n_workers else "",
            page=f"In a browser: {url}    " if settings.page else "",
            events=_where(events),
        ),
        flush=True,
    )
    if not settings.api_keys and host not in ("127.0.0.1", "::1"):
        print(
            f"llamapipe: {host} can be reached from other machines, and no API key is required",
            file=sys.stderr,
        )


def _where(events: lp.KvEvents | None) -> str:
    """A line about where KV events are published."""
    if events is None:
        return ""
    replay = f", missed ones at {events.replay_endpoint}" if events.replay_endpoint else ""
    return f"KV events at {events.endpoint}{replay}\n"
