"""Turns tokens into results: characters, stop strings, choices and scores.

Open this file when a result has the wrong text, log-probability or finish reason.

The principle: a request has one sink, which runs on the engine thread and alone knows what the caller asked for. It
joins pieces into characters, searches for stop strings, and puts completions, deltas, tokens or scores into a mailbox.
A sink never waits and never wakes a caller; the mailbox takes care of that (``mailboxes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from llamapipe._engine.policy.core import Request, ResultSink
from llamapipe._engine.policy.scoring import ContinuationTargets, PromptTargets, TokenScore
from llamapipe._engine.runtime.mailboxes import Mailbox
from llamapipe.errors import EngineClosedError
from llamapipe.results import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
)
from llamapipe.text import TextStream


class Failure:
    """An exception on its way to the caller."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


Piece = Callable[[int], bytes]  # a token's bytes


def token_logprob(request: Request, token: int, piece: Piece) -> TokenLogprob:
    """Remove and return the log-probability of a request's next token. Call it once for each token, in order."""
    logprob, top = request.logprobs.pop(0)
    return TokenLogprob(token, logprob, _top(top, piece), piece(token))


def prompt_token_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenScore], piece: Piece
) -> list[TokenLogprob]:
    """Return the log-probability of each token of a prompt except the first."""
    return [
        TokenLogprob(token, score.logprob, _top(score.top, piece), piece(token))
        for token, score in zip(prompt[1:], scores, strict=False)  # a cancelled request may have fewer
    ]


def _top(top: Sequence[tuple[int, float]], piece: Piece) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token, logprob, piece(token)) for token, logprob in top)


class TextSink(ResultSink):
    """A sink that gives text with each token. ``skip_space``: leave out a space at the beginning of the text."""

    __slots__ = ("_last", "_piece", "_skip_space", "_stops", "_text", "mailbox")

    def __init__(
        self, mailbox: Mailbox, piece: Piece, stops: tuple[str, ...], skip_space: bool = False
    ) -> None:
        self.mailbox = mailbox
        self._piece = piece
        self._stops = stops
        self._skip_space = skip_space
        self._text = TextStream(stops, skip_space)
        self._last: Any = None  # the last token or delta, kept for ``finish``

    def restart_text(self, at_start: bool) -> None:
        self._text = TextStream(self._stops, self._skip_space and at_start)


class Choices:
    """The choices of one prompt, which their sinks fill in. The last one puts ``(index, Completion)`` into the mailbox.

    If a choice fails, ``(index, Failure)`` is put there once instead of a completion. ``first_at``: when any choice got
    the first token (``perf_counter``); None before.
    """

    __slots__ = (
        "_choices", "_failed", "_index", "_n_accepted", "_n_cached", "_n_drafted", "_n_left",
        "_prompt_targets", "_queue_s", "_started_at", "first_at", "mailbox",
    )  # fmt: skip

    def __init__(
        self, mailbox: Mailbox, index: int, n: int = 1, prompt_targets: PromptTargets | None = None
    ) -> None:
        self.mailbox = mailbox
        self._index = index
        self._prompt_targets = prompt_targets  # None unless the prompt's log-probabilities are wanted
        self._started_at = perf_counter()
        self._choices: list[Choice | None] = [None] * n
        self._n_left = n
        self._n_cached: int | None = None
        self._n_drafted = self._n_accepted = 0
        self.first_at: float | None = None
        self._queue_s: float | None = None
        self._failed = False

    def note_first_token(self, request: Request) -> None:
        """Record when the first token of any choice came, and how long its request was queued."""
        self.first_at = perf_counter()
        left_queue_at = request.left_queue_at
        self._queue_s = None if left_queue_at is None else max(left_queue_at - self._started_at, 0.0)

    def fail(self, error: BaseException) -> None:
        """Report that a choice failed. A second call does nothing."""
        if not self._failed:
            self._failed = True
            self.mailbox.put((self._index, Failure(error)))

    def add(self, choice: Choice, request: Request, piece: Piece) -> None:
        """Add a complete choice. After the last one the completion is delivered."""
        if self._choices[choice.index] is not None:  # after a defect a request may be finished twice
            return
        self._choices[choice.index] = choice
        if self._n_cached is None or request.n_cached < self._n_cached:
            self._n_cached = request.n_cached  # the choice that computed the prompt for the others counts
        self._n_drafted += request.n_drafted
        self._n_accepted += request.n_accepted
        self._n_left -= 1
        if self._n_left or self._failed:
            return
        first_s = None if self.first_at is None else self.first_at - self._started_at
        timings = Timings(first_s, perf_counter() - self._started_at, self._queue_s)
        prompt = None
        if self._prompt_targets is not None:
            ids = request.full_sequence[: request.n_prompt]
            prompt = prompt_token_logprobs(ids, self._prompt_targets.scores, piece)
        self.mailbox.put(
            (
                self._index,
                Completion(
                    tuple(self._choices),  # type: ignore[arg-type]  # none is missing
                    request.n_prompt,
                    self._n_cached,
                    timings,
                    prompt,
                    self._n_drafted,
                    self._n_accepted,
                ),
            )
        )


class CompletionSink(ResultSink):
    """Collects one choice of a prompt and hands it to ``choices``, which all choices of that prompt share.

    ``skip_space``: leave out a space at the beginning of the text.
    """

    __slots__ = ("_choices", "_index", "_logprobs", "_parts", "_piece", "_seed", "_skip_space", "_text")

    def __init__(
        self,
        choices: Choices,
        piece: Piece,
        stops: tuple[str, ...],
        seed: int,
        index: int = 0,
        skip_space: bool = False,
    ) -> None:
        self._choices = choices
        self._piece = piece
        self._seed = seed
        self._index = index
        self._skip_space = skip_space
        # Without stop strings, ``finish`` makes the text.
        self._text = TextStream(stops, skip_space) if stops else None
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def token(self, request: Request, token: int) -> bool:
        """Return whether the token completed a stop string; False if there are none."""
        if self._choices.first_at is None:
            self._choices.note_first_token(request)
        if request.wants_logprobs:
            self._logprobs.append(token_logprob(request, token, self._piece))
        text = self._text
        if text is None:
            return False
        self._parts.append(text.push(self._piece(token)))
        return text.stopped

    def finish(self, request: Request) -> None:
        if request.error is not None:
            self._choices.fail(request.error)
            return
        tokens = request.full_sequence[request.n_prompt :]
        matched = None
        if self._text is None:
            text = b"".join(map(self._piece, tokens)).decode("utf-8", "replace")
            if self._skip_space:
                text = text.removeprefix(" ")
        else:
            text = "".join(self._parts) + self._text.finish()
            matched = self._text.matched
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        logprobs = self._logprobs if request.wants_logprobs else None
        if logprobs is not None and len(logprobs) < len(tokens):  # cancelled before its last tokens arrived
            left = tokens[len(logprobs) :][: len(request.logprobs)]
            logprobs += [token_logprob(request, token, self._piece) for token in left]
        ended_by = request.stop_token
        choice = Choice(
            self._index,
            text,
            tokens,
            reason,
            self._seed,
            logprobs,
            matched,
            ended_by,
            token_logprob(request, ended_by, self._piece)
            if request.wants_logprobs and ended_by is not None
            else None,
        )
        self._choices.add(choice, request, self._piece)


class ScoreSink(ResultSink):
    """Puts ``(index, scores)`` into the mailbox, one list for each continuation, or ``(index, Failure)``."""

    __slots__ = ("_index", "mailbox")

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self.mailbox = mailbox
        self._index = index

    def token(self, request: Request, token: int) -> bool:
        """Raise AssertionError: a scoring request generates no tokens."""
        raise AssertionError("a request without tokens has generated one")

    def finish(self, request: Request) -> None:
        if request.error is not None:
            self.mailbox.put((self._index, Failure(request.error)))
        elif request.finish_reason == "cancelled":  # by its caller, or because the engine was closed
            self.mailbox.put(
                (self._index, Failure(EngineClosedError("the engine was closed before the text was scored")))
            )
        else:
            assert isinstance(request.logprob_targets, ContinuationTargets)
            self.mailbox.put((self._index, request.logprob_targets.scores))


class DeltaSink(TextSink):
    """Puts a Delta into the mailbox for every token, the last with the finish reason."""

    __slots__ = ()
    _last: tuple[str, tuple[int, ...], tuple[TokenLogprob, ...] | None] | None

    def token(self, request: Request, token: int) -> bool:
        """Put the token and its text into the mailbox; keep the last ones for ``finish``, which follows immediately."""
        text = self._text.push(self._piece(token))
        stopped = self._text.stopped
        logprobs = (token_logprob(request, token, self._piece),) if request.wants_logprobs else None
        if stopped or request.finish_reason is not None:
            if self._last is not None:  # with guesses, several tokens may come after the finish reason is set
                self.mailbox.put(Delta(*self._last, None))
            self._last = (text, (token,), logprobs)
        else:
            self.mailbox.put(Delta(text, (token,), logprobs, None))
        return stopped

    def finish(self, request: Request) -> None:
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        text, tokens, logprobs = self._last or ("", (), None)
        if request.wants_logprobs and logprobs is None:
            logprobs = ()
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        text += self._text.finish()
        self.mailbox.put(Delta(text, tokens, logprobs, reason, self._text.matched))


class TokenSink(TextSink):
    """Puts a Token into the mailbox for every token, and None if there is no token for a ``next``."""

    __slots__ = ()
    _last: Token | None

    def continue_character(self, generated: bytes) -> None:
        """Continue after text that ended with these bytes; the last of them may be part of a character."""
        self._text.push_shown(generated)

    def fork(self, mailbox: Mailbox, keeps_text: bool) -> TokenSink:
        """Return a new sink of this kind. ``keeps_text``: it begins with this sink's partial character and held text.

        Do not call it while the engine thread may give this sink a token.
        """
        sink = TokenSink(mailbox, self._piece, self._stops, self._skip_space)
        if keeps_text:
            sink._text = self._text.copy()
        else:
            sink._text.skip_space = self._text.skip_space
        return sink

    def token(self, request: Request, token: int) -> bool:
        """Put the token into the mailbox; keep the last one for ``finish``, which follows immediately."""
        piece = self._piece(token)
        stream_token = Token(token, piece, self._text.push(piece))
        if request.wants_logprobs:
            note = token_logprob(request, token, self._piece)
            stream_token = stream_token._replace(logprob=note.logprob, top=note.top)
        stopped = self._text.stopped
        if stopped or request.finish_reason is not None:
            self._last = stream_token
        else:
            self.mailbox.put(stream_token)
        return stopped

    def finish(self, request: Request) -> None:
        """Answer the ``next`` that waits when the generation ends. The finish reason is in the request."""
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        last, self._last = self._last, None
        if last is not None:
            last = last._replace(text=last.text + self._text.finish())
        self.mailbox.put(last)
