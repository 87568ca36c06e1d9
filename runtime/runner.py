"""Runs steps on the device. Nothing here waits for the device but `collect`.

A sequence has a place on the device while it runs: a row of the page table and the last token sampled for it. The next
step reads that token there, so it can be launched before the host has seen it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.runtime.graphs import DecodeGraphs
from quantkit.runtime.model import Batch, Decoder, KvCache
from quantkit.runtime.places import Places
from quantkit.runtime.prompt_logprobs import PromptLogprobs, prompt_logprobs
from quantkit.runtime.sampler import Sampler, Samples
from quantkit.runtime.step_inputs import InputMaker, StepInputs
from quantkit.runtime.step_plan import Share, StepPlan


@dataclass(frozen=True)
class Launched:
    """A step on its way. Tensors are on the host and filled when `done` has happened."""

    plan: StepPlan
    sampling: list[Share]
    samples: Samples
    prompts: dict[int, PromptLogprobs]  # sequence id -> log-probabilities of the prompt tokens in this step
    done: torch.cuda.Event | None


@dataclass(frozen=True)
class Sampled:
    """A token that came back."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came back for one sequence: the tokens of its draft that were right, and the one that follows."""

    share: Share
    tokens: list[Sampled]

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


class Runner:
    """Owns the cache and the places on the device."""

    def __init__(self, decoder: Decoder, cache: KvCache, sampler: Sampler, places: Places, graphs: bool) -> None:
        self.decoder = decoder
        self.cache = cache
        self._sampler = sampler
        self._places = places
        self._maker = InputMaker(places.count, places.page_table.shape[1], cache.page_size)
        self._graphs = DecodeGraphs(decoder, cache, places) if graphs else None

    @property
    def device(self) -> torch.device:
        return self.cache.pages.device

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Captures graphs before the first request asks for them."""
        if self._graphs is not None:
            for size in sizes:
                self._graphs.capture(size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queues one step."""
        self.move_pages(plan)
        inputs = self._maker.make(plan)
        sampling = [share for share in plan.shares if share.samples]
        prompts: dict[int, PromptLogprobs] = {}
        if self._graphs is not None and plan.decodes_only and self._graphs.takes(len(plan.shares)):
            self._places.update_table(inputs)
            hidden, row_places, positions = self._graphs.run(inputs)
        else:
            batch, rows, row_places = self._send(inputs)
            every = self.decoder.hidden_states(batch, self.cache)
            hidden, positions = every[rows], batch.positions[rows]
            prompts = prompt_logprobs(self.decoder, every, plan, inputs.starts)
        if not sampling:
            return self._bring_back(plan, sampling, Samples(row_places), prompts)
        logits = self.decoder.logits(hidden)
        owners = [share.sequence for share in sampling for _ in range(len(share.draft) + 1)]
        samples = self._sampler(logits, owners, row_places, positions)
        self._places.last_token[row_places] = samples.tokens
        return self._bring_back(plan, sampling, samples, prompts)

    def collect(self, launched: Launched) -> list[Outcome]:
        """Waits for a step. A draft holds as far as it is what was sampled behind the tokens before."""
        if launched.done is not None:
            launched.done.synchronize()
        tokens = launched.samples.tokens.tolist()
        describe = _describer(launched.samples)
        found, row = [], 0
        for share in launched.sampling:
            right = 0
            while right < len(share.draft) and tokens[row + right] == share.draft[right]:
                right += 1
            rows = range(row, row + right + 1)
            wanted = share.sequence.params.logprobs
            found.append(Outcome(share, [Sampled(tokens[at], *describe(at, wanted)) for at in rows]))
            row += len(share.draft) + 1
        return found

    def _send(self, inputs: StepInputs) -> tuple[Batch, Tensor, Tensor]:
        """One copy to the device, then views of it."""
        tensors = self._places.send(inputs)
        self._places.apply_table(tensors.table_index, tensors.table_pages)
        ids = torch.where(tensors.ids < 0, self._places.last_token[tensors.token_places], tensors.ids)
        width = max(-(-max(inputs.contexts) // self.cache.page_size), 1)
        batch = Batch(
            ids=ids,
            positions=tensors.positions,
            slots=tensors.slots,
            page_table=self._places.page_table[tensors.places, :width],
            context_lengths=tensors.contexts.int(),
            query_starts=tensors.starts.int(),
            max_queries=inputs.max_queries,
        )
        return batch, tensors.rows, tensors.row_places

    @torch.inference_mode()
    def move_pages(self, plan: StepPlan) -> None:
        """Out to the host, back from the host, copies: in this order, because pages change hands."""
        pages = self.cache.pages
        for sequence, taken in plan.swap_out:
            assert sequence.swapped is not None
            contents = pages[:, :, torch.tensor(taken, device=self.device)]
            sequence.swapped.contents = _to_host(contents)
        for sequence, given in plan.swap_in:
            assert sequence.swapped is not None
            assert sequence.swapped.contents is not None
            kept = sequence.swapped.contents[:, :, : len(given)]  # pages of a draft that was wrong stay behind
            pages[:, :, torch.tensor(given, device=self.device)] = kept.to(self.device, non_blocking=True)
            sequence.swapped = None
        if plan.copies:
            source, target = (torch.tensor(side, device=self.device) for side in zip(*plan.copies, strict=True))
            pages[:, :, target] = pages[:, :, source]

    def _bring_back(
        self, plan: StepPlan, sampling: list[Share], samples: Samples, prompts: dict[int, PromptLogprobs]
    ) -> Launched:
        if self.device.type != "cuda":
            return Launched(plan, sampling, samples, prompts, None)
        parts = (samples.tokens, samples.logprobs, samples.top, samples.top_logprobs)
        host = Samples(*(None if part is None else _to_host(part) for part in parts))  # type: ignore[arg-type]
        done = torch.cuda.Event()
        done.record()
        return Launched(plan, sampling, host, prompts, done)


_Described = tuple[float, list[tuple[int, float]]] | tuple[()]


def _describer(samples: Samples) -> Callable[[int, int | None], _Described]:
    """Log-probabilities of a row, where they were computed and so many are wanted."""
    if samples.logprobs is None or samples.top is None or samples.top_logprobs is None:
        return lambda row, wanted: ()
    top, values, chosen = samples.top.tolist(), samples.top_logprobs.tolist(), samples.logprobs.tolist()

    def describe(row: int, wanted: int | None) -> _Described:
        if wanted is None:
            return ()
        return chosen[row], list(zip(top[row][:wanted], values[row][:wanted], strict=True))

    return describe


def _to_host(tensor: Tensor) -> Tensor:
    """Into pinned memory, without waiting."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
