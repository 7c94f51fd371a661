"""The types shared by all policy modules: requests, cells, memory operations and the plan of a step.

Open this file to add a field to a request, an operation on KV cells, or a list to a plan.

The principle: only ``Request.move`` changes the state of a request, and it refuses every transition that is not in this
diagram::

    WAITING -> RUNNING -> PAUSED -> RUNNING ...     a request pauses when its token budget is used up
       ^          |          |
       +----------+----------+                      preempted: it loses its slot and cells and keeps its tokens
    any state -> FINISHED                           a resumable request is PAUSED with a finish reason instead

The protocols at the top say what the policy needs from samplers, sinks and media, which ``runtime`` implements. Pure
policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from llamapipe._engine.policy.scoring import LogprobTargets
from llamapipe.errors import ConstraintError, DecodeError, NoToken

UNLIMITED = 2**62
# Numbers among tokens: from here to -1 they stand for rows of images and sounds, below it for adapters that begin.
MEDIA_FROM = -(2**62)


class Sampler(Protocol):
    """The interface of a request's sampler for the scheduler and the engine loop.

    ``finished``: no token may follow the accepted ones; final unless ``is_busy``. ``error``: why the last draw failed,
    if the sampler failed. ``n_draws``: the number of its last draw in another thread. ``is_forced``: its guess is text
    that a constraint forces.
    """

    finished: bool
    error: Exception | None
    n_draws: int
    is_forced: bool

    @property
    def is_busy(self) -> bool:
        """Whether another thread is working on the next token."""

    def guess(self, n: int) -> tuple[Sequence[int], float]:
        """Return a guess of at most ``n`` tokens after the last one, and the share of such guesses that were right."""

    def expect(self, tokens: Sequence[int]) -> int:
        """Prepare for guessed tokens that the next step may have after the last one.

        Returns how many of them a constraint allows, as far as that is known yet.
        """

    def logprobs(self, i: int = 0) -> tuple[float, Sequence[tuple[int, float]]]:
        """Return the log-probability of token ``i`` of the last draw, and the most probable tokens with theirs."""

    def close(self) -> None:
        """Free its native memory."""


class SamplerFactory(Protocol):
    """Makes the sampler of a request."""

    def make(self, request: Request) -> Sampler:
        """Make a sampler that has accepted the request's tokens."""

    def rebuild(self, sampler: Any, request: Request) -> None:
        """Reset a sampler from ``make`` and let it accept the request's tokens again."""


class ResultSink(Protocol):
    """Turns a request's tokens into results for its caller."""

    __slots__ = ()

    def token(self, request: Request, token: int) -> bool:
        """Accept a generated token. Return whether it completed a stop string."""

    def finish(self, request: Request) -> None:
        """Deliver the end of the request, which ``finish_reason`` or ``error`` describes."""

    def restart_text(self, at_start: bool) -> None:
        """Drop undelivered text because the sequence was changed. ``at_start``: only its prompt is left."""
        return  # most sinks hold no text


class _Discard(ResultSink):
    """The sink of a request whose tokens nothing reads."""

    def token(self, request: Request, token: int) -> bool:
        return False

    def finish(self, request: Request) -> None:
        pass


class Embeddings(Protocol):
    """An image or a sound, or a part of one, in a prompt: ``n`` rows in place of tokens.

    ``is_causal``: each row attends to the rows before it; otherwise all rows attend to each other, and one ubatch
    computes them. ``rows``: None until it is encoded.
    """

    @property
    def n(self) -> int:
        """The number of rows."""

    @property
    def is_causal(self) -> bool:
        """Whether a row attends only to the rows before it."""

    @property
    def rows(self) -> Any:
        """The rows, (n, n_embd), float32; or None."""

    @property
    def grid(self) -> Any:
        """The height and the width of each row, (n, 2), int32; None if rows follow one another like tokens."""

    @property
    def n_positions(self) -> int:
        """The number of positions that the rows take: ``n`` without a grid."""


class MediaRows(NamedTuple):
    """Batch entries from ``first`` onward that hold ``n`` rows of ``source``, from row ``begin`` onward."""

    first: int
    n: int
    source: Embeddings
    begin: int


class Span(NamedTuple):
    """The tokens ``[begin, end)`` of a sequence, which stand for the rows of ``source``.

    The tokens are numbers from ``MEDIA_FROM`` to -1 that depend on the content alone. So code that compares tokens,
    such as the prefix tree, need not know about images.
    """

    begin: int
    end: int
    source: Embeddings


class Activation(NamedTuple):
    """An activated LoRA: ``adapters`` compute from the last occurrence of the tokens ``invocation`` onward."""

    adapters: Hashable
    invocation: tuple[int, ...]

    def begin(self, tokens: Sequence[int]) -> int:
        """Return where that occurrence begins; UNLIMITED if there is none."""
        backwards, wanted = list(tokens[::-1]), list(self.invocation[::-1])
        n, i = len(wanted), -1
        try:
            while True:
                i = backwards.index(wanted[0], i + 1)
                if backwards[i : i + n] == wanted:
                    return len(backwards) - i - n
        except ValueError:
            return UNLIMITED


class State(Enum):
    """The state of a request."""

    WAITING = "waiting"  # without a slot: queued, preempted, or until its images are encoded
    RUNNING = "running"  # in a slot, part of the next steps
    PAUSED = "paused"  # in a slot; its token budget is used up
    FINISHED = "finished"


_ALLOWED = (
    (State.WAITING, State.RUNNING),
    (State.RUNNING, State.PAUSED),
    (State.RUNNING, State.WAITING),
    (State.PAUSED, State.RUNNING),
    (State.PAUSED, State.WAITING),
)


class RequestSpec(NamedTuple):
    """The options for continuing a sequence. The caller's thread builds them once; they never change.

    ``max_tokens``: maximum number of tokens generated since the start or the last append; None: no limit; 0: the
    request only computes its ``logprob_targets``. ``token_budget``: the request pauses when it has generated this many
    tokens in all, until its consumer raises the budget. ``resumable``: after "stop" and "length" the request keeps its
    slot, and may be trimmed and continued. ``sink``: receives the results; None: nothing reads them.
    ``sampler_factory``: None: nothing is generated. ``grammar_budget``: the time its constraint may take, for the
    factory. ``uses_cache``: it may begin with other requests' cells, and other requests may begin with its cells.
    ``cache_key``: what its cells depend on besides its tokens, and who may use them: cells with different keys are
    never shared, even if the tokens are equal. ``keeps_cells``: its cells are saved and pinned when it ends.
    ``logprob_targets``: which tokens of the request are scored. ``wants_logprobs``: each generated token comes with
    log-probabilities. ``priority``: requests with a higher priority come first. ``caller``: all requests of one caller
    share its turns; None: the caller has only this request. ``share``: the callers of one share take turns with the
    callers of others. ``n_generated``: how many of its last tokens were generated before. ``speculates``: a step may
    have tokens that its sampler guesses. ``drafts``: a step may have tokens that the engine's draft model guesses.
    ``unguessed``: why it has neither, although the engine's other requests may. ``adapters``: the adapters that compute
    it, which ``cache_key`` must also name; None: the model alone. ``activation``: what replaces ``adapters`` from some
    token on; None: nothing. ``spans``: the images and sounds among its tokens, in order. ``places``: the numbers of
    tokens before the places where other prompts are likely to diverge, such as the starts of messages.
    ``conversation``: the key under which its sequence is remembered; None: it is not remembered.
    """

    max_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    token_budget: int = UNLIMITED
    resumable: bool = False
    sink: ResultSink | None = None
    sampler_factory: SamplerFactory | None = None
    grammar_budget: object = None
    seed: int = 0
    uses_cache: bool = True
    cache_key: Hashable = None
    keeps_cells: bool = False
    logprob_targets: LogprobTargets | None = None
    wants_logprobs: bool = False
    priority: int = 0
    caller: object = None
    share: Hashable = None
    n_generated: int = 0
    speculates: bool = False
    drafts: bool = False
    unguessed: str = ""
    adapters: Hashable = None
    activation: Activation | None = None
    spans: tuple[Span, ...] = ()
    places: tuple[int, ...] = ()
    conversation: Hashable = None

    @property
    def all_adapters(self) -> Hashable:
        """The adapters of its last tokens, once its LoRA is activated."""
        return self.adapters if self.activation is None else self.activation.adapters


_DEFAULT = RequestSpec()


class Request:
    """A sequence of tokens that is being continued: its options, its progress and its place.

    ``tokens``: the prompt, as a list that the request owns from now on.

    Only the engine thread changes a request, except that its consumer sets ``token_budget`` and ``cancelled``, and may
    call ``reopen``. Some fields of the specification are also attributes, because every step reads them.
    """

    __slots__ = (  # noqa: RUF023
        # The request itself.
        "spec", "logprob_targets", "max_tokens", "sink", "stop_tokens", "wants_logprobs",
        # Progress: written by the scheduler.
        "cancelled", "dropped", "error", "finish_reason", "is_drawing", "logprobs", "n_accepted", "n_drafted",
        "is_drafted", "n_generated", "n_kept", "n_prompt", "n_total", "sampler", "spans", "state",
        "stop_token", "token_budget", "tokens",
        # Placement: written by the scheduler and the KV cache.
        "active_from", "adapters", "arrival", "awaits_prefix", "batch_plan", "caller", "cells", "late_s",
        "leader", "left_queue_at", "n_cached", "n_certain", "n_exact", "n_lent", "n_past", "places",
        "saved_cells", "slot", "turn", "uses_cache",
    )  # fmt: skip

    def __init__(self, tokens: list[int], spec: RequestSpec = _DEFAULT) -> None:
        self.spec = spec
        self.logprob_targets = spec.logprob_targets
        self.max_tokens = UNLIMITED if spec.max_tokens is None else spec.max_tokens
        self.stop_tokens = spec.stop_tokens
        self.wants_logprobs = spec.wants_logprobs
        self.sink: ResultSink = _Discard() if spec.sink is None else spec.sink

        self.tokens = tokens  # the sequence; the first ``n_past`` of them are in KV cells
        self.spans = spec.spans  # of ``tokens``
        self.adapters = spec.adapters  # its next tokens are computed with these
        # Its tokens from here on are computed with ``spec.activation``.
        self.active_from = UNLIMITED if spec.activation is None else spec.activation.begin(tokens)
        self.dropped: list[int] = []  # after the first ``n_kept``: dropped when the context was full
        self.n_kept = 0
        self.n_prompt = len(tokens) - spec.n_generated  # of ``full_sequence``
        self.n_generated = 0  # since the start or the last append; bounded by max_tokens
        self.n_total = spec.n_generated  # since the start; bounded by token_budget
        self.token_budget = spec.token_budget
        self.sampler: Sampler | None = None  # made with the first slot
        self.n_drafted = self.n_accepted = 0  # guessed tokens that were computed, and those that were right
        self.is_drafted = False  # the guessed tokens of its last step came from the drafter
        self.is_drawing = False  # its next token is drawn by another thread: it is in no step until then
        # Of the tokens drawn last that its sink does not have yet.
        self.logprobs: list[tuple[float, Sequence[tuple[int, float]]]] = []
        self.state = State.WAITING
        self.cancelled = False
        self.stop_token: int | None = None  # the one of ``stop_tokens`` that was sampled
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

        self.arrival = -1  # order of arrival
        self.awaits_prefix = False  # a file of it is being read
        self.turn = (0, 0, 0)  # order of admission, set with its arrival
        self.caller: object = self if spec.caller is None else spec.caller  # None once it was admitted
        self.leader: Request | None = None  # the request that computes its prefix, while it waits for that
        self.left_queue_at: float | None = None  # when it got its first slot, or ended without
        self.slot = -1
        self.batch_plan: BatchPlan | None = None  # the last plan it is part of, while it keeps its slot
        self.n_past = 0
        self.n_exact = 0  # its first cells that no other tokens were computed with, if that matters
        self.n_certain = -1  # its cells before the guesses of its last step, if its state there was copied
        self.n_cached = 0  # tokens of the prompt that were in cells when it got its first slot
        self.n_lent = 0  # how often its slot was lent while its token was drawn
        self.late_s = 0.0  # how long its tokens were drawn after their steps, since it got its slot
        # Where steps end, so that its state is saved there; in order, after ``n_past``.
        self.places: list[int] = []
        self.uses_cache = spec.uses_cache  # until its cells are shifted
        self.cells: Cells | None = None  # while it has a slot
        self.saved_cells: Cells | None = None  # while it is preempted, or keeps its cells

    def __repr__(self) -> str:
        why = f" {self.finish_reason}" if self.finish_reason else ""
        return (
            f"<Request {self.arrival} {self.state.value}{why} slot={self.slot} n_prompt={self.n_prompt} "
            f"n_tokens={len(self.tokens)} n_past={self.n_past}>"
        )

    def fork(self, seed: int, sink: ResultSink) -> Request:
        """Make a request with the same options. ``Scheduler.fork`` gives it the same sequence.

        The consumer's thread calls it while the request does not run.
        """
        spec = self.spec._replace(
            token_budget=self.n_total, n_generated=self.n_total, seed=seed, sink=sink, caller=None
        )
        child = Request([], spec)
        child.finish_reason = self.finish_reason
        return child

    @property
    def full_sequence(self) -> list[int]:
        """The sequence including the tokens that were dropped."""
        if not self.dropped:
            return self.tokens
        return self.tokens[: self.n_kept] + self.dropped + self.tokens[self.n_kept :]

    @property
    def n_uncomputed(self) -> int:
        """The number of tokens that have no KV cell yet."""
        return len(self.tokens) - self.n_past

    @property
    def n_next(self) -> int:
        """The number of tokens without a KV cell before its next place or its end."""
        return (self.places[0] if self.places else len(self.tokens)) - self.n_past

    @property
    def is_encoded(self) -> bool:
        """Whether all its images and sounds are encoded."""
        return all(span.source.rows is not None for span in self.spans)

    @property
    def is_prepared(self) -> bool:
        """Whether it may get a slot: its images and sounds are encoded, and its prefix was read if a file has it."""
        return not self.awaits_prefix and (not self.spans or self.is_encoded)

    @property
    def text_tokens(self) -> list[int]:
        """The tokens of the vocabulary in the sequence."""
        return [token for token in self.tokens if token >= 0] if self.spans else self.tokens

    def adapters_at(self, position: int) -> Hashable:
        """Return the adapters that the token at a position is computed with."""
        return self.spec.adapters if position < self.active_from else self.spec.all_adapters

    def find_activation(self) -> int:
        """Find the invocation again after the tokens changed. Return how many tokens are computed as before."""
        if self.spec.activation is None:
            return UNLIMITED
        before, begin = self.active_from, self.spec.activation.begin(self.full_sequence)
        self.active_from = max(begin - len(self.dropped), self.n_kept) if begin > self.n_kept else begin
        return UNLIMITED if self.active_from == before else min(self.active_from, before)

    def cell_keys(self) -> list[int]:
        """Return the keys that identify its cells in the prefix tree: its tokens.

        Where other adapters begin to compute, a number below ``MEDIA_FROM`` stands for them and the token. So the
        prefix tree need not know about adapters: requests share the cells before this number, and the cells after it
        only if the same adapters begin there.
        """
        begin = self.active_from
        if begin >= len(self.tokens):
            return self.tokens
        mark = MEDIA_FROM - 1 - hash((self.spec.all_adapters, self.tokens[begin])) % 2**62
        return [*self.tokens[:begin], mark, *self.tokens[begin + 1 :]]

    def next_block(self) -> Span | None:
        """Return the next span without cells whose rows attend to each other. A separate step computes its rows."""
        for span in self.spans:
            if span.end > self.n_past and not span.source.is_causal:
                return span
        return None

    def prefix_end(self, n: int) -> int:
        """Return where a prefix of at most ``n`` tokens may end.

        That is never inside a span whose rows attend to each other or share a position.
        """
        for span in self.spans:
            if span.begin < n < span.end and (not span.source.is_causal or span.source.grid is not None):
                return span.begin
        return n

    def drop_between(self, begin: int, end: int) -> tuple[int, int]:
        """Drop the tokens ``[begin, end)``, but only whole spans. Return the range that was dropped."""
        for span in self.spans:
            if span.begin < begin < span.end:
                begin = span.begin
            if span.begin < end < span.end:
                end = span.end
        self.spans = tuple(
            span if span.end <= begin else Span(span.begin - end + begin, span.end - end + begin, span.source)
            for span in self.spans
            if span.end <= begin or span.begin >= end
        )
        if self.active_from >= end:
            self.active_from -= end - begin
        else:
            self.active_from = min(self.active_from, begin)
        self.n_kept = begin
        self.dropped += self.tokens[begin:end]
        del self.tokens[begin:end]
        return begin, end

    @property
    def is_streaming(self) -> bool:
        """Whether a reader gets the tokens one by one and raises the budget as it reads."""
        return self.max_tokens > 0 and self.token_budget < UNLIMITED

    def reopen(self) -> None:
        """Let the request continue after a change. Its consumer's thread may also call it, before the change."""
        self.finish_reason = None

    def sampling_error(self, code: int) -> Exception:
        """Return the error of a request that got no token. ``Executor.sample`` describes the codes."""
        if code == NoToken.NO_ALLOWED_TOKEN:
            return ConstraintError(
                "the request's constraints (grammar, allowed_token_ids, bad_words …) leave no token to sample, and the "
                "output is not complete yet"
            )
        if code == NoToken.SAMPLER_FAILED:
            error = None if self.sampler is None else self.sampler.error
            return error or DecodeError("sampling failed; see the log llamapipe.native")
        why = "the model or its weights are damaged"
        if self.adapters is not None:
            why += ", or the scale of an adapter is too large"
        return DecodeError(f"no logit of this request's row is finite; {why}")

    def move(self, state: State) -> None:
        """Change the state. No other code may do so."""
        before = self.state
        if before is State.FINISHED or (state is not State.FINISHED and (before, state) not in _ALLOWED):
            raise AssertionError(f"{self!r} cannot become {state.value}")
        self.state = state


class Remove(NamedTuple):
    """Remove the cells of a sequence from ``position`` onward.

    ``state``: the key of a state that was saved at that position; -1: none. In that case, a memory that cannot go back
    has nothing to remove, or its state is stale.
    """

    slot: int
    position: int
    state: int = -1


class Discard(NamedTuple):
    """Remove the cells of guesses as ``Remove`` does. The last step computed all of them in one ubatch."""

    slot: int
    position: int


class Keep(NamedTuple):
    """Copy the state at the end of a sequence, at position ``n``, for ``GoBack``.

    The next step has guesses after it.
    """

    slot: int
    n: int


class GoBack(NamedTuple):
    """Let a sequence end at position ``n`` again, where ``Keep`` copied its state before the last step."""

    slot: int
    n: int


class Copy(NamedTuple):
    """Copy the first ``n`` cells of a sequence to another, empty one. ``state``: see ``Remove``."""

    source: int
    slot: int
    n: int
    state: int = -1


class Save(NamedTuple):
    """Copy the cells of a sequence to host memory under ``key``, if they take at most ``max_bytes``."""

    slot: int
    key: int
    max_bytes: int


class SaveState(NamedTuple):
    """Copy the state at the end of a sequence, at position ``n``, to host memory, if it takes at most ``max_bytes``."""

    slot: int
    n: int
    key: int
    max_bytes: int


class Restore(NamedTuple):
    """Copy the first ``n`` saved cells to an empty sequence. ``state``: see ``Remove``."""

    key: int
    slot: int
    n: int
    state: int = -1


class Forget(NamedTuple):
    """Free saved cells, or a saved state. ``evicted``: their description, if they had to make room for others."""

    key: int
    evicted: Unused | None = None


class Shift(NamedTuple):
    """Remove a sequence's cells at the positions ``[begin, end)``, and move the cells after them."""

    slot: int
    begin: int
    end: int


class Unused(NamedTuple):
    """Cells of ``tokens`` that no request uses, in a slot or saved under a key. The unused number of the two is -1.

    Both are -1 if there are only states. ``states``: saved states of prefixes of these tokens, as numbers of tokens and
    keys. ``is_stale``: see Cells.
    """

    slot: int
    key: int
    tokens: list[int]
    cache_key: Hashable
    states: list[tuple[int, int]]
    is_stale: bool = False


class UseAdapters(NamedTuple):
    """Compute with another set of adapters from the next step on; None: with the model alone.

    ``carries``: the set is a carrier. Then no slot has adapters until ``AssignAdapters`` gives it some.
    """

    adapters: Hashable
    carries: bool = False


class AssignAdapters(NamedTuple):
    """Compute a slot with these adapters from the next step on; None: with the model alone. The step has a carrier."""

    slot: int
    adapters: Hashable


class CellChanges(NamedTuple):
    """The outcome of a batch of memory operations.

    ``lost``: sequences that have no cells now, because an operation on them was not possible. ``saved``: the keys of
    the sequences and states to be saved, with their sizes in bytes; None: not saved. ``stale``: sequences whose state
    belongs to a later place than the one to go back to; their cells are unchanged.
    """

    lost: set[int]
    saved: list[tuple[int, int | None]]
    stale: set[int]


MemoryOp = (
    Shift
    | Remove
    | Discard
    | Keep
    | GoBack
    | Copy
    | Save
    | SaveState
    | Restore
    | Forget
    | UseAdapters
    | AssignAdapters
)


class Cells:
    """The cells of one sequence: in a slot, or saved in host memory.

    ``request``: the request that uses them now. ``key``: the key of saved cells. ``pinned``: the cells are saved and
    must not be dropped. ``n_exact``: see Request; set once the request has left. ``n_known``: the tokens that the tree
    knows, including those not computed yet. ``n_shifted``: the number of cells that the last shift left, whose keys are
    rotated by the step that computes the next cell; -1: there was no shift. ``floor``: the earliest place that the
    sequence can go back to, because copied cells of a sliding window lack the cells that had left the window.
    ``is_stale``: its state does not belong to its end. ``places``: the places of its request. ``n_offered``: how many
    cells were offered to be kept elsewhere. ``is_held``: its conversation continues soon.
    """

    __slots__ = (
        "floor", "is_held", "is_stale", "key", "n_bytes", "n_exact", "n_known", "n_offered", "n_shifted",
        "pinned", "places", "request", "slot",
    )  # fmt: skip

    def __init__(self, slot: int, request: Request | None, n: int) -> None:
        self.slot = slot
        self.request = request
        self.key = -1
        self.n_bytes = 0
        self.n_exact = 0
        self.pinned = False
        self.n_known = n
        self.n_shifted = -1
        self.n_offered = 0
        self.floor = 0
        self.is_held = False
        self.is_stale = False
        self.places: Sequence[int] = ()

    def __repr__(self) -> str:
        where = f"slot={self.slot}" if self.slot >= 0 else f"key={self.key}"
        return f"<Cells {where} n={self.n}{' running' if self.request is not None else ''}>"

    @property
    def n(self) -> int:
        """The number of cells whose tokens the tree knows."""
        return self.n_known if self.request is None else min(self.n_known, self.request.n_past)


class ScoredRows(NamedTuple):
    """Rows that score a request's own tokens: the batch ``entries``, for its positions from ``first`` onward."""

    request: Request
    targets: LogprobTargets
    first: int
    entries: range


class BatchPlan:
    """The batch of one step, as parallel lists over its entries, and the requests that get a token from it.

    ``rows[i]`` is the batch entry whose logits continue ``requests[i]``. If tokens are guessed, a request has several
    consecutive rows, and ``guessed[i]`` is the token of the entry after ``rows[i]``; -1: none. ``n_guessed``: how many
    such entries there are; 0: ``guessed`` is empty. ``scheduled``: each request in the batch with its number of
    entries; the first ``n_decode`` of them decode. ``scored``: rows that score the requests' own tokens. ``padding``:
    cells of entries that only keep the batch in one piece; they are removed after the step.

    ``rows_of_media``: the runs of entries that are rows of images and sounds. ``is_causal``: entries attend to those
    before them; otherwise all entries attend to each other.

    ``in_flight``: the plan is not committed yet. Plans made before its commit leave its requests out.

    ``repeats``: the step has the same entries as the step before it, each with the token that was sampled from it, one
    position further. ``tokens`` and ``positions`` stay those of the first of these steps.
    """

    __slots__ = (
        "guessed", "in_flight", "is_causal", "n_decode", "n_guessed", "outputs", "padding", "positions",
        "repeats", "requests", "rows", "rows_of_media", "scheduled", "scored", "seq_ids", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seq_ids: list[int] = []
        self.outputs: list[int] = []
        self.rows: list[int] = []
        self.requests: list[Request] = []
        self.scheduled: list[tuple[Request, int]] = []
        self.scored: list[ScoredRows] = []
        self.padding: list[Remove] = []
        self.rows_of_media: list[MediaRows] = []
        self.is_causal = True
        self.guessed: Sequence[int] = ()
        self.n_decode = 0
        self.n_guessed = 0
        self.repeats = False
        self.in_flight = True

    def __repr__(self) -> str:
        scheduled = ", ".join(f"{request.arrival}: {n}" for request, n in self.scheduled)
        repeats = " repeats" if self.repeats else ""
        return f"<BatchPlan{repeats} n_tokens={len(self.tokens)} n_outputs={len(self.rows)} scheduled {scheduled}>"


class Chunk(NamedTuple):
    """``n`` tokens of a prompt from position ``first``; ``scored``: the positions whose rows are wanted."""

    request: Request
    first: int
    n: int
    scored: range
