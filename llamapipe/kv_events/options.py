"""Where and how an engine publishes its KV events."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamapipe.arguments import check_flag, check_int

EVENTS_THREAD_NAME = "llamapipe-kv-events"
BLOCK_SIZE = 16  # vLLM's default; routers read it from the events
_ADDRESS = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})|ipc://\S+")
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class KvEvents:
    """KV events of an engine: ``Engine(..., kv_events=lp.KvEvents("tcp://127.0.0.1:5557"))``; frozen.

    - ``endpoint``: the ZeroMQ address of the PUB socket, ``tcp://HOST:PORT`` or ``ipc://PATH``. Port 0 takes a free
      one. There is no authentication: use loopback, or a network that only the router can reach.
    - ``replay_endpoint``: the address of a ROUTER socket where subscribers ask for batches that they missed.
    - ``topic``: the first frame of each message. Default: ``kv@HOSTNAME@MODEL``, with the name of the model's file.
    - ``block_size``: tokens in a block. Prefixes are told in whole blocks.
    - ``n_replay``: batches that are kept for replays. What older ones stored is kept, too, in one batch.
    - ``connect``: connect the PUB socket to the endpoint, where the router listens, instead of listening there.

    Raises TypeError or ValueError naming the field.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str | None = None
    block_size: int = BLOCK_SIZE
    n_replay: int = 10_000
    connect: bool = False

    def __post_init__(self) -> None:
        _check_address("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_address("replay_endpoint", self.replay_endpoint)
        if self.topic is not None and not isinstance(self.topic, str):
            raise TypeError(f"topic must be a string or None, not {type(self.topic).__name__}")
        check_int("block_size", self.block_size, 1, 4096)
        check_int("n_replay", self.n_replay, 1, 10_000_000)
        check_flag("connect", self.connect)


def _check_address(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    found = _ADDRESS.fullmatch(value)
    if found is None or int(found["port"] or 0) > _LARGEST_PORT:
        raise ValueError(f"{name} is {value!r}; it must be tcp://HOST:PORT or ipc://PATH")
