"""Puts together what a step feeds: tokens that decode, then prompts. Pure policy.

Those that decode come first, then prompts in the order of arrival up to the token budget, cut into chunks: while
streams are decoding a step takes at most ``n_ubatch`` tokens, so that a long prompt does not hold them up. On a CPU,
where streams' prompts wait behind each other, a step ends early with one of them, so that its first token need not wait
for more. With KV by sequence what decodes waits there for steps of prompts that begin with a stream's and fit into a
ubatch, and for at most ``n_ubatch`` tokens of them.
"""

from __future__ import annotations

from llamapipe.engine.scheduler.batch_plan import Remove, StepPlan
from llamapipe.engine.scheduler.prompt_group import Family
from llamapipe.engine.scheduler.request import UNLIMITED, Request
from llamapipe.engine.scheduler.running import Running


class Planner:
    """Fills batches of up to ``n_batch`` tokens.

    ``filler``: a token to fill gaps between decoding sequences with, None when gaps cost nothing (unified KV).
    ``n_score_rows``: most rows in a step that score a request's own tokens. ``n_enough``: a step that brings a stream's
    first token gets no further prompt once it has this many tokens of prompts; None where fewer take as long.

    ``depth``: how many steps of scores may be under way at once; if several, each has at most ``n_ubatch`` tokens.
    ``cohorts``: how many parts decoding requests are split into, each a step of its own, so that one can be computed
    while another is sampled.
    """

    def __init__(
        self, n_batch: int, n_ubatch: int, filler: int | None, n_score_rows: int, n_enough: int | None = None
    ) -> None:
        self._n_batch = n_batch
        self._n_ubatch = n_ubatch
        self._n_enough = UNLIMITED if n_enough is None else n_enough
        self._n_waited = 0  # tokens of prompts for which those that decode have waited,
        self._n_last = 0  # and how many of them were in the last step
        self._filler = filler
        self._n_score_rows = n_score_rows
        self.depth = 1
        self.cohorts = 1

    def plan(self, running: Running) -> StepPlan:
        """The next step of what is in no step under way; without tokens if there is nothing."""
        plan = StepPlan()
        waits = bool(running.decoding) and self._decoding_waits(running)
        if running.decoding and not waits:
            self._decode(plan, running)
        if running.prefilling:
            self._prefill(plan, running)
        self._n_last = len(plan.tokens) if waits else 0
        self._n_waited = self._n_waited + self._n_last if waits else 0
        for request, _ in plan.fed:
            request.flight = plan
        return plan

    def _decoding_waits(self, running: Running) -> bool:
        """Whether the next step is one of prompts alone, a stream's first: what decodes would take a pass of its own.

        The order of the two passes makes little difference for those that decode, but much for prompts' first tokens.
        """
        if self._n_enough == UNLIMITED or self._filler is None or self.cohorts > 1:
            # With unified KV, where there is no filler, it shares the prompts' pass over the weights: waiting saves
            # nothing. A cohort would wait for the other one's prompts, too.
            return False
        n_step = n_next = 0
        for request in running.prefilling:
            if request.flight is not None and request.flight.flying:
                continue
            n_left = request.n_left
            if n_step == 0 and not request.streams:
                return False
            if n_step >= self._n_enough:
                n_next = n_left if n_left <= self._n_ubatch else self._n_enough
                break
            n_step += n_left
        if n_step == 0:
            return False
        # Not twice in a row for a few tokens: each step is a pass, and prompts may go on coming one by one.
        if n_step < self._n_enough and 0 < self._n_last < self._n_enough:
            return False
        # The first of those behind this step still has to fit into the ubatch that what decodes waits for.
        return self._n_waited + n_step + n_next <= self._n_ubatch

    def _decode(self, plan: StepPlan, running: Running) -> None:
        decoding, n_flying = running.decoding, 0
        if self.cohorts > 1:
            free = [r for r in decoding if r.flight is None or not r.flight.flying]
            n_flying = len(decoding) - len(free)
            # Halves by slot, so that no gap has to be filled: the lower one first.
            decoding = free[: -(-len(decoding) // self.cohorts)]
            if not decoding:
                return
        n = plan.n_decode = len(decoding)
        plan.tokens = [r.tokens[-1] for r in decoding]
        plan.positions = [r.n_past for r in decoding]
        plan.seq_ids = [r.slot for r in decoding]
        plan.outputs = [1] * n
        plan.rows = list(range(n))
        plan.requests = decoding.copy()
        plan.fed = [(r, 1) for r in decoding]
        # A gap may be a sequence of a step under way.
        if (
            self._filler is not None
            and not n_flying
            and len(decoding) == len(running.decoding)
            and plan.seq_ids[-1] - plan.seq_ids[0] >= n
        ):
            self._fill_gaps(plan, running, self._filler)

    def _fill_gaps(self, plan: StepPlan, running: Running, filler: int) -> None:
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
            plan.tokens.insert(i, filler)
            plan.positions.insert(i, position)
            plan.seq_ids.insert(i, slot)
            plan.outputs.insert(i, 0)
            plan.fillers.append(Remove(slot, position))
        plan.rows = [i for i, output in enumerate(plan.outputs) if output]

    def _prefill(self, plan: StepPlan, running: Running) -> None:
        whole = self._n_batch - len(plan.tokens)
        if running.decoding:
            whole = min(whole, max(self._n_ubatch - len(plan.tokens), 1))
        elif self.depth > 1 if running.only_scores else len(running.prefilling) > 1:
            # llama.cpp computes no more at a time. So the next step need not wait for it, nor the first prompt's token
            # for the last prompt.
            whole = min(whole, self._n_ubatch)
        budget = min(whole, self._n_ubatch - self._n_waited) if running.decoding else whole
        n_rows = self._n_score_rows
        n_before, begin_prompts, brings_first = len(plan.fed), len(plan.tokens), False
        for request in running.prefilling:
            if budget <= 0:
                return
            if request.flight is not None and request.flight.flying:
                continue
            first, n_left = request.n_past, request.n_left
            if brings_first and len(plan.tokens) - begin_prompts >= self._n_enough:
                return  # somebody waits for this step's token, and need not wait for more
            has_more = len(plan.fed) > n_before or self._n_waited > 0  # or what decodes has waited for others
            if budget < n_left <= whole and has_more and request.max_tokens != 0:
                return  # the next step has room for all of it; in parts it would take a pass over the weights more
            n = min(n_left, budget)
            scored = range(0)
            if request.scoring is not None:
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
            plan.fed.append((request, n))
            if scored:
                entries = range(begin + scored.start - first, begin + scored.stop - first)
                plan.outputs[entries.start : entries.stop] = [1] * len(scored)
                plan.scored.append((request, scored.start, entries))
            if n == n_left and request.max_tokens:
                plan.outputs[-1] = 1
                plan.rows.append(len(plan.tokens) - 1)
                plan.requests.append(request)
                brings_first = brings_first or request.streams
                if request.family is not None and len(request.tokens) == request.n_prompt:
                    _add_followers(plan, request.family)


def _add_followers(plan: StepPlan, family: Family) -> None:
    """The others' first tokens are drawn from the row of the prompt, before they have a slot."""
    for request in family.waiting:
        if len(request.tokens) == request.n_prompt:
            plan.rows.append(plan.rows[-1])
            plan.requests.append(request)
            request.flight = plan


def _scored(request: Request, n: int, n_rows: int) -> tuple[int, range]:
    """How many tokens are fed, of ``n``, if they may have so many outputs; and whose rows are wanted."""
    first, scoring = request.n_past, request.scoring
    begin = max(first, scoring.wanted_from)
    end = min(first + n, scoring.wanted_to)
    if end <= begin:
        return n, range(0)
    if end - begin > n_rows:
        end = begin + n_rows
        n = end - first
    return n, range(begin, end)
