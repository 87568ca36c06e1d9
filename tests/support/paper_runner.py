"""A device made of lists: in place of keys and values, every slot of a page holds a number that only this token after
exactly these tokens has. So a page that is shared wrongly, reused too early, copied too late or not at all shows as
soon as it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from types import SimpleNamespace
from typing import Any

from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import FROM_ROW, Scheduled, StepPlan
from quantkit.runtime.core.step_result import Outcome, PromptLogprobs, Sampled
from quantkit.runtime.device.step_inputs import InputMaker, TableChanges

END = 2
VOCAB = 3


def chained(tokens: list[int]) -> list[int]:
    """For every token a number that depends on it and on all in front of it, as keys and values do."""
    found: list[int] = []
    for token in tokens:
        found.append(hash((found[-1] if found else 0, token)))
    return found


def numbered(work: Scheduled) -> PromptLogprobs:
    """In place of log-probabilities, the positions that they are for."""
    positions = range(work.start + 1, min(work.start + work.num_tokens + 1, len(work.sequence.prompt)))
    return PromptLogprobs(work.start + 1, [float(at) for at in positions], [[] for _ in positions])


def drawn(seed: int, position: int) -> int:
    """The token at a position: as from a model, nobody else knows it before."""
    return Random(seed * 1009 + position).choices((0, 1, END), (9, 9, 1))[0]


class Guesser:
    """Drafts that are right half of the time, and as long as asked for or shorter."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        random = Random(len(sequence.tokens) * 31 + sequence.seed)
        right = [drawn(sequence.seed, len(sequence.tokens) + ahead) for ahead in range(random.randint(0, most))]
        return [token if random.random() < 0.7 else random.randrange(VOCAB) for token in right]

    def observe(self, launched: Any, outcomes: list[Outcome], ended: Collection[int]) -> None:
        pass

    def follow(self, launched: Any) -> None:
        pass


class PaperRunner:
    """Does what `Runner` documents, with lists. A step is done when it is launched; the host asks for it later."""

    device = "cpu"

    def __init__(self, pages: int, page_size: int, rows: int, width: int) -> None:
        self.size = page_size
        self.pages = [[0] * page_size for _ in range(pages)]
        self.table = [[PADDING_PAGE] * width for _ in range(rows)]
        self.last_token = [END] * rows
        self.truth: dict[int, list[int]] = {}  # by sequence: its tokens, those that the host has not seen included
        self.host: dict[int, list[list[int]]] = {}  # by sequence: pages that were swapped out
        self.guessed: dict[int, tuple[int, int]] = {}  # by sequence, until the host asks: guesses right and wrong
        self._changes = TableChanges(rows, width)
        self._maker = InputMaker(page_size)
        self._width = width

    def prepare(self, plan: StepPlan) -> None:
        self.move_pages(plan)
        for index, page in zip(*self._changes.of(plan), strict=True):
            row, column = divmod(index, self._width)
            self.table[row][column] = page

    def launch(self, plan: StepPlan) -> Any:
        inputs = self._maker.make(plan)
        for number, work in enumerate(plan.scheduled):
            first, last = inputs.starts[number : number + 2]
            self._write(work, inputs.ids[first:last], inputs.positions[first:last], inputs.kv_slots[first:last])
        for work, row, context in zip(plan.scheduled, inputs.rows, inputs.contexts, strict=True):
            self.check_contents(work.sequence, self.table[row], context, work.draft)
        samples = []
        for work in plan.scheduled:
            if work.samples:
                samples.append(Outcome(work, self._verify(work)))
                self.last_token[work.sequence.row] = samples[-1].tokens[-1].token
                right = samples[-1].num_accepted
                self.guessed[work.sequence.id] = right, len(work.draft) - right
        asked = [work for work in plan.scheduled if work.sequence.needs_all_logits]
        prompts = {work.sequence.id: numbered(work) for work in asked}
        return SimpleNamespace(plan=plan, launched=SimpleNamespace(plan=plan, samples=samples, prompts=prompts))

    def arrived(self, flight: Any) -> Any:
        return flight.launched

    def collect(self, launched: Any) -> list[Outcome]:
        for outcome in launched.samples:
            self.guessed.pop(outcome.scheduled.sequence.id, None)
        return list(launched.samples)

    def check_contents(self, sequence: Sequence, pages: list[int], context: int, draft: tuple[int, ...] = ()) -> None:
        read = [self.pages[pages[at // self.size]][at % self.size] for at in range(context)]
        truth = [*self.truth[sequence.id], *draft]
        assert read == chained(truth[:context]), f"sequence {sequence.id} reads what is not its own"

    def _write(self, work: Scheduled, ids: list[int], positions: list[int], kv_slots: list[int]) -> None:
        sequence = work.sequence
        tokens = [*self.truth.setdefault(sequence.id, list(sequence.prompt)), *work.draft]
        values = chained(tokens)
        for token, position, kv_slot in zip(ids, positions, kv_slots, strict=True):
            sent = self.last_token[sequence.row] if token == FROM_ROW else token
            assert sent == tokens[position], f"sequence {sequence.id} computes another token at {position}"
            page, inside = divmod(kv_slot, self.size)
            assert page != PADDING_PAGE
            self.pages[page][inside] = values[position]

    def _verify(self, work: Scheduled) -> list[Sampled]:
        """A token behind each guess, as far as guesses are right."""
        tokens = self.truth[work.sequence.id]
        found = []
        for guess in (*work.draft, None):
            found.append(Sampled(drawn(work.sequence.seed, len(tokens))))
            tokens.append(found[-1].token)
            if found[-1].token != guess:
                break
        return found

    def move_pages(self, plan: StepPlan) -> None:
        """In the order that `StepPlan` documents; copies read all before they write, as one kernel does."""
        for sequence, taken in plan.swap_out:
            self.host[sequence.id] = [list(self.pages[page]) for page in taken]
        for sequence, given in plan.swap_in:
            assert sequence.id in self.host, f"sequence {sequence.id} comes back, but was never brought to the host"
            kept = self.host.pop(sequence.id)[: len(given)]  # pages of a draft that was wrong stay behind
            for page, contents in zip(given, kept, strict=True):
                self.pages[page] = contents
        copied = [(target, list(self.pages[source])) for source, target in plan.copies]
        for target, contents in copied:
            self.pages[target] = contents
