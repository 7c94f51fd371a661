"""Plans which tokens the next step computes.

Open this file to change how prompts share a step with requests that decode.

The principle: each running request has tokens without KV cells, one if it decodes and more if it has a prompt. A step
computes at most ``n_batch`` of them. Requests that decode come first, with one token each. Prompts take what is left,
in the order of their turns, and are cut where it ends. The rest of this file makes exceptions, for three reasons:

1. Streams must not stutter. While requests decode, a step has at most ``n_ubatch`` tokens. ``max_itl_s`` limits it
   further, also if only requests with other adapters stream (``PrefillBudget``).
2. First tokens must come early. A long prompt leaves up to half of a step to short prompts after it. On a CPU, where a
   prompt token takes as long in a small step as in a large one, a step that completes a stream's prompt takes no
   further prompt once the step has ``prefill_cutoff`` tokens.
3. Reading the weights is expensive. llama.cpp splits a batch where the slots do not increase by one, and each part
   reads all weights. So gaps between the slots of decoding requests are padded, and chunks are in the order of their
   slots. With per-sequence KV, prompts and decoding are separate passes anyway. On a CPU, decoding then yields to the
   prompts of streams, for at most ``n_ubatch`` prompt tokens in total.

A prompt is also cut where other adapters take over (an activated LoRA), and at the places where its state is saved
(``kv.py``). The rest of the prompt waits for a later step.

The rows of an image are batch entries like tokens, and share steps with them. In some models (Gemma 3) the rows of an
image attend to each other, which llama.cpp can only set for a whole ubatch. Such an image is a separate step, and
requests that decode get a step between two such steps.

A request that decodes may have guessed tokens after its last one; ``speculation.py`` says which.

In a plan, the entries that decode come before the entries of prompts: ``Scheduler.commit`` relies on it. Pure policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from llamapipe._engine.policy.core import (
    UNLIMITED,
    BatchPlan,
    Cells,
    Chunk,
    MediaRows,
    Remove,
    Request,
    ScoredRows,
)
from llamapipe._engine.policy.scoring import LogprobTargets

if TYPE_CHECKING:
    from llamapipe._engine.policy.queues import Running

# Made in C, because every step makes lists with them.
_slot, _n_past, _tokens = attrgetter("slot"), attrgetter("n_past"), attrgetter("tokens")
_slot_of_chunk, _last = attrgetter("request.slot"), itemgetter(-1)
LEAST_CHUNK = 64  # prompt tokens; llama.cpp's attention on a CPU works in tiles of this size
_MARGIN = 0.9  # of the limit: times vary, and tokens are sampled and delivered as well
_KEPT = 0.9  # each observation multiplies the weight of the earlier ones by this
_LEAST_ROWS = 4  # the scored tokens that a step may have in any case
_FIRST_ROWS = 8  # the limit on scored tokens until their cost is known


class PrefillBudget:
    """Learns the cost of prompt tokens from the times of steps. For the engine thread.

    A prompt token costs ``a + b * position`` seconds: its share of a pass over the weights, and attention to the tokens
    before it. Both are fitted by least squares, with less weight on older observations. A scored token also costs a row
    of logits, which may take longer than the token. The cost of a row is the time that a step takes beyond its other
    tokens.

    ``max_itl_s``: the target for the time between two tokens of a stream, in seconds; None: no limit. A step always has
    room for 64 prompt tokens and 4 scored tokens, so prompts and scores always progress.
    """

    def __init__(self, max_itl_s: float | None) -> None:
        self.is_on = max_itl_s is not None
        self._limit_s = _MARGIN * (max_itl_s or 0.0)
        self._decode_s: float | None = None  # seconds of a step without prompts, averaged
        # Weighted sums; x: position, y: seconds per token.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._n_most = LEAST_CHUNK // 2  # prompt tokens of the largest step so far
        self._row_s: float | None = None  # seconds per scored token
        self._n_most_rows = _FIRST_ROWS // 2

    def __repr__(self) -> str:
        return f"<PrefillBudget {self.n_tokens(0) if self.is_on else 'unlimited'}>"

    def n_tokens(self, position: int, n_turns: int = 1) -> int:
        """Return the maximum number of prompt tokens in a step with decoding requests; the first is at this position.

        ``n_turns``: how many such steps may come between two tokens of a stream, and so share the time.
        """
        if not self.is_on:
            return UNLIMITED
        if not self._n:
            return LEAST_CHUNK  # their cost is not known yet; this step shows it
        variance = self._xx * self._n - self._x * self._x
        slope_s = (self._xy * self._n - self._x * self._y) / variance if variance > 1e-9 * self._xx else 0.0
        slope_s = max(slope_s, 0.0)
        first_s = max((self._y - slope_s * self._x) / self._n, 0.0) + slope_s * position
        left_s = self._limit_s / n_turns - (self._decode_s or 0.0)
        if left_s <= 0 or first_s <= 0:
            return LEAST_CHUNK
        # n tokens take n * (first_s + slope_s * n / 2).
        n = left_s / first_s
        if slope_s > 0:
            n = (math.sqrt(first_s * first_s + 2 * slope_s * left_s) - first_s) / slope_s
        n = min(n, 2 * self._n_most)  # far beyond the largest step so far, the fit may be wrong
        return max(int(n) // LEAST_CHUNK, 1) * LEAST_CHUNK

    def n_rows(self) -> int:
        """Return the maximum number of scored tokens in a step with decoding requests."""
        if not self.is_on:
            return UNLIMITED
        left_s = self._limit_s - (self._decode_s or 0.0)
        n = 2 * self._n_most_rows
        if self._row_s:
            n = min(n, int(left_s / self._row_s))
        return max(n, _LEAST_ROWS)

    def observe(
        self, n_prompt: int, position: float, seconds: float, n_rows: int = 0, decodes: bool = True
    ) -> None:
        """Learn from the time of a step; ``position``: the mean position of its ``n_prompt`` tokens.

        ``n_rows``: how many of the prompt tokens were scored. ``decodes``: whether requests decoded in the step.
        """
        if not self.is_on:
            return
        if n_prompt == 0:
            before_s = seconds if self._decode_s is None else self._decode_s
            self._decode_s = before_s + 0.2 * (seconds - before_s)
            return
        prompt_s = max(seconds - (self._decode_s or 0.0 if decodes else 0.0), 0.0)
        if n_rows:
            self._observe_rows(n_rows, n_prompt - n_rows, prompt_s)
            if 2 * n_rows >= n_prompt:
                return
            prompt_s = max(prompt_s - n_rows * (self._row_s or 0.0), prompt_s / 2)
        if n_prompt >= LEAST_CHUNK // 4:  # a smaller step says little about the cost of a token
            self._n_most = max(self._n_most, n_prompt)
            token_s = prompt_s / n_prompt
            self._n = _KEPT * self._n + 1
            self._x = _KEPT * self._x + position
            self._y = _KEPT * self._y + token_s
            self._xx = _KEPT * self._xx + position * position
            self._xy = _KEPT * self._xy + position * token_s

    def _observe_rows(self, n_rows: int, n_others: int, seconds: float) -> None:
        """Learn the cost of scored tokens from a step with ``n_others`` other prompt tokens."""
        if self._row_s is not None and 3 * n_rows < n_others:  # too few for more than an upper bound
            self._row_s = min(self._row_s, seconds / n_rows)
            return
        others_s = n_others * self._y / self._n if self._n else 0.0
        row_s = max(seconds - others_s, 0.0) / n_rows
        self._row_s = row_s if self._row_s is None else _KEPT * self._row_s + (1 - _KEPT) * row_s
        self._n_most_rows = max(self._n_most_rows, n_rows)


class BatchBuilder:
    """Fills batches of up to ``n_batch`` tokens.

    ``padding_token``: fills gaps between the slots of decoding requests; None: no padding, because gaps cost nothing
    (unified KV) or the model is recurrent. ``n_score_rows``: maximum number of output rows of a step for scored tokens.
    ``prefill_cutoff``: a step that completes a stream's prompt takes no further prompt once the step has this many
    prompt tokens; None: no such limit. For ``max_itl_s`` see PrefillBudget.

    ``depth``: how many scoring steps may be in flight; if more than one, each has at most ``n_ubatch`` tokens.
    ``n_micro_batches``: how many parts the decoding requests are split into. Each part is a step, so one part is
    computed while another is sampled.
    """

    def __init__(
        self,
        n_batch: int,
        n_ubatch: int,
        padding_token: int | None,
        n_score_rows: int,
        prefill_cutoff: int | None = None,
        max_itl_s: float | None = None,
    ) -> None:
        self.budget = PrefillBudget(max_itl_s)
        self._n_batch = n_batch
        self.n_ubatch = n_ubatch
        self._prefill_cutoff = UNLIMITED if prefill_cutoff is None else prefill_cutoff
        self._n_waited = 0  # prompt tokens that decoding has yielded to
        self._n_last = 0  # of these, the ones in the last step
        self._padding_token = padding_token
        self._n_score_rows = n_score_rows
        self.depth = 1
        self.n_micro_batches = 1
        self._was_block = False  # the last step was an image alone

    def plan(
        self,
        running: Running,
        parked: Mapping[int, Cells],
        guesses: Mapping[Request, Sequence[int]] | None = None,
    ) -> BatchPlan:
        """Plan the next step from the requests that are in no step in flight. If all are, the plan has no tokens.

        ``parked``: cells in slots without a request. ``guesses``: guessed tokens to compute after each request's last
        token; the step then has no prompts.
        """
        plan = BatchPlan()
        if guesses:
            self._decode_with_guesses(plan, self.part(running.decoding), guesses)
            return plan
        if block := self._next_block(running):
            _add(plan, block)
            plan.is_causal = False
            block.request.batch_plan = plan
            self._was_block = True
            return plan
        self._was_block = False
        waits = bool(running.decoding and running.prefilling) and self._decoding_waits(running)
        if running.decoding and not waits:
            self._decode(plan, running, parked)
        if running.prefilling:
            self._prefill(plan, running)
        self._n_last = len(plan.tokens) if waits else 0
        self._n_waited = self._n_waited + self._n_last if waits else 0
        for request, _ in plan.scheduled:
            request.batch_plan = plan
        return plan

    def _next_block(self, running: Running) -> Chunk | None:
        """Return the rows of an image that attend to each other, if the next step is for such an image."""
        if self._was_block and running.decoding:
            return None
        for request in running.prefilling:
            if request.spans and not (request.batch_plan is not None and request.batch_plan.in_flight):
                span = request.next_block()
                if span is not None and span.begin == request.n_past:
                    return Chunk(request, span.begin, span.end - span.begin, range(0))
        return None

    def _decoding_waits(self, running: Running) -> bool:
        """Return whether decoding yields, so that the next step has only prompts, of which the first is a stream's.

        Prefill and decode would be separate passes. Their order matters little to decoding requests, but much to the
        first tokens after the prompts.
        """
        if self._prefill_cutoff == UNLIMITED or self._padding_token is None or self.n_micro_batches > 1:
            # With unified KV, decoding shares the prompts' pass over the weights, so waiting saves nothing. One
            # micro-batch would also wait for the prompts of another.
            return False
        n_step = n_next = 0
        for request in running.prefilling:
            # A step may not take the whole prompt: spans and other adapters divide it.
            if request.spans or request.n_past < request.active_from < len(request.tokens):
                return False
            if request.batch_plan is not None and request.batch_plan.in_flight:
                continue
            n_uncomputed = request.n_next
            if n_step == 0 and not request.is_streaming:
                return False
            if n_step >= self._prefill_cutoff:
                n_next = n_uncomputed if n_uncomputed <= self.n_ubatch else self._prefill_cutoff
                break
            n_step += n_uncomputed
        if n_step == 0:
            return False
        # Not twice in a row for a few tokens: each step is a pass, and prompts may keep arriving one by one.
        if n_step < self._prefill_cutoff and 0 < self._n_last < self._prefill_cutoff:
            return False
        # Decoding yields to one ubatch of prompt tokens at most: leave room for the first prompt of the next step.
        return self._n_waited + n_step + n_next <= min(self.n_ubatch, self._n_beside(running))

    def _n_beside(self, running: Running) -> int:
        """Return the maximum number of prompt tokens in a step with decoding requests, or between two such steps."""
        if not self.budget.is_on:
            return UNLIMITED
        return self.budget.n_tokens(running.prefilling[0].n_past, max(len(running.others), 1))

    def part(self, decoding: list[Request]) -> list[Request]:
        """Return the decoding requests of the next step; with micro-batches, without the requests in flight.

        They are split by slot, the lowest slots first, so that the split leaves no gaps to pad.
        """
        if self.n_micro_batches == 1:
            return decoding
        free = [r for r in decoding if r.batch_plan is None or not r.batch_plan.in_flight]
        return free[: -(-len(decoding) // self.n_micro_batches)]

    def _decode(self, plan: BatchPlan, running: Running, parked: Mapping[int, Cells]) -> None:
        decoding = running.decoding
        if self.n_micro_batches > 1:
            decoding = self.part(decoding)
            if not decoding:
                return
        n = plan.n_decode = len(decoding)
        plan.tokens = list(map(_last, map(_tokens, decoding)))
        plan.positions = list(map(_n_past, decoding))
        plan.seq_ids = list(map(_slot, decoding))
        plan.outputs = [1] * n
        plan.rows = list(range(n))
        plan.requests = decoding.copy()
        plan.scheduled = list(zip(decoding, repeat(1)))
        # With several micro-batches, a gap may belong to a step in flight.
        if (
            self._padding_token is not None
            and len(decoding) == len(running.decoding)
            and plan.seq_ids[-1] - plan.seq_ids[0] >= n
        ):
            self._pad_gaps(plan, running, parked, self._padding_token)

    def _decode_with_guesses(
        self, plan: BatchPlan, decoding: Sequence[Request], guesses: Mapping[Request, Sequence[int]]
    ) -> None:
        """Decode each request's last token and the guessed tokens after it. There is no prefill and no padding."""
        plan.n_decode = len(decoding)
        guessed: list[int] = []
        for request in decoding:
            guess = guesses.get(request, ())
            n = 1 + len(guess)
            plan.tokens += (request.tokens[-1], *guess)
            plan.positions += range(request.n_past, request.n_past + n)
            plan.seq_ids += (request.slot,) * n
            plan.requests += (request,) * n
            guessed += (*guess, -1)
            plan.scheduled.append((request, n))
            plan.n_guessed += n - 1
            request.batch_plan = plan
        plan.guessed = guessed
        plan.outputs = [1] * len(plan.tokens)
        plan.rows = list(range(len(plan.tokens)))

    def _pad_gaps(
        self, plan: BatchPlan, running: Running, parked: Mapping[int, Cells], padding_token: int
    ) -> None:
        """Add a padding token for each sequence in a gap if that is cheaper than splitting the batch at the gaps."""
        prefilling = {r.slot for r in running.prefilling}  # most of them have tokens in this step
        resting = (running.paused, running.drawing, *running.others.values())
        held = {r.slot: r.n_past for requests in resting for r in requests}
        first, last = plan.seq_ids[0], plan.seq_ids[-1]
        gaps = sorted(set(range(first, last)) - set(plan.seq_ids) - prefilling)
        if len(gaps) > len(plan.seq_ids):
            return
        for slot in gaps:
            # The position is below n_ctx: the last token of a full sequence needs no cell.
            position = parked[slot].n if slot in parked else held.get(slot, 0)
            i = slot - first - sum(1 for f in prefilling if first < f < slot)
            plan.tokens.insert(i, padding_token)
            plan.positions.insert(i, position)
            plan.seq_ids.insert(i, slot)
            plan.outputs.insert(i, 0)
            plan.padding.append(Remove(slot, position))
        plan.rows = [i for i, output in enumerate(plan.outputs) if output]

    def _prefill(self, plan: BatchPlan, running: Running) -> None:
        step_room = self._n_batch - len(plan.tokens)
        others_wait = not running.decoding and self.budget.is_on and running.others_stream
        if running.decoding:
            step_room = min(step_room, max(self.n_ubatch - len(plan.tokens), 1), self._n_beside(running))
        elif (self.depth > 1 and running.only_scores) or (
            len(running.prefilling) > 1 and not running.only_scores
        ):
            # llama.cpp computes one ubatch at a time anyway. Smaller steps deliver the first prompt's token before the
            # last prompt is computed.
            step_room = min(step_room, self.n_ubatch)
        if others_wait:
            step_room = min(step_room, self._n_beside(running))
        budget = min(step_room, self.n_ubatch - self._n_waited) if running.decoding else step_room
        n_reserved = _n_reserved(running.prefilling, budget) if len(running.prefilling) > 1 else 0
        n_rows = self._n_score_rows
        if running.decoding or others_wait:
            n_rows = min(n_rows, self.budget.n_rows())
        chunks: list[Chunk] = []
        n_tokens, brings_first = 0, False
        for request in running.prefilling:
            if budget <= 0:
                break
            if n_reserved and chunks and request.n_uncomputed > budget:
                continue  # one incomplete prompt in a step is enough
            if request.batch_plan is not None and request.batch_plan.in_flight:
                continue
            first, end = request.n_past, len(request.tokens)
            n_uncomputed = request.n_next
            if first < request.active_from < end:
                n_uncomputed = min(request.active_from - first, n_uncomputed)
            if request.spans and (block := request.next_block()) is not None:
                n_uncomputed = min(block.begin - first, n_uncomputed)
                if not n_uncomputed:
                    continue
            if brings_first and n_tokens >= self._prefill_cutoff:
                break  # a stream waits for this step's token
            is_shared = bool(chunks) or self._n_waited > 0
            if budget < n_uncomputed <= step_room and is_shared and request.max_tokens != 0:
                break  # the next step has room for all of it; two chunks would take one more pass over the weights
            n = min(n_uncomputed, budget if chunks else budget - n_reserved)
            scored, targets = range(0), request.logprob_targets
            if targets is not None:
                n, scored = _scored_part(targets, first, n, n_rows)
                if n <= 0:
                    continue
            budget -= n
            n_rows -= len(scored)
            n_tokens += n
            chunks.append(Chunk(request, first, n, scored))
            if first + n == end and request.max_tokens:
                brings_first = brings_first or request.is_streaming
        if self._padding_token is not None:
            # llama.cpp cuts a batch where the slots do not increase by one, and each part is a pass over the weights.
            chunks.sort(key=_slot_of_chunk)
        for chunk in chunks:
            _add(plan, chunk)


def _add(plan: BatchPlan, chunk: Chunk) -> None:
    request, first, n, scored = chunk
    is_last = first + n == len(request.tokens)
    begin = len(plan.tokens)
    plan.tokens += request.tokens[first : first + n]
    plan.positions += range(first, first + n)
    plan.seq_ids += [request.slot] * n
    plan.outputs += [0] * n
    plan.scheduled.append((request, n))
    for span in request.spans:
        low, high = max(first, span.begin), min(first + n, span.end)
        if low < high:
            run = MediaRows(begin + low - first, high - low, span.source, low - span.begin)
            plan.rows_of_media.append(run)
            plan.tokens[begin + low - first : begin + high - first] = [0] * (high - low)
    if scored and request.logprob_targets is not None:
        entries = range(begin + scored.start - first, begin + scored.stop - first)
        plan.outputs[entries.start : entries.stop] = [1] * len(scored)
        plan.scored.append(ScoredRows(request, request.logprob_targets, scored.start, entries))
    if is_last and request.max_tokens:
        plan.outputs[-1] = 1
        plan.rows.append(len(plan.tokens) - 1)
        plan.requests.append(request)


def _n_reserved(prefilling: Sequence[Request], budget: int) -> int:
    """Return how many tokens a long first prompt leaves to short prompts after it: at most half of the budget."""
    n_reserved = 0
    if prefilling[0].n_uncomputed > budget:
        for request in prefilling[1:]:
            if n_reserved + request.n_uncomputed <= budget // 2:
                n_reserved += request.n_uncomputed
    return n_reserved


def _scored_part(targets: LogprobTargets, first: int, n: int, n_rows: int) -> tuple[int, range]:
    """Return how many of the ``n`` tokens from ``first`` onward to schedule, and the positions whose rows are wanted.

    At most ``n_rows`` positions are returned, so fewer than ``n`` tokens may be scheduled.
    """
    begin = max(first, targets.wanted_from)
    end = min(first + n, targets.wanted_to)
    if end <= begin:
        return n, range(0)
    if end - begin > n_rows:
        end = begin + n_rows
        n = end - first
    return n, range(begin, end)
