"""Encodes answers of ``/v1/completions`` in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llamapipe.llama.vocab import Vocab
from llamapipe.results import Choice, Completion, Delta, TokenLogprob
from llamapipe.server._times import RequestTimes
from llamapipe.server.dialects.encoder import Counts
from llamapipe.server.dialects.logprobs import CompletionLogprobs, prompt_logprobs
from llamapipe.server.dialects.openai_stream import Computing, Format, OpenAiEncoder, common_fields
from llamapipe.server.json_bytes import encode_json
from llamapipe.text.stream import TextOffsets, prompt_offsets

_PROGRESS = b'{"index":%d,"text":"","logprobs":null,"finish_reason":null}'


class Prompts(NamedTuple):
    """The prompts of a request: as the client ``sent`` them, and as ``tokens``; ``n`` choices are returned for each."""

    sent: Sequence[str | list[int | str]]
    tokens: Sequence[list[int]]
    n: int = 1


class Shown(NamedTuple):
    """Options of answers that only this API has; ``Format`` has those that all have.

    ``echo``: the prompt precedes each text. ``logprobs``, ``prompt_logprobs``: how many alternatives to show; None
    shows no log-probabilities. ``skips_space``: texts begin with a space that is not shown. ``is_empty``: the request
    asks for no tokens.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skips_space: bool = False
    is_empty: bool = False


class CompletionEncoder(OpenAiEncoder[Delta]):
    """Encodes the answer to one request, complete or streamed. Choice ``index`` belongs to prompt ``index // n``."""

    def __init__(
        self,
        call_id: str,
        model: str,
        created: int,
        form: Format,
        shown: Shown,
        prompts: Prompts,
        vocab: Vocab,
        times: RequestTimes,
        running: Sequence[Computing | None] = (),
    ) -> None:
        common = common_fields(call_id, "text_completion", created, model)
        super().__init__(common, "text_completion", form, vocab, times, _PROGRESS, running)
        self._shown = shown
        self._prompts = prompts
        self._offsets: dict[int, list[int]] = {}  # by prompt: the text offsets of its tokens in ``logprobs``
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by streamed choice
        self._begun: set[int] = set()

    # ---- complete
    def whole(self, done: Sequence[Completion], counts: Counts) -> dict[str, Any]:
        """Return the complete answer. ``done``: a completion for each prompt; its ``n`` best choices are shown."""
        n = self._prompts.n
        choices = [
            self._choice(completion, choice, i * n + j)
            for i, completion in enumerate(done)
            for j, choice in enumerate(_best(completion, n))
        ]
        return self._whole(choices, counts)

    def _choice(self, completion: Completion, choice: Choice, index: int) -> dict[str, Any]:
        shown, i = self._shown, index // self._prompts.n
        if shown.is_empty:
            choice = replace(
                choice, text="", token_ids=[], finish_reason="length", logprobs=choice.logprobs and []
            )
        fields: dict[str, Any] = {"text": choice.text, "index": index, "logprobs": None}
        if shown.echo:
            fields["text"] = self._echo(i) + choice.text
        if shown.logprobs is not None:
            entries = list(choice.logprobs or ())
            first = None
            if shown.echo:
                scores = _narrow(completion.prompt_logprobs or (), shown.logprobs)
                entries = [*scores, *entries]
                if choice.stop_logprob is not None and not shown.is_empty:
                    entries.append(choice.stop_logprob)  # clients that score prompts drop the last entry
                first = self._first(i)
            fields["logprobs"] = self._logprobs_of(i).of(entries, first)
        if shown.prompt_logprobs is not None:
            scores = _narrow(completion.prompt_logprobs or (), shown.prompt_logprobs)
            fields["prompt_logprobs"] = prompt_logprobs(self._prompts.tokens[i], scores, self._vocab)
        if self._form.token_ids:
            fields |= {"token_ids": choice.token_ids, "prompt_token_ids": self._prompts.tokens[i]}
        fields["finish_reason"] = choice.finish_reason
        return fields

    def _logprobs_of(self, i: int) -> CompletionLogprobs:
        vocab, tokens = self._vocab, self._prompts.tokens[i]
        text = self._echo(i) if self._shown.echo else ""
        if text and i not in self._offsets:
            pieces = ((vocab.piece(token), vocab.written_piece(token)) for token in tokens)
            self._offsets[i] = prompt_offsets(text, pieces)[self._first(i) is None :]
        offsets = TextOffsets(len(text), self._shown.skips_space, self._offsets.get(i, ()))
        return CompletionLogprobs(vocab, offsets, self._form.tokens_as_ids)

    def _first(self, i: int) -> int | None:
        """Return the first token of prompt ``i``, which has no log-probability.

        Returns None if that is a BOS token that the server added.
        """
        prompt, token = self._prompts.sent[i], self._prompts.tokens[i][0]
        is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
        return None if is_text and token == self._vocab.bos else token

    def _echo(self, i: int) -> str:
        prompt = self._prompts.sent[i]
        if isinstance(prompt, str):
            return prompt
        return self._vocab.detokenize(self._prompts.tokens[i], remove_special=True)

    # ---- streamed
    def echo(self, index: int, scores: list[TokenLogprob] | None) -> bytes:
        """Return the first event of a choice: its prompt, with the log-probabilities of the tokens in ``scores``."""
        i = index // self._prompts.n
        logprobs = None if scores is None else self._writer_of(index).of(scores, self._first(i))
        text = self._echo(i)
        return self._writer.chunk(_stream_choice(index, text, logprobs, None), text)

    def begin(self, index: int, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the event with the final progress of the prompt; empty if the client does not want it."""
        return self._progress.last(index)

    def part(self, index: int, part: Delta, counts: Counts) -> bytes:
        """Return the event for a part; empty for an incomplete character."""
        form = self._form
        if self._shown.is_empty:
            return self._writer.chunk(_stream_choice(index, "", None, "length"))
        if not (part.text or part.finish_reason is not None or part.logprobs is not None or form.token_ids):
            return b""
        logprobs = ids = None
        if part.logprobs is not None and self._shown.logprobs is not None:
            logprobs = self._writer_of(index).of(part.logprobs)
        if form.token_ids:
            ids = {"token_ids": part.token_ids}
            if index not in self._begun:
                self._begun.add(index)
                ids["prompt_token_ids"] = tuple(self._prompts.tokens[index // self._prompts.n])
        choice = _stream_choice(index, part.text, logprobs, part.finish_reason, ids)
        return self._chunk(choice, part, part.text, counts)

    def _writer_of(self, index: int) -> CompletionLogprobs:
        if index not in self._logprobs:
            self._logprobs[index] = self._logprobs_of(index // self._prompts.n)
        return self._logprobs[index]


def _stream_choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    reason: str | None,
    ids: dict[str, tuple[int, ...]] | None = None,
) -> bytes:
    if logprobs is None and reason is None and ids is None:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, encode_json(text))
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return encode_json(choice | (ids or {}))


def _best(completion: Completion, n: int) -> Sequence[Choice]:
    """Return the ``n`` choices with the highest mean log-probability; all choices if there are no more than ``n``."""
    if len(completion.choices) == n:
        return completion.choices
    return sorted(completion.choices, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(choice: Choice) -> float:
    total = choice.cumulative_logprob
    return total / len(choice.token_ids) if total is not None and choice.token_ids else float("-inf")


def _narrow(entries: Iterable[TokenLogprob], n_top: int) -> list[TokenLogprob]:
    """Return copies of the entries with at most ``n_top`` alternatives each."""
    return [TokenLogprob(entry.id, entry.logprob, entry.top[:n_top], entry.piece) for entry in entries]
