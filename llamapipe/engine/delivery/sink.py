"""What becomes of a request's tokens: each kind of sink turns them into what its caller asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from llamapipe.engine.delivery.mailbox import Mailbox
from llamapipe.engine.results import Completion, Delta, FinishReason, Timings, Token, TokenLogprob
from llamapipe.engine.scheduler.logprob_targets import ContinuationTargets, PromptTargets, TokenScore
from llamapipe.engine.scheduler.request import Request
from llamapipe.errors import EngineClosedError
from llamapipe.text import TextStream


class Failure:
    """An exception on its way to the caller."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def token_logprob(request: Request, token: int) -> TokenLogprob:
    """How probable the token was that a request has just drawn."""
    assert request.last_logprob is not None, "the request did not ask for log-probabilities"
    logprob, top = request.last_logprob
    return TokenLogprob(token, logprob, tuple(top))


def prompt_token_logprobs(prompt: Sequence[int], scores: Sequence[TokenScore]) -> list[TokenLogprob]:
    """How probable each token of a prompt was but the first."""
    return [
        TokenLogprob(token, score.logprob, tuple(score.top))
        for token, score in zip(prompt[1:], scores, strict=False)  # one that was cancelled may have fewer
    ]


class Sink:
    """Receives a request's tokens on the engine thread; subclasses say what goes into the mailbox, and when."""

    __slots__ = ("_piece", "_stops", "_text", "mailbox", "started_at")

    def __init__(self, mailbox: Mailbox, piece: Callable[[int], bytes], stops: tuple[str, ...]) -> None:
        self.mailbox = mailbox
        self.started_at = perf_counter()
        self._piece = piece
        self._stops = stops
        self._text = TextStream(stops)

    def token(self, request: Request, token: int) -> bool:
        """Takes a generated token; True when it completed a stop string."""
        raise NotImplementedError

    def finish(self, request: Request) -> None:
        """The request ended: ``finish_reason`` or ``error`` says how."""
        raise NotImplementedError

    def restart_text(self) -> None:
        """Forgets half characters and held text: the sequence was changed."""
        self._text = TextStream(self._stops)


class CompletionSink(Sink):
    """Puts ``(index, Completion)`` into the mailbox, or ``(index, Failure)``."""

    __slots__ = ("_first_at", "_index", "_logprobs", "_parts", "_seed", "prompt_targets")

    def __init__(
        self, mailbox: Mailbox, piece: Callable[[int], bytes], stops: tuple[str, ...], seed: int, index: int
    ) -> None:
        super().__init__(mailbox, piece, stops)
        self._seed = seed
        self._index = index
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._first_at: float | None = None
        self.prompt_targets: PromptTargets | None = None  # where the prompt's tokens are asked for, too

    def token(self, request: Request, token: int) -> bool:
        """Looks for stop strings; without any, the text is made at the end."""
        if self._first_at is None:
            self._first_at = perf_counter()
        if request.wants_logprobs:
            self._logprobs.append(token_logprob(request, token))
        if not self._stops:
            return False
        text = self._text
        self._parts.append(text.push(self._piece(token)))
        return text.stopped

    def finish(self, request: Request) -> None:
        """Hands the whole over."""
        if request.error is not None:
            self.mailbox.put((self._index, Failure(request.error)))
            return
        tokens = request.tokens[request.n_prompt :]
        if not self._stops:
            self._parts.append(self._text.push(b"".join(map(self._piece, tokens))))
        self._parts.append(self._text.finish())
        first_s = None if self._first_at is None else self._first_at - self.started_at
        timings = Timings(first_s, perf_counter() - self.started_at)
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        text = "".join(self._parts)
        logprobs = self._logprobs if request.wants_logprobs else None
        prompt = None
        if self.prompt_targets is not None:
            prompt = prompt_token_logprobs(request.tokens[: request.n_prompt], self.prompt_targets.scores)
        completion = Completion(text, tokens, reason, request.n_prompt, self._seed, timings, logprobs, prompt)
        self.mailbox.put((self._index, completion))


class ScoreSink(Sink):
    """Puts ``(index, the scores of each continuation)`` into the mailbox, or ``(index, Failure)``."""

    __slots__ = ("_index",)

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        super().__init__(mailbox, bytes, ())  # no token comes, whose piece that would be
        self._index = index

    def token(self, request: Request, token: int) -> bool:
        """Nothing is generated."""
        raise AssertionError("a request without tokens has generated one")

    def finish(self, request: Request) -> None:
        """Hands the scores over."""
        if request.error is not None:
            self.mailbox.put((self._index, Failure(request.error)))
        elif request.finish_reason == "cancelled":  # by whoever waits, or by closing
            self.mailbox.put(
                (self._index, Failure(EngineClosedError("the engine was closed before this was scored")))
            )
        else:
            assert isinstance(request.logprob_targets, ContinuationTargets)
            self.mailbox.put((self._index, request.logprob_targets.scores))


class DeltaSink(Sink):
    """Puts a Delta into the mailbox for every token, the last with the finish reason."""

    __slots__ = ("_last",)

    def __init__(self, mailbox: Mailbox, piece: Callable[[int], bytes], stops: tuple[str, ...]) -> None:
        super().__init__(mailbox, piece, stops)
        self._last: tuple[str, tuple[int, ...], Any] = ("", (), None)

    def token(self, request: Request, token: int) -> bool:
        """Hands text and token over, or keeps them for ``finish`` when it follows at once."""
        text = self._text.push(self._piece(token))
        stopped = self._text.stopped
        logprobs = (token_logprob(request, token),) if request.wants_logprobs else None
        if stopped or request.finish_reason is not None:
            self._last = (text, (token,), logprobs)
        else:
            self.mailbox.put(Delta(text, (token,), logprobs, None))
        return stopped

    def finish(self, request: Request) -> None:
        """Hands over the last delta, or the error."""
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        text, tokens, logprobs = self._last
        if request.wants_logprobs and logprobs is None:
            logprobs = ()
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        self.mailbox.put(Delta(text + self._text.finish(), tokens, logprobs, reason))


class TokenSink(Sink):
    """Puts a Token into the mailbox for every token; None when there is none to give for a ``next``."""

    __slots__ = ("_last",)

    def __init__(self, mailbox: Mailbox, piece: Callable[[int], bytes], stops: tuple[str, ...]) -> None:
        super().__init__(mailbox, piece, stops)
        self._last: Token | None = None

    def token(self, request: Request, token: int) -> bool:
        """Hands the token over, or keeps it for ``finish`` when it follows at once: the end is known by then."""
        piece = self._piece(token)
        given = Token(token, piece, self._text.push(piece))
        if request.wants_logprobs:
            note = token_logprob(request, token)
            given = given._replace(logprob=note.logprob, top=note.top)
        stopped = self._text.stopped
        if stopped or request.finish_reason is not None:
            self._last = given
        else:
            self.mailbox.put(given)
        return stopped

    def finish(self, request: Request) -> None:
        """Answers the ``next`` that the end came with; its caller sees the finish reason on the request."""
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        last, self._last = self._last, None
        if last is not None:
            last = last._replace(text=last.text + self._text.finish())
        self.mailbox.put(last)
