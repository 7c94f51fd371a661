"""The shared part of the encoders of OpenAI's completions and chat APIs: the chunks of a stream, usage, progress."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import llamapipe
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import build_info
from llamapipe.results import ChatDelta, Delta
from llamapipe.server._times import RequestTimes
from llamapipe.server.dialects.encoder import Counts, Encoder, Part_contra
from llamapipe.server.json_bytes import encode_json, event
from llamapipe.streams import PromptProgress

DONE = b"data: [DONE]\n\n"
_PAD_TO = 32  # characters; padding extends an event's text to the next multiple of this


class Format(NamedTuple):
    """The parts of an answer that a request asks for in addition to text.

    ``with_usage``: the stream ends with the usage. ``continuous_usage``: each event has the usage. ``padded``: see
    ``ChunkWriter``. ``token_ids``: the answer has the token ids, including the prompt's. ``tokens_as_ids``:
    log-probabilities name tokens by id. ``timings_per_token``: each event has the timings so far. ``predicted``: the
    request has a prediction of the text, and the usage counts accepted and rejected tokens. ``with_progress``: events
    report how much of the prompt is computed.
    """

    with_usage: bool = False
    continuous_usage: bool = False
    padded: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    timings_per_token: bool = False
    predicted: bool = False
    with_progress: bool = False


@cache
def system_fingerprint() -> str:
    """Return the versions of the software: llama.cpp's release or commit, and llamapipe's version.

    With another fingerprint, the same seed may give a different answer.
    """
    return f"{build_info().get('llama_cpp_commit', 'unknown')[:9]}-llamapipe-{llamapipe.__version__}"


def common_fields(call_id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    """Return the fields of an answer, or of each of its events, other than choices. ``kind``: its ``object``."""
    return {
        "id": call_id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": system_fingerprint(),
    }


class ChunkWriter:
    """Writes the events of one stream of OpenAI's API.

    ``common``: the fields that are the same in each event; they are encoded once. ``padded``: a field ``obfuscation``
    hides the length of texts. As in llama-server and vLLM, only events that have a usage have the field. OpenAI's have
    null in the others, and clients of llama-server, such as Strands, take an event with the field for the last one.
    """

    def __init__(self, common: Mapping[str, Any], padded: bool = False) -> None:
        self._common = common
        self._head = b"data: " + encode_json(self._common)[:-1] + b',"choices":['
        self._tail = b"]}\n\n"
        self._padded = padded

    def __repr__(self) -> str:
        return f"<ChunkWriter {self._common['id']}>"

    def chunk(self, choice: bytes, text: str = "", timings: dict[str, Any] | None = None) -> bytes:
        """Return an event with one choice, given as encoded JSON.

        ``text``: the text whose length the padding hides.
        """
        if not self._padded and timings is None:
            return self._head + choice + self._tail
        more = b"]"
        if self._padded:
            padding = secrets.token_hex(_PAD_TO)[: _PAD_TO - len(text) % _PAD_TO]
            more += b',"obfuscation":"' + padding.encode() + b'"'
        if timings is not None:
            more += b',"timings":' + encode_json(timings)
        return self._head + choice + more + self._tail[1:]

    def progress(self, choice: bytes, progress: PromptProgress) -> bytes:
        """Return an event with ``prompt_progress``."""
        fields = encode_json(progress_fields(progress))
        return self._head + choice + b'],"prompt_progress":' + fields + self._tail[1:]

    def set_usage(self, usage: dict[str, Any]) -> None:
        """Set the usage of the next events."""
        self._tail = b'],"usage":' + encode_json(usage) + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the event that ends a stream with usage."""
        return event({**self._common, "choices": [], "usage": usage})


def progress_fields(progress: PromptProgress) -> dict[str, int]:
    """Return llama-server's ``prompt_progress``: counts of tokens, and milliseconds since the prompt began."""
    return {
        "total": progress.n_prompt_tokens,
        "cache": progress.n_cached_tokens,
        "processed": progress.n_done,
        "time_ms": round(progress.seconds * 1e3),
    }


class Computing(Protocol):
    """A stream whose prompt may still be computed."""

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """The progress of the prompt; None while it waits for a slot."""


class Progress:
    """Reports how much of each choice's prompt is computed.

    ``write``: returns the event for a choice, given by its index. ``running``: the streams, each None until it is
    submitted; empty if the client wants no progress.
    """

    def __init__(
        self, write: Callable[[int, PromptProgress], bytes], running: Sequence[Computing | None]
    ) -> None:
        self._write = write
        self._running = running
        self._told: dict[int, int] = {}  # reported tokens, by the index of the choice

    def __repr__(self) -> str:
        return f"<Progress {self._told}>"

    def news(self) -> bytes:
        """Return the events for the choices that have made progress; the first event has the cached tokens."""
        events = b""
        for index, stream in enumerate(self._running):
            progress = None if stream is None else stream.prompt_progress
            if progress is not None:
                events += self._upto(index, progress)
        return events

    def _upto(self, index: int, progress: PromptProgress) -> bytes:
        events = b""
        for n_done in sorted({progress.n_cached_tokens, progress.n_done}):
            if self._told.get(index, -1) < n_done:
                self._told[index] = n_done
                events += self._write(index, progress._replace(n_done=n_done))
        return events

    def last(self, index: int) -> bytes:
        """Return the last event of a choice, whose prompt is computed."""
        stream = self._running[index] if self._running else None
        progress = None if stream is None else stream.prompt_progress
        if progress is None:
            return b""
        return self._upto(index, progress._replace(n_done=progress.n_prompt_tokens))


class OpenAiEncoder(Encoder[Part_contra]):
    """The base of the encoders of the two APIs.

    ``common``: the fields of a complete answer other than choices. ``kind``: the ``object`` of an event. ``vocab``: the
    model's vocabulary, for log-probabilities. ``choice``: the JSON of a choice without text, with ``%d`` for its index.
    ``running``: the streams, whose progress ``news`` reports.
    """

    def __init__(
        self,
        common: dict[str, Any],
        kind: str,
        form: Format,
        vocab: Vocab,
        times: RequestTimes,
        choice: bytes,
        running: Sequence[Computing | None],
    ) -> None:
        self._common = common
        self._form = form
        self._vocab = vocab
        self._times = times
        self._writer = writer = ChunkWriter({**common, "object": kind}, form.padded)
        self._progress = Progress(
            lambda index, progress: writer.progress(choice % index, progress),
            running if form.with_progress else (),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._common['id']}>"

    def news(self) -> bytes:
        """Return events for the progress of the prompts, if the client wants them and the progress has changed."""
        return self._progress.news()

    def _whole(self, choices: list[dict[str, Any]], counts: Counts) -> dict[str, Any]:
        return {
            **self._common,
            "choices": choices,
            "usage": usage(counts, self._form.predicted),
            "timings": self._times.timings(counts.n_prompt, counts.n_completion),
        }

    def _chunk(self, choice: bytes, part: ChatDelta | Delta, text: str, counts: Counts) -> bytes:
        """Return the event for a part. ``choice``: the choice as encoded JSON. ``text``: see ``ChunkWriter.chunk``."""
        form, timings = self._form, None
        if form.continuous_usage:
            self._writer.set_usage(usage(counts))
        if form.timings_per_token or part.finish_reason is not None:
            timings = self._times.timings(counts.n_prompt, counts.n_completion)
        return self._writer.chunk(choice, text, timings)

    def end(self, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the event with the usage, if the client wants it, and the end of the stream."""
        if not self._form.with_usage:
            return DONE
        return self._writer.usage(usage(counts, self._form.predicted)) + DONE


def usage(counts: Counts, predicted: bool = False) -> dict[str, Any]:
    """Return the token counts of all prompts and choices. ``predicted``: the request predicts its text."""
    details = {}
    if predicted:
        details["completion_tokens_details"] = {
            "accepted_prediction_tokens": counts.n_accepted,
            "rejected_prediction_tokens": counts.n_drafted - counts.n_accepted,
        }
    return {
        "prompt_tokens": counts.n_prompt,
        "completion_tokens": counts.n_completion,
        "total_tokens": counts.n_prompt + counts.n_completion,
        "prompt_tokens_details": {"cached_tokens": counts.n_cached},
        **details,
    }
