"""Prefix routing inside Ray Serve: its handles ask this class which replica gets a request."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quantkit.deploy.forwarding import Forwarded
from quantkit.deploy.prefixes import PrefixTable, preferred


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray has no types
    """Lives in every front, one for each model. Full replicas are passed over by Serve itself, in our order."""

    def initialize_state(self, margin: float = 8.0) -> None:
        self._margin = margin
        self._table = PrefixTable()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: float(cache.get(replica.replica_id) or 0) for name, replica in known.items()}
        request = _forwarded(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Serve would ask again without a pause
        prefix, avoid = ((), ()) if request is None else (request.prefix, request.avoid)
        return [[known[name]] for name in preferred(self._table, prefix, loads, self._margin, avoid)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request = _forwarded(pending_request)
        if request is not None:
            self._table.record(request.prefix, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep_only(replica.replica_id.unique_id for replica in replicas)


def _forwarded(pending: PendingRequest | None) -> Forwarded | None:
    """The request of a client; None for other calls, such as those for metrics."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Forwarded) else None
