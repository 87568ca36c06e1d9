"""Runs steps on the device. Nothing here waits for the device but `collect`.

A sequence has a place on the device while it runs: a row of the page table and the last token sampled for it. The next
step reads that token there, so it can be launched before the host has seen it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.runtime.graphs import Answered, Key, StepGraphs
from quantkit.runtime.model import Batch, Decoder, KvCache
from quantkit.runtime.places import Places
from quantkit.runtime.prompt_logprobs import PromptLogprobs, prompt_logprobs
from quantkit.runtime.rejection import Proposed
from quantkit.runtime.sampler import Sampler, Samples
from quantkit.runtime.speculation.compact import keep_path
from quantkit.runtime.step_inputs import InputMaker, StepInputs, TableChanges
from quantkit.runtime.step_plan import Share, StepPlan


@dataclass(frozen=True)
class Launched:
    """A step on its way. Tensors are on the host and filled when `done` has happened."""

    plan: StepPlan
    sampling: list[Share]
    samples: Samples
    verified: Tensor | None  # the tokens of the rows behind which a token was sampled, where guesses are among them
    prompts: dict[int, PromptLogprobs]  # sequence id -> log-probabilities of the prompt tokens in this step
    done: torch.cuda.Event | None
    hidden: Tensor | None = None  # of the rows behind which a token was sampled, on the device, where kept


@dataclass(frozen=True)
class Sampled:
    """A token that came back."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came back for one sequence: the tokens of its draft that were right, and the one that follows. `path` has
    the numbers of these guesses."""

    share: Share
    tokens: list[Sampled]
    path: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


def is_right(sampled: int, guessed: int) -> bool:
    return sampled == guessed


class Runner:
    """Owns the cache and the places on the device."""

    def __init__(self, decoder: Decoder, cache: KvCache, sampler: Sampler, places: Places, graphs: bool) -> None:
        self.decoder = decoder
        self.cache = cache
        self.places = places
        self._sampler = sampler
        self._changes = TableChanges(places.count, places.page_table.shape[1])
        self._maker = InputMaker(cache.page_size)
        self.graphs = StepGraphs(decoder, cache, places) if graphs else None
        self.keeps_hidden = False

    @property
    def device(self) -> torch.device:
        return self.cache.pages.device

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Captures graphs before the first request asks for them."""
        if self.graphs is not None:
            for size in sizes:
                self.graphs.capture(Key(size, 1))

    def prepare(self, plan: StepPlan) -> None:
        """Pages are moved, and the device knows who has which; then whoever guesses may do so."""
        if not plan.answers_only:
            plan.straighten()
        self._move_pages(plan)
        self.places.update_table(*self._changes.of(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queues one step that was prepared."""
        inputs = self._maker.make(plan)
        sampling = [share for share in plan.shares if share.samples]
        prompts: dict[int, PromptLogprobs] = {}
        if self._has_graph(plan, inputs):
            assert self.graphs is not None
            rows = self.graphs.run(inputs)
        else:
            batch, at, places = self._send(inputs)
            every = self.decoder.hidden_states(batch, self.cache)
            rows = Answered(every[at], batch.ids[at], places, batch.positions[at])
            prompts = prompt_logprobs(self.decoder, every, plan, inputs.starts)
        if not sampling:
            return self._bring_back(plan, sampling, Samples(rows.places), None, prompts)
        owners = [share.sequence for share in sampling for _ in range(len(share.draft) + 1)]
        shaped = any(one.guide is not None or one.params.shapes_logits for one in owners)
        guesses = [before for share in sampling for before in share.guesses_before_rows()] if shaped else None
        proposed = _proposed(plan, sampling, rows.ids) if plan.proposals else None
        logits = self.decoder.logits(rows.hidden)
        samples = self._sampler(logits, owners, rows.places, rows.positions, guesses, proposed)
        self.places.tokens[rows.places, 0] = samples.tokens
        verified = rows.ids if any(share.draft for share in sampling) else None
        launched = self._bring_back(plan, sampling, samples, verified, prompts)
        return replace(launched, hidden=rows.hidden.clone()) if self.keeps_hidden else launched

    def _has_graph(self, plan: StepPlan, inputs: StepInputs) -> bool:
        if self.graphs is None or not plan.answers_only:
            return False
        return self.graphs.takes(len(plan.shares), inputs.max_queries, plan.has_trees)

    def collect(self, launched: Launched, accepts: Callable[[int, int], bool] = is_right) -> list[Outcome]:
        """Waits for a step. A draft holds as far as it is what was sampled behind the tokens before."""
        if launched.done is not None:
            launched.done.synchronize()
        tokens = launched.samples.tokens.tolist()
        verified = [] if launched.verified is None else launched.verified.tolist()
        describe = _describer(launched.samples)
        found, row = [], 0
        for share in launched.sampling:
            path = _accepted(share, row, tokens, verified, accepts)
            rows = [row, *(row + 1 + node for node in path)]
            wanted = share.sequence.params.logprobs
            sampled = [Sampled(tokens[at], *describe(at, wanted)) for at in rows]
            found.append(Outcome(share, sampled, tuple(path)))
            row += len(share.draft) + 1
        return found

    def keep_paths(self, outcomes: list[Outcome]) -> None:
        """Keys and values of guesses that were right, from where a tree had them to where the next step looks."""
        sources: list[int] = []
        targets: list[int] = []
        size = self.cache.page_size
        for outcome in outcomes:
            share, pages = outcome.share, outcome.share.sequence.pages
            first = share.start + share.count - len(share.draft)
            for ahead, node in enumerate(outcome.path):
                if node != ahead and pages:
                    sources.append(pages[(first + node) // size] * size + (first + node) % size)
                    targets.append(pages[(first + ahead) // size] * size + (first + ahead) % size)
        if sources:
            both = self.places.to_device(sources + targets)
            keep_path(self.cache.pages, *both.chunk(2))

    def _send(self, inputs: StepInputs) -> tuple[Batch, Tensor, Tensor]:
        """One copy to the device, then views of it."""
        tensors = self.places.send(inputs)
        ids = self.places.resolve(tensors.ids, tensors.token_places)
        width = max(-(-max(inputs.contexts) // self.cache.page_size), 1)
        batch = Batch(
            ids=ids,
            positions=tensors.positions,
            slots=tensors.slots,
            page_table=self.places.page_table[tensors.places, :width],
            context_lengths=tensors.contexts.int(),
            query_starts=tensors.starts.int(),
            max_queries=inputs.max_queries,
            ancestors=tensors.ancestors if inputs.ancestors else None,
        )
        return batch, tensors.rows, tensors.row_places

    @torch.inference_mode()
    def _move_pages(self, plan: StepPlan) -> None:
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
        self,
        plan: StepPlan,
        sampling: list[Share],
        samples: Samples,
        verified: Tensor | None,
        prompts: dict[int, PromptLogprobs],
    ) -> Launched:
        if self.device.type != "cuda":
            return Launched(plan, sampling, samples, verified, prompts, None)
        parts = (samples.tokens, samples.logprobs, samples.top, samples.top_logprobs, verified)
        *host, ids = (None if part is None else _to_host(part) for part in parts)
        done = torch.cuda.Event()
        done.record()
        return Launched(plan, sampling, Samples(*host), ids, prompts, done)  # type: ignore[arg-type]


def _accepted(
    share: Share, row: int, tokens: list[int], verified: list[int], accepts: Callable[[int, int], bool]
) -> list[int]:
    """The way through the guesses that the sampled tokens take: numbers of guesses.

    The share's last known token has this row, and each of its guesses one behind it.
    """
    path: list[int] = []
    node = -1
    if not share.parents:
        while node + 1 < len(share.draft) and accepts(tokens[row + node + 1], verified[row + node + 2]):
            node += 1
            path.append(node)
        return path
    while True:
        children = (child for child, parent in enumerate(share.parents) if parent == node)
        token = tokens[row + node + 1]
        following = next((child for child in children if accepts(token, verified[row + 1 + child])), None)
        if following is None:
            return path
        path.append(node := following)


def _proposed(plan: StepPlan, sampling: list[Share], ids: Tensor) -> Proposed | None:
    """The guesses that were drawn from a distribution. Those of a share are verified by the rows before each."""
    rows: list[int] = []
    logits: list[Tensor] = []
    row = 0
    for share in sampling:
        if share.draft and share.sequence.id in plan.proposals:
            rows += range(row, row + len(share.draft))
            logits.append(plan.proposals[share.sequence.id][: len(share.draft)])
        row += len(share.draft) + 1
    if not rows:
        return None
    at = torch.tensor(rows).to(ids.device, non_blocking=True)
    return Proposed(at, ids[at + 1], torch.cat(logits))


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
