"""Answers of ``/completion`` and ``/infill``, in llama-server's format: events, or objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from llamapipe._sampling_table import OPTIONS, SAMPLER_ORDER, Kind
from llamapipe.llama.vocab import Vocab
from llamapipe.params import SamplingParams
from llamapipe.results import Delta, FinishReason, TokenLogprob
from llamapipe.server._times import timings
from llamapipe.server.dialects.encoder import Counts, Encoder
from llamapipe.server.dialects.logprobs import chat_logprobs
from llamapipe.server.dialects.openai_stream import Computing, Progress, progress_fields
from llamapipe.server.json_bytes import encode_json, event
from llamapipe.streams import PromptProgress

CUT: FinishReason = "cancelled"  # for a text that one of this API's limits ended


class Form(NamedTuple):
    """Options of an answer, from the request.

    ``is_stream``: the answer is a stream of events. ``with_tokens``: an answer that is not streamed has the token ids.
    ``wanted``: paths of the fields in the last object; empty for all fields. ``is_cut``: the prompt was cut.
    ``is_empty``: the request asks for no tokens. ``slot``: the conversation that ``/slots`` saves.
    """

    is_stream: bool = False
    with_tokens: bool = False
    timings_per_token: bool = False
    with_progress: bool = False
    wanted: Sequence[str] = ()
    is_cut: bool = False
    is_empty: bool = False
    slot: int | str = -1


class Running(Computing, Protocol):
    """A stream of the engine."""

    @property
    def n_cached_tokens(self) -> int:
        """The number of cached tokens of its prompt."""


class LlamaServerEncoder(Encoder[Delta]):
    """Encodes the answer to one request. ``prompts``, ``texts``: each choice's prompt, as tokens and as text."""

    def __init__(
        self,
        model: str,
        form: Form,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        texts: Sequence[str],
        vocab: Vocab,
        running: Sequence[Running | None],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._model = model
        self._form = form
        self._params = params
        self._texts = texts
        self._vocab = vocab
        self._running = running
        self._progress = Progress(self._progress_event, running if form.with_progress else ())
        self._clock = clock
        began_at = clock()
        self._choices = [_Choice(tokens, began_at) for tokens in prompts]

    def __repr__(self) -> str:
        return f"<LlamaServerEncoder {self._model} n={len(self._choices)}>"

    def begin(self, index: int, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return nothing: no event has a role."""
        choice, stream = self._choices[index], self._running[index]
        choice.first_at = self._clock()
        choice.prompt_s = choice.first_at - choice.began_at
        if stream is not None:
            choice.n_cached = stream.n_cached_tokens
            if (progress := stream.prompt_progress) is not None:
                choice.prompt_s = progress.seconds
                choice.queue_s = max(choice.first_at - choice.began_at - progress.seconds, 0.0)
        return b""

    def part(self, index: int, part: Delta, counts: Counts) -> bytes:
        """Return the event for a part. After the last part of a choice, add an event with all fields but the text."""
        choice, form = self._choices[index], self._form
        if form.is_empty:
            part = part._replace(logprobs=None)
        choice.last_at = choice.first_at if choice.last_at is None else self._clock()
        choice.take(part)
        if part.finish_reason is not None:
            choice.end(part, self._params.max_tokens, form.is_empty)
        if not form.is_stream:
            return b""
        events = self.news()
        if part.text or part.token_ids:
            events += event(self._partial(index, part.text, part.token_ids, part.logprobs))
        return events + event(self._last(index)) if part.finish_reason is not None else events

    def end(self, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return an answer that is not streamed: an object, or a list of objects for several prompts or choices."""
        if self._form.is_stream:
            return b""
        answers = [self._last(index) for index in range(len(self._choices))]
        return encode_json(answers if len(answers) > 1 else answers[0])

    def news(self) -> bytes:
        """Return events for the prompts whose progress has changed."""
        return self._progress.news()

    def _progress_event(self, index: int, progress: PromptProgress) -> bytes:
        return event(self._partial(index) | {"prompt_progress": progress_fields(progress)})

    def _partial(
        self,
        index: int,
        text: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        choice = self._choices[index]
        fields: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": self._form.slot,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.prompt),
        }
        if self._form.timings_per_token:
            fields["timings"] = choice.timings()
        if logprobs:
            fields["completion_probabilities"] = _probabilities(logprobs, self._vocab)
        return fields

    def _last(self, index: int) -> dict[str, Any]:
        """Return the last object of a choice, with the fields that the client wants."""
        choice, form = self._choices[index], self._form
        text = "".join(choice.text)
        fields: dict[str, Any] = {
            "index": index,
            "content": "" if form.is_stream else text,
            "tokens": choice.tokens if form.with_tokens and not form.is_stream else [],
            "id_slot": self._form.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.prompt),
            "has_new_line": "\n" in text,
            "truncated": form.is_cut or choice.is_full,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "tokens_cached": len(choice.prompt) + len(choice.tokens),
            "timings": choice.timings(),
            "generation_settings": generation_settings(self._params) | {"stream": form.is_stream},
            "prompt": self._texts[index],
        }
        if form.is_empty:
            fields["generation_settings"] |= {"n_predict": 0, "max_tokens": 0}
        if choice.logprobs and not form.is_stream:
            fields["completion_probabilities"] = _probabilities(choice.logprobs, self._vocab)
        return _at_paths(fields, form.wanted) if form.wanted else fields


class _Choice:
    """The state of one text. ``stop_type``: why it ended; ``"none"`` until then."""

    def __init__(self, prompt: list[int], began_at: float) -> None:
        self.prompt = prompt
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.stop_type = "none"
        self.stopping_word = ""
        self.is_full = False  # whether the context is full
        self.n_cached = 0
        self.began_at = began_at
        self.first_at = self.prompt_s = self.queue_s = 0.0
        self.last_at: float | None = None

    def take(self, part: Delta) -> None:
        self.text.append(part.text)
        self.tokens += part.token_ids
        self.logprobs += part.logprobs or ()

    def end(self, part: Delta, most: int | None, is_empty: bool) -> None:
        self.stop_type = "limit" if part.finish_reason != "stop" else "word" if part.stop_string else "eos"
        self.stopping_word = part.stop_string or ""
        has_room = most is None or len(self.tokens) < most
        self.is_full = part.finish_reason == "length" and has_room and not is_empty

    def timings(self) -> dict[str, Any]:
        predicted_ms = 0.0 if self.last_at is None else (self.last_at - self.first_at) * 1e3
        fields = timings(self.n_cached, len(self.prompt), self.prompt_s * 1e3, len(self.tokens), predicted_ms)
        return fields | {"queue_ms": self.queue_s * 1e3}


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling options under llama-server's names, as in its answers."""
    settings: dict[str, Any] = {
        option.name: getattr(params, option.name)
        for option in OPTIONS
        if option.kind in (Kind.INT, Kind.FLOAT, Kind.FLAG) and option.fields != ()
    }
    del settings["infill"], settings["cache"], settings["n"], settings["min_tokens"]
    limit = -1 if params.max_tokens is None else params.max_tokens
    order = SAMPLER_ORDER if params.sampler_order is None else params.sampler_order
    return settings | {
        "seed": -1 if params.seed is None else params.seed,
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": params.logprobs or 0,
        "stop": list(params.stop or ()),
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "samplers": ["typ_p" if name == "typical_p" else name for name in order],
    }


def _probabilities(entries: Iterable[TokenLogprob], vocab: Vocab) -> list[dict[str, Any]]:
    """Return ``completion_probabilities``, which are like the ``logprobs`` of OpenAI's chats, with token ids."""
    entries = list(entries)
    records: list[dict[str, Any]] = chat_logprobs(entries, vocab)["content"]
    for entry, record in zip(entries, records, strict=True):
        record["id"] = entry.id
        for top, its in zip(entry.top, record["top_logprobs"], strict=True):
            its["id"] = top.id
    return records


def _at_paths(value: dict[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return the values at these paths, by path, for ``response_fields``.

    Paths that do not exist are left out.
    """
    fields: dict[str, Any] = {}
    for path in paths:
        inner: Any = value
        for key in path.split("/"):
            if not isinstance(inner, dict) or key not in inner:
                break
            inner = inner[key]
        else:
            fields[path] = inner
    return fields
