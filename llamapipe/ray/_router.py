"""Defines ``PrefixCostRouter``, which chooses the replica that has the least work until a request is done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llamapipe.arguments import check_int
from llamapipe.llama.adapter import check_adapter_name
from llamapipe.ray._costs import AdapterNames, PrefixCosts, chunks_of, prompt_and_owner


class PrefixCostRouter(RequestRouter):  # type: ignore[misc]
    """A request router of Ray Serve that takes the replica with the lowest cost.

    The cost is the part of the prompt that a replica has not computed, plus its pending work. So requests that begin
    alike go to one replica until waiting there costs more than computing the prefix again on another one. The router
    assumes that a replica has the prefixes that were routed to it with the same adapters and ``cache_salt``.

    ``deployment`` uses this router; for your own deployment, pass the class in ``RequestRouterConfig``.
    ``request_router_kwargs``: ``n_remembered_bytes``, ``request_bytes``; see ``llamapipe.ray._costs.PrefixCosts``.
    ``adapters``, ``activated``: names that requests over HTTP use as models; see ``llamapipe.ray._costs.AdapterNames``.
    """

    _costs: PrefixCosts[ReplicaID]
    _adapters: AdapterNames

    def initialize_state(
        self,
        n_remembered_bytes: int = 2**18,
        request_bytes: int = 1024,
        adapters: Sequence[str] = (),
        activated: Sequence[str] = (),
    ) -> None:
        """Take the options; Ray Serve calls this before the first request. Raises TypeError and ValueError."""
        for option, names in (("adapters", adapters), ("activated", activated)):
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise TypeError(f"{option} must be a list of names, not {type(names).__name__}")
        self._adapters = AdapterNames(
            [check_adapter_name(name) for name in adapters],
            frozenset(check_adapter_name(name) for name in activated),
        )
        self._costs = PrefixCosts(
            check_int("n_remembered_bytes", n_remembered_bytes, 1, 2**40),
            check_int("request_bytes", request_bytes, 0, 2**40),
        )

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the cheapest first, each in a separate rank."""
        prompt = owner = b""
        if pending_request is not None:
            prompt, owner = prompt_and_owner(pending_request.args, pending_request.kwargs, self._adapters)
        chunks = chunks_of(prompt, owner)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        n_queued = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        ranked = self._costs.rank(by_id, len(prompt), chunks, n_queued)
        if pending_request is not None and ranked:
            # Recorded now: the costs of concurrent requests must include each other.
            self._costs.route(pending_request.metadata.internal_request_id, ranked[0], len(prompt), chunks)
            pending_request.future.add_done_callback(partial(self._finish_if_cancelled, pending_request))
            # If no replica can take the request now, all replicas are tried again a little later.
            pending_request.routing_context.should_backoff = True
        return [[by_id[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica got the request."""
        self._costs.record_accepted(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that the replica has finished a request or failed."""
        self._costs.finish(internal_request_id, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone."""
        super().update_replicas(replicas)
        self._costs.keep(replica.replica_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that died."""
        super().on_replica_actor_died(replica_id)
        self._costs.keep(name for name in self.curr_replicas if name != replica_id)

    def _finish_if_cancelled(self, pending_request: PendingRequest, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._costs.finish(pending_request.metadata.internal_request_id)
