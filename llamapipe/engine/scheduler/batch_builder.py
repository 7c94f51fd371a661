"""Puts together what a step feeds: tokens that decode, then prompts. Pure policy.

Those that decode come first, then prompts in the order of arrival up to the token budget, cut into chunks: while
streams are decoding a step takes at most ``n_ubatch`` tokens, so that a long prompt does not hold them up. On a CPU,
where streams' prompts wait behind each other, a step ends early with one of them, so that its first token need not wait
for more. With KV by sequence what decodes waits there for steps of prompts that begin with a stream's and fit into a
ubatch, and for at most ``n_ubatch`` tokens of them.
"""

from __future__ import annotations

from llamapipe.engine.scheduler.batch_plan import BatchPlan, Remove
from llamapipe.engine.scheduler.prompt_group import PromptGroup
from llamapipe.engine.scheduler.request import UNLIMITED, Request
from llamapipe.engine.scheduler.running import Running


class BatchBuilder:
    """Fills batches of up to ``n_batch`` tokens.

    ``padding_token``: a token to fill gaps between decoding sequences with, None when gaps cost nothing (unified KV).
    ``n_score_rows``: most rows in a step that score a request's own tokens. ``prefill_cutoff``: a step that
    completes a stream's prompt takes no further prompt once it has this many prompt tokens; None: no such limit.

    ``depth``: how many steps of scores may be under way at once; if several, each has at most ``n_ubatch`` tokens.
    ``n_micro_batches``: how many parts the decoding requests are split into. Each part is a step of its own, so that
    one is computed while another is sampled.
    """

    def __init__(
        self,
        n_batch: int,
        n_ubatch: int,
        padding_token: int | None,
        n_score_rows: int,
        prefill_cutoff: int | None = None,
    ) -> None:
        self._n_batch = n_batch
        self._n_ubatch = n_ubatch
        self._prefill_cutoff = UNLIMITED if prefill_cutoff is None else prefill_cutoff
        self._n_waited = 0  # tokens of prompts for which those that decode have waited,
        self._n_last = 0  # and how many of them were in the last step
        self._padding_token = padding_token
        self._n_score_rows = n_score_rows
        self.depth = 1
        self.n_micro_batches = 1

    def plan(self, running: Running) -> BatchPlan:
        """The next step of what is in no step under way; without tokens if there is nothing."""
        plan = BatchPlan()
        waits = bool(running.decoding) and self._decoding_waits(running)
        if running.decoding and not waits:
            self._decode(plan, running)
        if running.prefilling:
            self._prefill(plan, running)
        self._n_last = len(plan.tokens) if waits else 0
        self._n_waited = self._n_waited + self._n_last if waits else 0
        for request, _ in plan.scheduled:
            request.batch_plan = plan
        return plan

    def _decoding_waits(self, running: Running) -> bool:
        """Whether the next step is one of prompts alone, a stream's first: what decodes would take a pass of its own.

        The order of the two passes makes little difference for those that decode, but much for prompts' first tokens.
        """
        if self._prefill_cutoff == UNLIMITED or self._padding_token is None or self.n_micro_batches > 1:
            # With unified KV (no padding token) decoding shares the prompts' pass over the weights, so waiting saves
            # nothing. A micro-batch would wait for the other one's prompts, too.
            return False
        n_step = n_next = 0
        for request in running.prefilling:
            if request.batch_plan is not None and request.batch_plan.in_flight:
                continue
            n_left = request.n_left
            if n_step == 0 and not request.is_streaming:
                return False
            if n_step >= self._prefill_cutoff:
                n_next = n_left if n_left <= self._n_ubatch else self._prefill_cutoff
                break
            n_step += n_left
        if n_step == 0:
            return False
        # Not twice in a row for a few tokens: each step is a pass, and prompts may go on coming one by one.
        if n_step < self._prefill_cutoff and 0 < self._n_last < self._prefill_cutoff:
            return False
        # The first of those behind this step still has to fit into the ubatch that what decodes waits for.
        return self._n_waited + n_step + n_next <= self._n_ubatch

    def _decode(self, plan: BatchPlan, running: Running) -> None:
        decoding, n_in_flight = running.decoding, 0
        if self.n_micro_batches > 1:
            free = [r for r in decoding if r.batch_plan is None or not r.batch_plan.in_flight]
            n_in_flight = len(decoding) - len(free)
            # Halves by slot, so that no gap has to be filled: the lower one first.
            decoding = free[: -(-len(decoding) // self.n_micro_batches)]
            if not decoding:
                return
        n = plan.n_decode = len(decoding)
        plan.tokens = [r.tokens[-1] for r in decoding]
        plan.positions = [r.n_past for r in decoding]
        plan.seq_ids = [r.slot for r in decoding]
        plan.outputs = [1] * n
        plan.rows = list(range(n))
        plan.requests = decoding.copy()
        plan.scheduled = [(r, 1) for r in decoding]
        # A gap may be a sequence of a step under way.
        if (
            self._padding_token is not None
            and not n_in_flight
            and len(decoding) == len(running.decoding)
            and plan.seq_ids[-1] - plan.seq_ids[0] >= n
        ):
            self._pad_gaps(plan, running, self._padding_token)

    def _pad_gaps(self, plan: BatchPlan, running: Running, padding_token: int) -> None:
        """Gives the sequences in the gaps a token each, where that is cheaper than cutting the batch there."""
        feeding = {r.slot for r in running.prefilling}  # have tokens of their own, mostly in this step
        held = {r.slot: r.n_past for r in running.paused}
        first, last = plan.seq_ids[0], plan.seq_ids[-1]
        gaps = sorted(set(range(first, last)) - set(plan.seq_ids) - feeding)
        if len(gaps) > len(plan.seq_ids):
            return
        for slot in gaps:
            position = held.get(slot, 0)  # below n_ctx: the last token of a full sequence is never fed
            i = slot - first - sum(1 for f in feeding if first < f < slot)
            plan.tokens.insert(i, padding_token)
            plan.positions.insert(i, position)
            plan.seq_ids.insert(i, slot)
            plan.outputs.insert(i, 0)
            plan.padding.append(Remove(slot, position))
        plan.rows = [i for i, output in enumerate(plan.outputs) if output]

    def _prefill(self, plan: BatchPlan, running: Running) -> None:
        whole = self._n_batch - len(plan.tokens)
        if running.decoding:
            whole = min(whole, max(self._n_ubatch - len(plan.tokens), 1))
        elif self.depth > 1 if running.only_scores else len(running.prefilling) > 1:
            # llama.cpp computes no more at a time. So the next step need not wait for it, nor the first prompt's token
            # for the last prompt.
            whole = min(whole, self._n_ubatch)
        budget = min(whole, self._n_ubatch - self._n_waited) if running.decoding else whole
        n_rows = self._n_score_rows
        n_before, begin_prompts, brings_first = len(plan.scheduled), len(plan.tokens), False
        for request in running.prefilling:
            if budget <= 0:
                return
            if request.batch_plan is not None and request.batch_plan.in_flight:
                continue
            first, n_left = request.n_past, request.n_left
            if brings_first and len(plan.tokens) - begin_prompts >= self._prefill_cutoff:
                return  # somebody waits for this step's token, and need not wait for more
            has_more = (
                len(plan.scheduled) > n_before or self._n_waited > 0
            )  # or what decodes has waited for others
            if budget < n_left <= whole and has_more and request.max_tokens != 0:
                return  # the next step has room for all of it; in parts it would take a pass over the weights more
            n = min(n_left, budget)
            scored = range(0)
            if request.logprob_targets is not None:
                n, scored = _scored(request, n, n_rows)
                if n <= 0:
                    continue
            budget -= n
            n_rows -= len(scored)
            begin = len(plan.tokens)
            plan.tokens += request.tokens[first : first + n]
            plan.positions += range(first, first + n)
            plan.seq_ids += [request.slot] * n
            plan.outputs += [0] * n
            plan.scheduled.append((request, n))
            if scored:
                entries = range(begin + scored.start - first, begin + scored.stop - first)
                plan.outputs[entries.start : entries.stop] = [1] * len(scored)
                plan.scored.append((request, scored.start, entries))
            if n == n_left and request.max_tokens:
                plan.outputs[-1] = 1
                plan.rows.append(len(plan.tokens) - 1)
                plan.requests.append(request)
                brings_first = brings_first or request.is_streaming
                if request.prompt_group is not None and len(request.tokens) == request.n_prompt:
                    _add_waiters(plan, request.prompt_group)


def _add_waiters(plan: BatchPlan, group: PromptGroup) -> None:
    """The others' first tokens are drawn from the row of the prompt, before they have a slot."""
    for request in group.waiting:
        if len(request.tokens) == request.n_prompt:
            plan.rows.append(plan.rows[-1])
            plan.requests.append(request)
            request.batch_plan = plan


def _scored(request: Request, n: int, n_rows: int) -> tuple[int, range]:
    """How many tokens are fed, of ``n``, if they may have so many outputs; and whose rows are wanted."""
    first, targets = request.n_past, request.logprob_targets
    begin = max(first, targets.wanted_from)
    end = min(first + n, targets.wanted_to)
    if end <= begin:
        return n, range(0)
    if end - begin > n_rows:
        end = begin + n_rows
        n = end - first
    return n, range(begin, end)
