"""Drafts tokens for the requests of an engine with a second, smaller model.

Open this file to change how the draft model follows these requests.

The principle: the draft model's cells are a cache by tokens, independent of the history of requests. Each slot of the
engine has a sequence here, with the list of the tokens that its cells hold. Before drafting, cells that differ from the
request's tokens are removed, and missing cells are computed. So forks, snapshots, preemption, dropped tokens and wrong
guesses need no notification. If requests may share cells, a request that is new in a slot begins with the longest
prefix that another sequence holds. A recurrent state cannot go back, so it is copied before tokens are drafted.

Drafts are always greedy. The request's sampler still draws from the target model's logits, and the most probable token
is the best guess for that draw. A draft ends where a token's chance to be right is not worth its row or the next draft
step (``Worth``), and where a constraint is known to forbid a token. The constraint checks each token while the next
token is drafted. A token's chance is how often tokens of its probability were right.

An error of the draft model, such as missing memory, ends no request: nothing is drafted from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.prefix_tree import n_common
from llamapipe._engine.policy.speculation import EVERY, Guess, Mean, StepTimes, Worth
from llamapipe._engine.runtime.draft_checks import check_assistant, check_draft, check_state_draft
from llamapipe.errors import BackendError, ContextFullError, DecodeError
from llamapipe.gguf.draft_file import ASSISTANT, Blocks, blocks_of, target_layers
from llamapipe.llama.batch import DecodeBatch
from llamapipe.llama.context import Context
from llamapipe.llama.kv_memory import n_draft_states
from llamapipe.llama.model import Model
from llamapipe.llama.native_pipeline import SavedCells, on_gpu
from llamapipe.native.load import native

# The assumed share of drafted tokens that are sure enough, and of right tokens among these.
_USUAL_SHARE = 0.8
# The weight of that assumption, in tokens: a bad draft model is given up after 8 to 16 tokens.
_N_USUAL = 8
_MOST_SEEN, _MOST_OF_ALL = 60, 400  # tokens that the means of one request, and of all requests, remember
_N_BEFORE = 30  # the weight of the mean of all requests for a new request, in tokens
_FORGOTTEN = 0.05  # the share of the mean of all requests that each new request forgets
# Right tokens are counted by bins of probability. Each bin's mean starts at its middle, with a weight in tokens.
_N_BINS, _N_OF_BIN = 8, 2
_LEAST_COPY = 16  # the minimum tokens that a copied prefix must gain
_LONGEST = 256  # the maximum tokens that a request is expected to generate
_ROUNDED = 16  # numbers of tokens above this are rounded up to a multiple of it for ``StepTimes``
_EAGLE3_ROWS = 32  # entries of a decode that may be outputs, besides one for each sequence
# Entries of a decode of blocks, unless a block has more; each entry has a row of the whole vocabulary.
_BLOCK_ROWS = 64
# A decode of blocks takes at least this share of the time of the smallest known one.
_SMALL_BLOCK = 0.5
_Drafting = TypeVar("_Drafting", bound="DraftModel")


class _Held:
    """The sequence of a slot.

    ``tokens``: the tokens in its cells. ``arrival``: identifies the request. ``n_missing``: how many of the request's
    tokens are not in the cells. ``n_equal``: how many of the first ``tokens`` are the request's, unless it has dropped
    more than ``n_dropped``. ``drafted``: the draft after ``n`` tokens, with the bins of its probabilities; the first
    ``n_sure`` tokens were sure enough, and at most one was not. ``sure``: the share of drafted tokens that are sure
    enough. ``right``: the share of the sure tokens that are right.
    """

    __slots__ = (
        "arrival", "can_draft", "drafted", "key", "n", "n_dropped", "n_equal", "n_missing", "n_sure", "right", "sure",
        "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrival = -1
        self.key: Hashable = None  # requests with equal keys may share cells; None: no sharing
        self.tokens: list[int] = []
        self.drafted: list[tuple[int, int]] = []
        self.n = self.n_dropped = self.n_equal = self.n_missing = self.n_sure = 0
        self.sure, self.right = (Mean(_USUAL_SHARE, _N_USUAL, _MOST_SEEN) for _ in range(2))
        self.can_draft = True


class _Batch(NamedTuple):
    """The entries of a decode. ``before``: for a drafted token, the entry that it was drafted from; else -1."""

    tokens: list[int]
    positions: list[int]
    seq_ids: list[int]
    outputs: list[bool]
    before: list[int]


_Entries = list[tuple[Request, Sequence[int]]]  # tokens to compute after the tokens that a sequence holds


class _Drafts:
    """The drafts of one call.

    By request: ``chosen``: maximum tokens to draft. ``chances``: the probability that all drafted tokens are right.
    """

    __slots__ = ("chances", "chosen", "tokens", "worth")

    def __init__(self, chosen: Mapping[Request, int], worth: Worth) -> None:
        self.chosen, self.worth = chosen, worth
        self.tokens: dict[Request, list[int]] = {}
        self.chances: dict[Request, float] = {}

    def ready(self) -> dict[Request, Sequence[int]]:
        """Return the drafts that have tokens."""
        return {request: draft for request, draft in self.tokens.items() if draft}


class DraftModel:
    """Drafts tokens for the requests of one engine, in a context of a smaller model. Implements ``Drafter``.

    ``context``: has unified cells and a sequence for each slot. ``target``: the engine's own context; drafts use its
    number of threads. ``n_room``: the maximum number of tokens of a prompt computed in one draft, so that prompts do
    not hold up streams. The engine thread owns and closes the draft model.
    """

    def __init__(self, context: Context, target: Context, n_room: int) -> None:
        self.times = StepTimes(least_part=0.0)  # the time of a prompt says little about that of a token
        self._context = context
        self._target = target
        self._n_room = min(n_room, context.n_batch)
        self._held = [_Held() for _ in range(context.n_seq_max)]
        # The means of all requests so far.
        self._sure, self._right = (Mean(_USUAL_SHARE, _N_USUAL, _MOST_OF_ALL) for _ in range(2))
        self._chances = [Mean((i + 0.5) / _N_BINS, _N_OF_BIN, _MOST_OF_ALL) for i in range(_N_BINS)]
        self._failed = False
        self._ends: dict[Request, int] = {}  # by request: the entry of the last decode whose row was wanted
        self.took_s = 0.0
        self._began_s = 0.0  # when the decision on the next step began
        self._since_s = 0.0  # when the last decode of a draft ended, or the decision began
        self._rest = StepTimes()  # the time after the last decode of a draft
        self._computes_here = not (on_gpu(context.model) and on_gpu(target.model))

    def __repr__(self) -> str:
        shares = f"sure={self._sure.mean:.2f} right={self._right.mean:.2f}"
        return f"<DraftModel {self._context.model.path.name!r} {shares} {self.times!r}>"

    # ---- the gain and cost of a draft
    def begin(self) -> None:
        """Record that the decision on the next step begins."""
        self._began_s = perf_counter()

    def guess(self, request: Request, n: int) -> Guess | None:
        """Return a guess whose tokens are not drafted yet; None if none can be drafted."""
        held = self._held[request.slot]
        if held.arrival != request.arrival:
            self._begin(held, request)
        elif held.drafted:
            self._learn(held, request)
        n = min(n, self._context.n_ctx - len(request.tokens))
        if self._failed or n <= 0 or not held.can_draft:
            return None
        self._find_missing(held, request)
        return Guess(request, range(n), held.right.mean, is_draft=True, sure=held.sure.mean)

    def _find_missing(self, held: _Held, request: Request) -> None:
        """Record how many of a request's tokens are not in the cells of its sequence."""
        n_dropped = len(request.dropped)
        # Tokens that were equal before need not be compared again.
        first = held.n_equal if n_dropped == held.n_dropped else 0
        held.n_equal = first + n_common(held.tokens[first:], request.tokens[first:])
        held.n_dropped = n_dropped
        # The last token is always computed, because its row is wanted.
        n_kept = self._reachable(request.slot, min(held.n_equal, len(request.tokens) - 1))
        held.n_missing = len(request.tokens) - n_kept

    def _begin(self, held: _Held, request: Request) -> None:
        """Prepare the slot's sequence for a request that is new in it."""
        key = (request.spec.cache_key,) if request.uses_cache else None
        if key is None or key != held.key:
            self._cut(request.slot, 0)
        held.arrival, held.key, held.drafted = request.arrival, key, []
        held.can_draft, held.n_equal = True, 0
        for known in (self._sure, self._right):
            known.mean += _FORGOTTEN * (_USUAL_SHARE - known.mean)
        held.sure, held.right = (
            Mean(known.mean, min(known.n, _N_BEFORE), _MOST_SEEN) for known in (self._sure, self._right)
        )
        n_same = n_common(held.tokens, request.tokens)
        others = [i for i, other in enumerate(self._held) if i != request.slot and key and other.key == key]
        best = max(others, key=lambda i: n_common(self._held[i].tokens, request.tokens), default=None)
        if best is None:
            return
        n = n_common(self._held[best].tokens, request.tokens)
        if n >= n_same + _LEAST_COPY:
            self._share_cells(best, request.slot, n)

    def _share_cells(self, source: int, slot: int, n: int) -> None:
        self._cut(slot, 0)
        self._context.seq_copy(source, slot, 0, n)
        self._held[slot].tokens = self._held[source].tokens[:n]

    def _learn(self, held: _Held, request: Request) -> None:
        """Count which tokens of the last draft were right."""
        for i, (token, n_bin) in enumerate(held.drafted):
            if held.n + i >= len(request.tokens):
                break
            is_right = token == request.tokens[held.n + i]
            self._chances[n_bin].observe(is_right)
            if i < held.n_sure:
                held.right.observe(is_right)
                self._right.observe(is_right)
            if not is_right:
                break
        held.drafted = []

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        """Return the seconds to draft these numbers of tokens, with a share (or all) of those for missing cells."""
        n_longest = max(chosen.values(), default=0)
        if not n_longest:
            return 0.0
        seconds, n_first = 0.0, 0
        for request, n in chosen.items():
            n_missing = self._held[request.slot].n_missing
            n_first += min(n_missing, 2)
            if n_missing > 2:
                n_left = min(request.max_tokens - request.n_generated, _LONGEST)
                seconds += self._of(n_missing) * (1.0 if whole else min((n + 1) / max(n_left, 1), 1.0))
        for i in range(1, n_longest):
            # A draft that is not sure enough of a token has ended.
            n_expected = sum(
                self._held[request.slot].sure.mean ** i for request, n in chosen.items() if n > i
            )
            seconds += self._of(max(round(n_expected), 1)) * min(n_expected, 1.0)
        return seconds + self._of(n_first) + self._rest.of(1)

    def _of(self, n: int) -> float:
        return self.times.of(_round_up(n))

    # ---- drafting
    def draft(self, chosen: Mapping[Request, int], worth: Worth = EVERY) -> dict[Request, Sequence[int]]:
        """Return the drafted tokens, at most the chosen number, by request; none until its prompt is computed here."""
        if not chosen:
            return {}
        context, target = self._context, self._target
        # The time of the decision is part of the cost of a draft.
        self._since_s = self._began_s = self._began_s or perf_counter()
        if self._computes_here:
            target.park_threads()
            if context.n_threads != target.n_threads:
                context.set_threads(target.n_threads)
        try:
            return self._draft(chosen, worth)
        except (ContextFullError, DecodeError, BackendError, MemoryError) as e:
            if isinstance(e, ContextFullError) and self._make_room(chosen):
                return {}
            self._failed = True
            logging.getLogger("llamapipe").warning("the draft model is not used any more: %s", e)
            return {}
        finally:
            if self._computes_here:
                context.park_threads()
            now_s = perf_counter()
            self._rest.observe(1, now_s - self._since_s)
            self.took_s, self._began_s = now_s - self._began_s, 0.0

    def _draft(self, chosen: Mapping[Request, int], worth: Worth) -> dict[Request, Sequence[int]]:
        entries, drafts = self._missing(chosen), _Drafts(chosen, worth)
        while entries:
            ends = self._decode(entries)
            entries = []
            draft_s = self._of(len(ends)) / len(ends) if ends else 0.0
            for request, best, probability in ends:
                may_follow = self._take(drafts, request, best, probability)
                if may_follow and self._is_worth_more(drafts, request, draft_s):
                    if len(drafts.tokens[request]) == 1:
                        self._before_drafted(request.slot)
                    entries.append((request, (best,)))
        return drafts.ready()

    def _missing(self, chosen: Mapping[Request, int]) -> _Entries:
        """Remove cells whose tokens differ from the requests'. Return the tokens without cells, at most ``n_room``."""
        entries: _Entries = []
        n_room = self._n_room
        for request in chosen:
            self._cut(request.slot, len(request.tokens) - self._held[request.slot].n_missing)
            n_kept = len(self._held[request.slot].tokens)
            missing = request.tokens[n_kept : n_kept + n_room]
            if max(missing, default=0) >= self._context.model.n_vocab:
                self._held[request.slot].can_draft = False
                continue
            n_room -= len(missing)
            if missing:
                entries.append((request, missing))
        return entries

    def _take(self, drafts: _Drafts, request: Request, best: int, probability: float) -> bool:
        """Add the most probable next token to a request's draft if it is sure enough.

        Return whether another token may follow.
        """
        held, draft, worth = self._held[request.slot], drafts.tokens.setdefault(request, []), drafts.worth
        if not draft:
            held.drafted, held.n, held.n_sure = [], len(request.tokens), 0
        if best in request.stop_tokens or not 0 <= best < self._target.model.n_vocab:
            return False
        n_bin = min(int(probability * _N_BINS), _N_BINS - 1)
        held.drafted.append((best, n_bin))
        chance = drafts.chances[request] = drafts.chances.get(request, 1.0) * self._chances[n_bin].mean
        is_sure = chance >= worth.rate * worth.row_s
        held.sure.observe(is_sure)
        self._sure.observe(is_sure)
        if not is_sure:
            return False
        draft.append(best)
        held.n_sure += 1
        if request.sampler is not None and request.sampler.expect(draft) < len(draft):
            return False  # later tokens would follow a token that cannot be right
        return len(draft) < drafts.chosen[request] and len(held.tokens) < self._context.n_ctx

    def _is_worth_more(self, drafts: _Drafts, request: Request, draft_s: float) -> bool:
        """Return whether one more token is worth the expected seconds to draft it."""
        held, worth = self._held[request.slot], drafts.worth
        sure = held.sure.mean
        expected = drafts.chances[request] * sure * held.right.mean
        return expected >= worth.rate * (sure * worth.row_s + draft_s)

    def _decode(self, entries: Sequence[tuple[Request, Sequence[int]]]) -> list[tuple[Request, int, float]]:
        """Compute tokens after the tokens that the sequences hold.

        Returns the most probable next token and its probability for each request that then has no missing cells.
        """
        batch = _Batch([], [], [], [], [])
        ends: list[tuple[Request, int]] = []
        for request, new in entries:
            held = self._held[request.slot]
            first = len(held.tokens)
            batch.tokens.extend(new)
            batch.positions.extend(range(first, first + len(new)))
            batch.seq_ids.extend([request.slot] * len(new))
            batch.outputs.extend([False] * len(new))
            batch.before.extend([self._ends[request] if first >= len(request.tokens) else -1] * len(new))
            if first + len(new) >= len(request.tokens):
                batch.outputs[-1] = True
                ends.append((request, len(batch.tokens) - 1))
        rows = self._rows(batch, ends)
        for request, new in entries:
            self._held[request.slot].tokens += new
        return rows

    def _rows(self, batch: _Batch, ends: Sequence[tuple[Request, int]]) -> list[tuple[Request, int, float]]:
        """Compute a batch. Return each request of ``ends`` with its most probable next token and the probability."""
        self._compute(batch)
        self._ends = dict(ends)
        rows = [(request, *self._context.best(i)) for request, i in ends]
        now_s = perf_counter()
        self.times.observe(_round_up(len(batch.tokens)), now_s - self._since_s)
        self._since_s = now_s
        return rows

    def _compute(self, batch: _Batch) -> None:
        self._context.decode(DecodeBatch(batch.tokens, batch.positions, batch.seq_ids, batch.outputs))

    def _reachable(self, slot: int, n: int) -> int:
        """Return how many tokens a sequence keeps if it goes back to at most ``n`` tokens."""
        return n

    def _before_drafted(self, slot: int) -> None:
        """Prepare a sequence for drafted tokens, which may be wrong."""

    def _cut(self, slot: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence; ``n`` must be ``_reachable``."""
        held = self._held[slot]
        if n < len(held.tokens):
            self._go_back(slot, n)
            held.n_equal = min(held.n_equal, len(held.tokens))

    def _go_back(self, slot: int, n: int) -> None:
        self._context.seq_remove(slot, n)
        del self._held[slot].tokens[n:]

    def _make_room(self, chosen: Mapping[Request, int]) -> bool:
        """Remove the sequences of all other requests. Return False if there are none."""
        kept = {request.slot for request in chosen}
        idle = [i for i, held in enumerate(self._held) if held.tokens and i not in kept]
        for slot in idle:
            self._cut(slot, 0)
            self._held[slot].arrival = -1
        return bool(idle)

    def close(self) -> None:
        self._context.close()


class RecurrentDraft(DraftModel):
    """Drafts with a recurrent or hybrid model, which has a state.

    The state after a request's own tokens is copied before the second token of a draft is computed from the first. So
    drafts of one token cost no copy. After a wrong token the sequence returns to the copy, and computes the right
    tokens and the drawn token again. Requests share no prefixes, because a state belongs to one place.
    """

    def __init__(self, context: Context, target: Context, n_room: int) -> None:
        super().__init__(context, target, n_room)
        self._copies: dict[int, tuple[int, SavedCells]] = {}  # by slot: the place of a copy, and the copy
        self._copy_s = 0.0  # smoothed seconds to make a copy

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        n_copied = sum(n > 1 for n in chosen.values())
        return super().seconds(chosen, whole) + n_copied * 2 * self._copy_s  # each copy is made and loaded

    def _reachable(self, slot: int, n: int) -> int:
        place, n_held = self._copies[slot][0] if slot in self._copies else 0, len(self._held[slot].tokens)
        return n if n in (0, n_held) else place if place <= n else 0

    def _before_drafted(self, slot: int) -> None:
        began_s = perf_counter()
        _, copy = self._copies.pop(slot, (0, None))
        copy = SavedCells.of_state(self._context, slot, copy)
        if copy is not None:
            self._copies[slot] = len(self._held[slot].tokens), copy
        took_s = perf_counter() - began_s
        before_s = self._copy_s or took_s
        self._copy_s = 0.9 * before_s + 0.1 * min(took_s, 2 * before_s)

    def _go_back(self, slot: int, n: int) -> None:
        place, copy = self._copies.get(slot, (0, None))
        if copy is not None and 0 < n == place and copy.load_state(self._context, slot, n):
            del self._held[slot].tokens[n:]
            return
        super()._go_back(slot, 0)
        if copy is not None:
            self._copies[slot] = 0, copy  # the copy belongs to other tokens; only its memory is reused

    def _share_cells(self, source: int, slot: int, n: int) -> None:
        pass

    def close(self) -> None:
        for _, copy in self._copies.values():
            copy.close()
        self._copies.clear()
        super().close()


class MtpLayer(DraftModel):
    """Drafts with the layer of the model itself that predicts the token after the next (MTP).

    The layer reads a token, and the hidden state that the model had before that token. The engine's context keeps the
    states of the last tokens of each sequence, so a prompt costs this layer nothing until a draft is chosen. A sequence
    without some of its states, such as one that continues a cached prefix, begins at the first kept state. The layer
    then attends to fewer tokens, which only makes its drafts less accurate.

    The cells of drafted tokens are computed from drafted states, so they are removed. If the tokens were right, their
    cells are computed again from the model's states.
    """

    _skips_first = False  # whether a sequence's first token, which has no state before it, is not computed
    _most_missing = 32  # maximum missing tokens to compute before a draft; earlier ones are skipped

    def guess(self, request: Request, n: int) -> Guess | None:
        guess = super().guess(request, n)
        if guess is None:
            return None
        held, n_tokens = self._held[request.slot], len(request.tokens)
        begin, end = self._target.kept_states(request.slot)
        first = begin + 1 if begin or self._skips_first else 0  # tokens before it are not computed
        if end < n_tokens - 1 or first > n_tokens - 1:
            return None
        if held.n_missing > self._most_missing:
            first = max(first, n_tokens - self._most_missing)
        if n_tokens - held.n_missing < first:
            self._cut(request.slot, 0)
            held.tokens, held.n_equal = list(request.tokens[:first]), first
            held.n_missing = n_tokens - first
        return guess

    def _draft(self, chosen: Mapping[Request, int], worth: Worth) -> dict[Request, Sequence[int]]:
        try:
            return super()._draft(chosen, worth)
        finally:
            for request in chosen:
                self._cut(request.slot, len(request.tokens))

    def _compute(self, batch: _Batch) -> None:
        self._context.draft(*batch)


class Eagle3Draft(MtpLayer):
    """Drafts with an EAGLE-3 file: one layer that reads a token and earlier inputs of three of the model's layers.

    The inputs become a state only when a draft is chosen, so a step only has to copy them. The first token of a request
    is not computed, because no inputs precede it.
    """

    _skips_first = True

    def _decode(self, entries: Sequence[tuple[Request, Sequence[int]]]) -> list[tuple[Request, int, float]]:
        if sum(len(new) for _, new in entries) > self._context.n_outputs_max:
            # In a decode, either all entries are outputs or none is.
            super()._decode([(request, new[:-1]) for request, new in entries if len(new) > 1])
            entries = [(request, new[-1:]) for request, new in entries]
        return super()._decode(entries)

    def _compute(self, batch: _Batch) -> None:
        super()._compute(batch._replace(outputs=[any(batch.outputs)] * len(batch.tokens)))


class AssistantDraft(DraftModel):
    """Drafts with a Gemma 4 assistant, whose layers have no cells: they read the cells of the engine's context.

    So a draft has no missing tokens to compute. It begins with the request's last token, and the state that the model
    had before it. All tokens of a draft have the position of that last token, as in training: they attend to the cells
    of the tokens before it, and depend on one another only through the state. llama.cpp must find a free cell for each
    entry, although nothing is written to it. Without free cells, nothing is drafted.
    """

    def guess(self, request: Request, n: int) -> Guess | None:
        guess = super().guess(request, n)
        if guess is None:
            return None
        begin, end = self._target.kept_states(request.slot)
        return guess if begin < len(request.tokens) - 1 == end else None  # else the cells are about to change

    def _find_missing(self, held: _Held, request: Request) -> None:
        held.n_missing = 1

    def _missing(self, chosen: Mapping[Request, int]) -> _Entries:
        self._ends = {}
        entries: _Entries = []
        for request in chosen:
            if request.tokens[-1] < self._context.model.n_vocab:
                entries.append((request, request.tokens[-1:]))
        return entries

    def _decode(self, entries: Sequence[tuple[Request, Sequence[int]]]) -> list[tuple[Request, int, float]]:
        requests = [request for request, _ in entries]
        batch = _Batch(
            tokens=[new[-1] for _, new in entries],
            positions=[len(request.tokens) - 1 for request in requests],
            seq_ids=[request.slot for request in requests],
            outputs=[True] * len(requests),
            before=[self._ends.get(request, -1) for request in requests],
        )
        return self._rows(batch, [(request, i) for i, request in enumerate(requests)])

    def _compute(self, batch: _Batch) -> None:
        self._context.draft(*batch)

    def _make_room(self, chosen: Mapping[Request, int]) -> bool:
        return True  # the cells belong to the engine, so a later draft may succeed


class DFlashDraft(MtpLayer):
    """Drafts with a DFlash or DSpark file: a few layers that compute all tokens of a draft in one decode.

    The cells are not computed from tokens, but from earlier inputs of some of the model's layers (``Context.inject``).
    A draft is a block: the request's last token, whose inputs are not known yet, and a mask token for each token to
    draft. Each token of a block attends to all other tokens, so a decode consists of whole blocks. The cells of a block
    are removed after the decode.
    """

    _most_missing = 256

    def __init__(self, context: Context, target: Context, n_room: int, blocks: Blocks) -> None:
        super().__init__(context, target, n_room)
        self.times = StepTimes(_SMALL_BLOCK)  # the times of decodes of blocks
        self._n_room = n_room
        self._blocks = blocks
        self._injections = StepTimes(least_part=0.0)  # the times of ``inject``, by number of cells

    def guess(self, request: Request, n: int) -> Guess | None:
        return super().guess(request, min(n, self._blocks.n_most))

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        if not any(chosen.values()):
            return 0.0
        seconds, n_new = self._rest.of(1), 0
        for request, n in chosen.items():
            n_missing = self._held[request.slot].n_missing - 1
            n_new += min(n_missing, n + 1)
            if n_missing > n + 1:
                n_left = min(request.max_tokens - request.n_generated, _LONGEST)
                share = 1.0 if whole else min((n + 1) / max(n_left, 1), 1.0)
                seconds += self._injections.of(_round_up(n_missing)) * share
        groups = self._groups(chosen, chosen)
        n_entries = [sum(self._blocks.n_entries(chosen[request]) for request in group) for group in groups]
        return seconds + self._injections.of(_round_up(n_new)) + sum(map(self._of, n_entries))

    def _draft(self, chosen: Mapping[Request, int], worth: Worth) -> dict[Request, Sequence[int]]:
        drafts = _Drafts(chosen, worth)
        try:
            self._inject(self._missing(chosen))
            ready = [r for r in chosen if len(self._held[r.slot].tokens) == len(r.tokens) - 1]
            for group in self._groups(ready, chosen):
                self._decode_blocks(group, drafts)
        finally:
            for request in chosen:  # this also removes the cells of a failed call
                self._context.seq_remove(request.slot, len(self._held[request.slot].tokens))
        return drafts.ready()

    def _inject(self, entries: _Entries) -> None:
        """Compute the cells of each request's missing tokens except its last token."""
        positions: list[int] = []
        seq_ids: list[int] = []
        new: list[tuple[_Held, Sequence[int]]] = []
        for request, missing in entries:
            held = self._held[request.slot]
            first = len(held.tokens)
            tokens = missing[: len(request.tokens) - 1 - first]
            positions.extend(range(first, first + len(tokens)))
            seq_ids.extend([request.slot] * len(tokens))
            new.append((held, tokens))
        if positions:
            self._context.inject(positions, seq_ids)
            self._note(self._injections, len(positions))
        for held, tokens in new:
            held.tokens += tokens

    def _groups(self, requests: Iterable[Request], chosen: Mapping[Request, int]) -> list[list[Request]]:
        """Return groups of requests; the blocks of a group are computed in one decode."""
        groups: list[list[Request]] = []
        n_entries = 0
        for request in sorted(requests, key=lambda r: chosen[r]):
            n = self._blocks.n_entries(chosen[request])
            is_other = groups and self._blocks.is_even and chosen[groups[-1][0]] != chosen[request]
            if not groups or is_other or n_entries + n > self._context.n_ubatch:
                groups.append([])
                n_entries = 0
            groups[-1].append(request)
            n_entries += n
        return groups

    def _decode_blocks(self, group: Sequence[Request], drafts: _Drafts) -> None:
        batch = _Batch([], [], [], [], [])
        begins: list[int] = []
        for request in group:
            n, last = self._blocks.n_entries(drafts.chosen[request]), len(request.tokens) - 1
            begins.append(len(batch.tokens) + self._blocks.first)
            batch.tokens.extend((request.tokens[last], *[self._blocks.mask] * (n - 1)))
            batch.positions.extend(range(last, last + n))
            batch.seq_ids.extend([request.slot] * n)
        self._compute(batch)
        for request, begin in zip(group, begins, strict=True):
            for row in range(begin, begin + drafts.chosen[request]):
                if not self._take(drafts, request, *self._context.best(row)):
                    break
        self._note(self.times, len(batch.tokens))

    def _compute(self, batch: _Batch) -> None:
        self._context.decode_blocks(batch.tokens, batch.positions, batch.seq_ids)

    def _note(self, times: StepTimes, n: int) -> None:
        """Record the time of a decode of ``n`` entries, which began when the previous decode ended."""
        now_s = perf_counter()
        times.observe(_round_up(n), now_s - self._since_s)
        self._since_s = now_s


def _round_up(n: int) -> int:
    return n if n <= _ROUNDED else -(-n // _ROUNDED) * _ROUNDED


def make_mtp_drafter(target: Context, n_room: int) -> MtpLayer:
    """Make a drafter from the MTP layer of the context's model. Call ``mtp_problem`` first.

    Raises BackendError if there is no memory for its cells. From then on, the context keeps hidden states.
    """
    context = _context_beside(target, target.model, rope=target.rope, drafts_for=target)
    return _with_states(MtpLayer(context, target, n_room), target)


def _with_states(
    drafter: _Drafting, target: Context, layers: Sequence[int] = (), architecture: str = ""
) -> _Drafting:
    """Make the engine's context keep the states that a drafter reads.

    ``architecture``: the architecture of its file.
    """
    try:
        n_last = native().lib.llama_model_n_embd_out(target.model.handle)
        width = target.model.n_embd * len(layers) or n_last
        target.keep_states(n_draft_states(target.n_ctx, width, architecture), layers)
    except BaseException:
        drafter.close()
        raise
    return drafter


def _make_eagle3(target: Context, draft: Model, n_room: int) -> DraftModel:
    check_state_draft(target.model, draft)
    # Its graph computes logits of the model's whole vocabulary for each row, even for unwanted rows.
    options = {"n_ubatch": _EAGLE3_ROWS, "n_more_outputs": _EAGLE3_ROWS}
    context = _context_beside(target, draft, drafts_for=target, **options)
    return _with_states(Eagle3Draft(context, target, n_room), target, target_layers(draft.file_metadata))


def _make_assistant(target: Context, draft: Model, n_room: int) -> DraftModel:
    check_assistant(target.model, draft)
    # llama.cpp shares the target's cells and does not check these options, so they must equal the target's.
    context = Context(
        draft,
        n_ctx=target.n_ctx,
        n_seq_max=target.n_seq_max,
        n_cells=target.n_cells,
        n_batch=target.n_seq_max,
        n_threads=target.n_threads,
        kv_unified=target.kv_unified,
        type_k=target.type_k,
        type_v=target.type_v,
        flash_attn=target.flash_attn,
        swa_full=bool(target.swa_full),
        rope=target.rope,
        drafts_for=target,
    )
    return _with_states(AssistantDraft(context, target, n_room), target, architecture=ASSISTANT)


def _make_dflash(target: Context, draft: Model, n_room: int) -> DraftModel:
    check_state_draft(target.model, draft)
    blocks = blocks_of(draft.file_metadata, draft.tensors)
    n_longest = blocks.n_entries(blocks.n_most)
    n_cells = target.n_cells + target.n_seq_max * n_longest
    n_rows = min(max(_BLOCK_ROWS, n_longest, target.n_seq_max), n_cells)
    options: dict[str, Any] = dict.fromkeys(("n_batch", "n_ubatch", "n_outputs_max"), n_rows)
    options["n_cells"] = n_cells
    context = _context_beside(target, draft, drafts_for=target, is_causal=blocks.is_causal, **options)
    drafter = DFlashDraft(context, target, n_room, blocks)
    return _with_states(drafter, target, target_layers(draft.file_metadata))


# By architecture: drafters that read states of the engine's model.
_BY_ARCHITECTURE = {"eagle3": _make_eagle3, "dflash": _make_dflash, ASSISTANT: _make_assistant}


def make_drafter(target: Context, draft: Model, n_room: int) -> DraftModel:
    """Make a drafter for a context's engine. For ``n_room`` see DraftModel.

    Raises ValueError unless ``draft`` can draft for the context's model, BackendError if there is no memory for its
    cells.
    """
    if make := _BY_ARCHITECTURE.get(draft.architecture):
        return make(target, draft, n_room)
    check_draft(target.model, draft)
    kind = RecurrentDraft if draft.is_recurrent else DraftModel
    return kind(_context_beside(target, draft), target, n_room)


def _context_beside(target: Context, model: Model, **options: Any) -> Context:
    """Make a context with as many sequences and cells as the engine's, unless ``options`` say otherwise."""
    usual: dict[str, Any] = {
        "n_ctx": target.n_ctx,
        "n_seq_max": target.n_seq_max,
        "n_cells": target.n_cells,
        "n_batch": max(target.n_ubatch, target.n_seq_max),
        "n_outputs_max": target.n_seq_max,
        "n_threads": target.n_threads,
        "kv_unified": True,
    }
    return Context(model, **usual | options)
