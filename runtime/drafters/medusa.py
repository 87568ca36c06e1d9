"""Medusa heads guess: small layers on the model's last hidden state, one for each token ahead (`quantkit/medusa/`).

The best few tokens of every head make a tree, whose nodes one step verifies at once. The hidden state that a sequence's
next guesses start from is the one that its last known token was sampled from; every step leaves it in the sequence's
row.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from quantkit.runtime.core.sequence import Sequence, Status
from quantkit.runtime.core.step_plan import StepPlan, guess_in_row
from quantkit.runtime.core.step_result import Launched, Outcome
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.drafters.medusa_heads import MedusaHeads
from quantkit.runtime.drafters.published_heads import PublishedHeads
from quantkit.runtime.model.decoder import AnyDecoder


class MedusaDrafter:
    def __init__(
        self, heads: MedusaHeads | PublishedHeads, decoder: AnyDecoder, device_rows: DeviceRows, most: int
    ) -> None:
        """The first `most` nodes of the heads' tree; it is a chain where the model's attention has windows."""
        self._heads = heads
        self._decoder = decoder
        self._device_rows = device_rows
        nodes = heads.tree.nodes[:most]
        branches = all(window is None for window in decoder.config.windows)
        self.tree: tuple[int, ...] = tuple(heads.tree.parents[: len(nodes)]) if branches else ()
        self._nodes = torch.tensor([(node.head, node.rank) for node in nodes], device=device_rows.device)
        self._ranks = 1 + max(node.rank for node in nodes)
        self._hidden = torch.zeros(
            device_rows.num_rows + 1,
            decoder.config.hidden,
            dtype=decoder.weights.dtype,
            device=device_rows.device,
        )
        # sequence -> its row, its stay and its length when its hidden state was left
        self._known: dict[int, tuple[int, int, int]] = {}

    @property
    def most(self) -> int:
        return len(self._nodes) if self.tree else self._heads.count

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Room for so many; `complete` fills it."""
        if self._known.get(sequence.id) != (sequence.row, sequence.num_preemptions, len(sequence.tokens)):
            return []
        return [guess_in_row(number) for number in range(min(most, self.most))]

    @torch.inference_mode()
    def complete(self, plan: StepPlan) -> StepPlan:
        drafted = [work for work in plan.scheduled if work.draft]
        if not drafted:
            return plan
        lasts = [work.sequence.tokens[work.start + work.num_tokens - len(work.draft) - 1] for work in drafted]
        rows, tokens = self._device_rows.to_device([*(work.sequence.row for work in drafted), *lasts]).chunk(2)
        best = self._heads.best_tokens(self._hidden[rows], tokens, self._decoder, self._ranks)
        trees = plan.has_trees
        guesses = self._tree(best) if trees else self._chain(best)
        self._device_rows.tokens[rows, 1 : 1 + guesses.shape[1]] = guesses
        if any(work.sequence.guide is not None or work.sequence.params.shapes_logits for work in drafted):
            found = {}
            for work, tokens_ahead in zip(drafted, guesses.tolist(), strict=True):
                padded = tokens_ahead + [0] * len(work.draft)
                found[work.sequence.id] = tuple(padded[: len(work.draft)])
            return plan.with_guesses(found, {})
        return plan

    def _tree(self, best: Tensor) -> Tensor:
        return best[self._nodes[:, 0], :, self._nodes[:, 1]].T

    def _chain(self, best: Tensor) -> Tensor:
        """What each head likes most, as far as there are heads; guesses behind them are whatever was there."""
        return best[:, :, 0].T

    @torch.inference_mode()
    def observe(self, launched: Launched, outcomes: list[Outcome], ended: Collection[int]) -> None:
        """Keeps the hidden states that the last tokens were sampled from."""
        assert launched.hidden is not None
        logits_rows: list[int] = []
        rows: list[int] = []
        for outcome in outcomes:
            sequence = outcome.scheduled.sequence
            if sequence.status is Status.RUNNING:
                logits_rows.append(outcome.logits_row + (1 + outcome.path[-1] if outcome.path else 0))
                rows.append(sequence.row)
                length = len(sequence.tokens) + len(outcome.tokens)
                self._known[sequence.id] = sequence.row, sequence.num_preemptions, length
        if logits_rows:
            both = self._device_rows.to_device(logits_rows + rows)
            at, where = both.chunk(2)
            self._hidden[where] = launched.hidden[at]
        for number in ended:
            self._known.pop(number, None)
