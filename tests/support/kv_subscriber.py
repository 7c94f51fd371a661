"""A subscriber of KV events, like a router's: rebuilds the cache from what arrives, and asks for what it missed."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
import zmq

from llamapipe.kv_events import KvEvents
from support.control import PATIENCE_S

END = b"\xff" * 8
Prefix = tuple[int, ...]


class GapError(Exception):
    """A batch came whose number is not the next one."""


class Index:
    """The blocks of one engine, from its events. ``blocks``: for each hash, all tokens up to the block's end."""

    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}

    def apply(self, event: list[Any]) -> None:
        name, *fields = event
        if name == "BlockStored":
            hashes, parent, tokens, size = fields[:4]
            assert len(tokens) == size * len(hashes)
            prefix = () if parent is None else self.blocks[parent]
            for i, key in enumerate(hashes):
                assert 0 <= key < 2**64 and key not in self.blocks, "stored twice"
                prefix += tuple(tokens[i * size : (i + 1) * size])
                self.blocks[key] = prefix
        elif name == "BlockRemoved":
            for key in fields[0]:
                del self.blocks[key]
        else:
            assert name == "AllBlocksCleared"
            self.blocks.clear()

    @property
    def prefixes(self) -> set[Prefix]:
        prefixes = set(self.blocks.values())
        assert len(prefixes) == len(self.blocks), "two hashes for one prefix"
        return prefixes


class Subscriber:
    """Follows an engine's events. ``next``: the number of the batch to come."""

    def __init__(self, options: KvEvents | None) -> None:
        assert options is not None
        self.index = Index()
        self.next = 0
        self._last_received = -1
        self._topic = "kv@" if options.topic is None else options.topic
        self._endpoint = options.endpoint
        self._context = zmq.Context()
        self._sub = self._socket(zmq.SUB, options.endpoint)
        if options.replay_endpoint is not None:
            self._replay = self._socket(zmq.DEALER, options.replay_endpoint)

    def _socket(self, kind: int, address: str) -> Any:
        endpoint = self._context.socket(kind)
        endpoint.linger = 0
        endpoint.rcvtimeo = int(PATIENCE_S * 1000)
        if kind == zmq.SUB:
            endpoint.subscribe(self._topic)
        endpoint.connect(address)
        return endpoint

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def wait(self, cause: Callable[[], object]) -> None:
        """Returns when a batch waits to be received: until the engine knows of the subscription, they are lost.

        ``cause`` makes the engine publish one.
        """
        deadline = monotonic() + PATIENCE_S
        while not self._sub.poll(10):
            assert monotonic() < deadline, "no batch came"
            cause()

    def disconnect(self) -> None:
        """Receives nothing until ``reconnect``."""
        self._sub.close()

    def reconnect(self) -> None:
        """Receives batches again."""
        self._sub = self._socket(zmq.SUB, self._endpoint)

    def receive(self) -> int:
        """Waits for a batch, applies it, returns its number. Raises GapError, changing nothing, if one is missing."""
        _, frame, payload = self._sub.recv_multipart()
        number = int.from_bytes(frame, "big")
        if number <= self._last_received:  # the engine was started again
            self.index = Index()
            self.next = 0
        self._last_received = number
        return self._apply(number, payload)

    def replay(self, end: int = 0) -> list[int]:
        """Asks for all batches from the next one on and applies them; again if those before ``end`` were not yet sent.

        Returns their numbers.
        """
        numbers: list[int] = []
        while True:
            self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
            while (frames := self._replay.recv_multipart())[2] != END:
                assert frames[0] == b"" and frames[1].startswith(self._topic.encode())
                number = int.from_bytes(frames[2], "big")
                if not numbers:
                    self.next = number  # older ones may have become one batch, which clears all blocks first
                self._apply(number, frames[3])
                numbers.append(number)
            assert frames == [b"", b"", END, b""]
            if self.next >= end:
                return numbers

    def _apply(self, number: int, payload: bytes) -> int:
        if number < self.next:
            return number  # a replay had it, too
        if number != self.next:
            raise GapError(f"batch {number} instead of {self.next}")
        _, events = msgspec.msgpack.decode(payload)
        for event in events:
            self.index.apply(event)
        self.next = number + 1
        return number
