"""Sends KV events over ZeroMQ and answers requests for missed ones, from two threads of its own.

A message has three frames: the topic, the batch's number (eight bytes, big-endian, from 0), and the batch in
MessagePack: ``[time, [event, …]]``, where an event is an array that begins with its name. A subscriber that finds a
number other than the next one has missed batches; it asks for them at the replay endpoint. If these are not kept any
longer, the answer begins with one batch that clears all blocks and stores those that were there. The frames of an
answer are an empty one and those of a message, as in vLLM since 0.26; number -1 and an empty batch end it.

The first batch clears all blocks, and so does the last: what a subscriber knows of an engine that was here before is
wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from llamapipe.kv_events.blocks import Block, BlockTracker, Cleared, Event, Removed, Stored, chains
from llamapipe.kv_events.options import EVENTS_THREAD_NAME, KvEvents
from llamapipe.locks import Lock

_MAX_WAITING = 64  # batches; while as many wait, changes are collected in the tracker
_MAX_UNSENT = 100_000  # batches for one slow subscriber; it misses those after them
_LINGER_MS = 200  # for the last batches when the engine closes
_JOIN_S = 5.0
_N_REPLAYED = 3  # frames of a request for a replay
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)
_log = logging.getLogger("llamapipe.kv_events")


class Publisher:
    """The sockets and threads of one engine's events. ``put`` and ``flush`` are for the engine thread.

    ``options``: with the addresses that are in use. ``tracker``: where ``flush`` takes the events. ``n_put``: batches
    that were put; the next one has this number. Raises OSError if an address cannot be used, ImportError without the
    extra ``kv-events``.
    """

    def __init__(self, options: KvEvents, model_name: str) -> None:
        self._zmq = zmq = _module("zmq")
        self._encode = _module("msgspec").msgpack.Encoder().encode
        self.tracker = BlockTracker(options.block_size)
        self.n_put = 0
        self._queue: SimpleQueue[list[Event] | None] = SimpleQueue()
        self._lock = Lock()  # of what the two threads share
        self._kept: deque[tuple[int, bytes, list[Event]]] = deque()
        self._base: dict[int, Block] = {}  # what batches before the kept ones stored
        self._closed = False
        self._context = zmq.Context()
        self._replay: Any = None
        topic = options.topic
        if topic is None:
            topic = f"kv@{os.uname().nodename}@{model_name}"
        self._topic = topic.encode()
        self._n_kept = options.n_replay
        try:
            self._pub = self._socket(zmq.PUB, options.endpoint, options.connect)
            options = replace(options, endpoint=self._pub.last_endpoint.decode(), topic=topic)
            if options.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, options.replay_endpoint)
                options = replace(options, replay_endpoint=self._replay.last_endpoint.decode())
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.options = options
        targets = (self._run,) if self._replay is None else (self._run, self._answer)
        self._threads = [
            threading.Thread(target=target, name=EVENTS_THREAD_NAME, daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()
        self._put([Cleared()])

    def __repr__(self) -> str:
        return f"<Publisher {self.options.endpoint} n_put={self.n_put}>"

    def _socket(self, kind: int, address: str, connect: bool = False) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        made.linger = _LINGER_MS
        made.sndhwm = _MAX_UNSENT
        made.ipv6 = "[" in address
        try:
            if connect:
                made.connect(address)
            else:
                made.bind(address)
        except zmq.ZMQError as e:
            raise OSError(e.errno, f"cannot use {address} for KV events: {e.strerror}") from None
        return made

    # ---- the engine thread
    def flush(self) -> None:
        """Sends what has changed since the last call. Does not wait: while many batches wait, changes are collected."""
        if self._queue.qsize() < _MAX_WAITING:
            events = self.tracker.take()
            if events:
                self._put(events)

    def _put(self, events: list[Event]) -> None:
        self.n_put += 1
        self._queue.put(events)

    def close(self) -> None:
        """Sends a last batch and closes the sockets. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._put([Cleared()])
        self._queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    # ---- the publishing thread
    def _run(self) -> None:
        number = 0
        try:
            while (events := self._queue.get()) is not None:
                payload = self._encode([time.time(), [self._array(event) for event in events]])
                with self._lock:  # also for a replay between two batches
                    self._keep(number, payload, events)
                self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
                number += 1
        except Exception:
            _log.exception("KV events are not published any longer")
        finally:
            self._pub.close()
            self._context.term()  # ends the other thread, too

    def _array(self, event: Event) -> list[object]:
        if isinstance(event, Stored):
            size = self.tracker.block_size
            return ["BlockStored", event.hashes, event.parent, event.tokens, size, None, None, None]
        if isinstance(event, Removed):
            return ["BlockRemoved", event.hashes, None]
        return ["AllBlocksCleared"]

    def _keep(self, number: int, payload: bytes, events: list[Event]) -> None:
        self._kept.append((number, payload, events if self._replay is not None else []))
        if len(self._kept) > self._n_kept:
            apply(self._base, self._kept.popleft()[2], self.tracker.block_size)

    # ---- the thread of replays
    def _answer(self) -> None:
        replay, zmq = self._replay, self._zmq
        try:
            while True:
                frames = replay.recv_multipart()
                if len(frames) != _N_REPLAYED or len(frames[2]) != len(_REPLAY_END):
                    _log.warning("a request for KV events is not an empty frame and a number of eight bytes")
                    continue
                for number, payload in self._since(int.from_bytes(frames[2], "big")):
                    replay.send_multipart([*frames[:2], self._topic, number.to_bytes(8, "big"), payload])
                replay.send_multipart([*frames[:2], b"", _REPLAY_END, b""])
        except zmq.ContextTerminated:
            pass
        except Exception:
            _log.exception("KV events are not replayed any longer")
        finally:
            replay.close()

    def _since(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from a number on; one that stores all blocks before them, if some are not kept."""
        with self._lock:
            kept = [(number, payload) for number, payload, _ in self._kept if number >= first]
            oldest = self._kept[0][0] if self._kept else 0
            base = list(self._base.items()) if first < oldest else None
        if base is None:
            return kept
        events = [self._array(Cleared()), *map(self._array, chains(base))]
        return [(oldest - 1, self._encode([time.time(), events])), *kept]


def apply(blocks: dict[int, Block], events: Iterable[Event], size: int) -> None:
    """Has the blocks be what they are after these events. Parents stay before their children."""
    for event in events:
        if isinstance(event, Stored):
            parent = event.parent
            for i, key in enumerate(event.hashes):
                blocks[key] = Block(0, parent, tuple(event.tokens[i * size : (i + 1) * size]))
                parent = key
        elif isinstance(event, Removed):
            for key in event.hashes:
                blocks.pop(key, None)
        else:
            blocks.clear()


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f'kv_events needs {name}, which is not installed: pip install "llamapipe[kv-events]"'
        ) from None
