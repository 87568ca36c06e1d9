"""Rank 0's decoder and graphs as the rest of the engine sees them: whatever is asked of them, all ranks do."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.device.decode_graphs import Key, StepGraphs
from quantkit.runtime.device.device_rows import Places
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder
from quantkit.runtime.parallel.channel import Kind
from quantkit.runtime.parallel.coordinator import Lead
from quantkit.runtime.parallel.pipeline import Links
from quantkit.runtime.parallel.step_message import batch_to_lists


class LeadDecoder(Decoder):
    """For what is computed beside the scheduler's steps: scores, prompts' log-probabilities, guesses of heads."""

    def __init__(self, own: Decoder, lead: Lead, links: Links) -> None:
        self.config = own.config
        self.weights = own.weights
        self._own = own
        self._lead = lead
        self._links = links

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KvCache, received: Tensor | None = None) -> Tensor:
        with self._lead.guarded():
            self._lead.send(Kind.BATCH, batch_to_lists(batch))
            hidden = self._own.hidden_states(batch, cache)
            if self._links.ranks.pipeline == 1:
                return hidden
            rows = self._links.expect(len(batch.ids))
            self._links.send_on(hidden)
            return rows.wait()

    @torch.inference_mode()
    def embeddings(self, ids: Tensor, scale: float | None = None) -> Tensor:
        with self._lead.guarded():
            if self._links.ranks.tensor > 1:
                self._lead.send(Kind.EMBED, [[len(ids)]], first_stage=True)
                ids = self._links.group.broadcast(ids.contiguous())
            return self._own.embeddings(ids, scale)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        with self._lead.guarded():
            if self._links.ranks.tensor > 1:
                self._lead.send(Kind.LOGITS, [[len(hidden)]], first_stage=True)
                hidden = self._links.group.broadcast(hidden.contiguous())
            return self._own.logits(hidden)


class LeadGraphs(StepGraphs):
    """A graph holds sums over all ranks, so all make it at the same time."""

    def __init__(self, decoder: Decoder, cache: KvCache, places: Places, lead: Lead) -> None:
        super().__init__(decoder, cache, places)
        self._lead = lead

    def capture(self, key: Key) -> None:
        """Within a step the others make it by themselves, and find it there when this comes."""
        if key not in self._graphs:
            with self._lead.guarded():
                self._lead.send(Kind.CAPTURE, [[key.sequences, key.new, int(key.tree)]])
                super().capture(key)
