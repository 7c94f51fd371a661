"""What becomes of a request's tokens: each kind of sink turns them into what its caller asked for."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from llamapipe.engine.mailbox import Mailbox
from llamapipe.engine.request import Request
from llamapipe.engine.results import Completion, Delta, FinishReason, Timings, Token
from llamapipe.text import TextStream


class Failure:
    """An exception on its way to the caller."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Sink:
    """Receives a request's tokens on the decoder thread; subclasses say what goes into the mailbox, and when."""

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

    __slots__ = ("_first_at", "_index", "_parts", "_seed")

    def __init__(
        self, mailbox: Mailbox, piece: Callable[[int], bytes], stops: tuple[str, ...], seed: int, index: int
    ) -> None:
        super().__init__(mailbox, piece, stops)
        self._seed = seed
        self._index = index
        self._parts: list[str] = []
        self._first_at: float | None = None

    def token(self, request: Request, token: int) -> bool:
        """Looks for stop strings; without any, the text is made at the end."""
        if self._first_at is None:
            self._first_at = perf_counter()
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
        self.mailbox.put(
            (self._index, Completion(text, tokens, reason, request.n_prompt, self._seed, timings))
        )


class DeltaSink(Sink):
    """Puts a Delta into the mailbox for every token, the last with the finish reason."""

    __slots__ = ("_last",)

    def __init__(self, mailbox: Mailbox, piece: Callable[[int], bytes], stops: tuple[str, ...]) -> None:
        super().__init__(mailbox, piece, stops)
        self._last: tuple[str, tuple[int, ...]] = ("", ())

    def token(self, request: Request, token: int) -> bool:
        """Hands text and token over, or keeps them for ``finish`` when it follows at once."""
        text = self._text.push(self._piece(token))
        stopped = self._text.stopped
        if stopped or request.finish_reason is not None:
            self._last = (text, (token,))
        else:
            self.mailbox.put(Delta(text, (token,), None))
        return stopped

    def finish(self, request: Request) -> None:
        """Hands over the last delta, or the error."""
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        text, tokens = self._last
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        self.mailbox.put(Delta(text + self._text.finish(), tokens, reason))


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
