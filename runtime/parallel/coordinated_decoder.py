"""Rank 0's decoder as the rest of the engine sees it: whatever is asked of it, all ranks do."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder
from quantkit.runtime.parallel.channel import Kind
from quantkit.runtime.parallel.coordinator import Coordinator
from quantkit.runtime.parallel.pipeline import Pipeline
from quantkit.runtime.parallel.step_message import batch_to_lists


class CoordinatedDecoder:
    """For what is computed beside the scheduler's steps: scores, prompts' log-probabilities, guesses of heads."""

    def __init__(self, own: Decoder, coordinator: Coordinator, pipeline: Pipeline) -> None:
        self.config = own.config
        self.weights = own.weights
        self._own = own
        self._coordinator = coordinator
        self._pipeline = pipeline

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KvCache) -> Tensor:
        with self._coordinator.guarded():
            self._coordinator.send(Kind.BATCH, batch_to_lists(batch))
            hidden = self._own.hidden_states(batch, cache)
            if self._pipeline.ranks.pipeline == 1:
                return hidden
            rows = self._pipeline.expect(len(batch.ids))
            self._pipeline.send_on(hidden)
            return rows.wait()

    @torch.inference_mode()
    def embeddings(self, ids: Tensor, scale: float | None = None) -> Tensor:
        with self._coordinator.guarded():
            if self._pipeline.ranks.tensor > 1:
                self._coordinator.send(Kind.EMBED, [[len(ids)]], first_stage=True)
                ids = self._pipeline.group.broadcast(ids.contiguous())
            return self._own.embeddings(ids, scale)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        with self._coordinator.guarded():
            if self._pipeline.ranks.tensor > 1:
                self._coordinator.send(Kind.LOGITS, [[len(hidden)]], first_stage=True)
                hidden = self._pipeline.group.broadcast(hidden.contiguous())
            return self._own.logits(hidden)
