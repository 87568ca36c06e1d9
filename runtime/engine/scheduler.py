"""Which tokens the next step computes: one budget of tokens, prompts in chunks beside answers that grow.

Sequences are served in the order of their rank: the time of arrival, and for every level of lower priority some seconds
later. Nobody is overtaken for longer than that, so nobody starves. Running sequences come first, then waiting ones are
admitted while budget, device rows and pages last. When a running sequence needs a page and none is free, the running
one with the highest rank gives all its pages back and waits again: its tokens are computed anew (or copied back from
host memory). The sequence with the lowest rank is never in anybody's way, so every step makes progress.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.core.pages import pages_for
from quantkit.runtime.core.sequence import FinishReason, Sequence, Status, Swapped
from quantkit.runtime.core.step_plan import MOST_GUESSES, Scheduled, StepPlan
from quantkit.runtime.engine.page_pool import PagePool
from quantkit.runtime.engine.prefix_sharing import take_prefix


@dataclass(frozen=True)
class Limits:
    """What a step may hold."""

    tokens: int  # of all sequences in one step
    sequences: int  # running at the same time
    reserve: float = 0.01  # share of the pool kept for running sequences when new ones are admitted
    swap_pages: int = 0  # of host memory; 0: preempted sequences are computed anew
    micro_batches: int = 1  # steps that go through several stages at once, each with its share of the answers


class Scheduler:
    """Owns the waiting and the running sequences and their pages."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank
        self.preemptions = 0
        self.prompt_tokens = 0  # of admitted sequences
        self.reused_tokens = 0  # of these, found in the cache
        self.swapped_pages = 0
        self._free_rows = list(range(limits.sequences))[::-1]

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        _insert(self.waiting, sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence at any moment; its pages are free at once."""
        if sequence.finished:
            return
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        self._release(sequence)
        self._drop_swapped(sequence)

    def schedule(self) -> StepPlan:
        """The next step. Everything in it counts as computed from now on."""
        plan = StepPlan([])
        budget = self.limits.tokens
        ready, running = [one for one in self.running if not one.must_wait], Status.RUNNING
        counts = [one.num_missing for one in ready]
        answering = self._answers(counts)
        for sequence, missing in zip(ready, counts, strict=True):
            if sequence.status is not running:  # it gave way to one before it
                continue
            if missing == 1:
                if answering == 0:
                    continue
                answering -= 1
                if budget > 0 and self._answer(sequence, plan):
                    budget -= 1
                    continue
            # A long prompt leaves a token for each answer behind it, but those in front always go on.
            count = min(missing, max(budget - answering, 1), budget)
            if count > 0:
                drafts = missing == 1 and sequence.draft
                draft = self._affordable_draft(sequence, budget - answering - 1) if drafts else ()
                budget -= self._extend(sequence, count, plan, draft)
        while budget > 0 and self.waiting and self._free_rows and not plan.preempted:
            taken = self._admit(self.waiting[0], budget, plan)
            if taken == 0:
                break
            budget -= taken
        return plan.without_trees() if plan.has_trees and not plan.answers_only else plan

    def publish(self, sequence: Sequence) -> None:
        """Offers full pages of known tokens to others. Call when tokens of the sequence have become known, if they fill
        a page."""
        size = self.pool.page_size
        full = min(len(sequence.tokens), sequence.num_computed) // size
        if full > sequence.num_published:
            for page in range(sequence.num_published, full):
                self.pool.publish(sequence.pages[page], sequence.digest_of(page, size))
            sequence.num_published = full

    def settle(self, work: Scheduled, accepted: int, in_order: bool = True) -> None:
        """A step's tokens have come back. So many of a draft were right: the others were never there, and their pages
        are free.

        Call before the tokens become known. A sequence that was preempted meanwhile has no pages, or keeps them on the
        host; there the right ones must stand in front (`in_order`), else everything is computed anew.
        """
        sequence, wrong, size = work.sequence, len(work.draft) - accepted, self.pool.page_size
        sequence.num_pending -= 1
        if sequence.swapped is not None:
            sequence.swapped.num_computed -= wrong
            if not in_order:
                self._drop_swapped(sequence)
        elif sequence.pages:
            sequence.num_computed -= wrong
            length = sequence.num_computed + sequence.ahead
            if len(sequence.pages) * size >= length + size:
                self._trim(sequence, length)

    def undo(self, plan: StepPlan) -> None:
        """The step failed: nobody may believe what it should have written, in the cache or in host memory."""
        for victim, _ in plan.swap_out:
            self._drop_swapped(victim)
        for work in plan.scheduled:
            self.pool.withdraw(work.sequence.pages)

    def check_integrity(self) -> None:
        """For tests: pages and device rows are held by those who run, once each."""
        living = [*self.running, *self.waiting]
        self.pool.check_integrity(sequence.pages for sequence in living)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.sequences)), "rows are lost or shared"
        assert all(not sequence.pages for sequence in self.waiting), "a waiting sequence holds pages"
        for queue in (self.running, self.waiting):
            assert [sequence.rank for sequence in queue] == sorted(sequence.rank for sequence in queue)
        for sequence in self.running:
            held, size = len(sequence.pages), self.pool.page_size
            assert sequence.num_computed <= held * size, "tokens were computed without pages"
            assert (held - 1) * size < sequence.num_computed + MOST_GUESSES, "pages are held for nothing"

    def _answers(self, missing: list[int]) -> int:
        """How many sequences answer in this step, of those that miss so many tokens and need not wait: an equal part
        for each of the steps that are on their way."""
        answering = missing.count(1)
        if self.limits.micro_batches == 1:
            return answering
        every = sum(one.num_missing == 1 for one in self.running)
        return min(answering, -(-every // self.limits.micro_batches))

    def _answer(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Its next token alone, where that has room in a page of its own, as it nearly always has: False, and nothing
        changes, where there is more to do."""
        if sequence.draft or sequence.ahead:
            return False
        at, size, pages = sequence.num_computed, self.pool.page_size, sequence.pages
        page, inside = at // size, at % size
        if page >= len(pages) or (inside and self.pool.is_shared(pages[page])):
            return False
        sequence.num_computed = at + 1
        sequence.num_pending += 1
        plan.scheduled.append(Scheduled(sequence, at, 1, True))
        if inside + 1 == size:
            self.publish(sequence)
        return True

    def _affordable_draft(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """As much of its draft as budget and free pages allow: guesses push nobody out."""
        room = len(sequence.pages) * self.pool.page_size + self.pool.free * self.pool.page_size
        room -= sequence.num_computed + 1 + self.pool.page_size  # a page that is shared may have to be copied
        return tuple(sequence.draft[: max(0, min(budget, room))])

    def _extend(self, sequence: Sequence, count: int, plan: StepPlan, draft: tuple[int, ...] = ()) -> int:
        """How many tokens of a running sequence go into this step: all, or none where it had to give way."""
        while not self._grow(sequence, sequence.num_computed + count + len(draft), plan):
            draft = ()
            if self._drop_ahead():
                continue
            victim = self.running[-1]
            if victim.waits and victim.num_pending:  # its token is chosen when its step is through
                return 0
            self._preempt(victim, plan)
            if victim is sequence:
                return 0
        self._commit(sequence, count, plan, draft)
        return count + len(draft)

    def _admit(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Tokens of a waiting sequence that go into this step; 0: it must wait."""
        if sequence.num_pending:  # preempted while a token of it is on its way
            return 0
        if sequence.swapped is not None:
            return self._swap_in(sequence, plan)
        take_prefix(sequence, plan, self.pool)
        missing = pages_for(sequence.length, self.pool.page_size) - len(sequence.pages)
        reserve = int(self.pool.usable * self.limits.reserve) if self.running else 0
        copies = self._shares_last_page(sequence)
        if missing + copies + reserve > self.pool.free:
            self._release(sequence)
            return 0
        self._start(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_reused = sequence.num_computed
            self.prompt_tokens += len(sequence.prompt)
            self.reused_tokens += sequence.num_computed
        count = min(sequence.length - sequence.num_computed, budget)
        grown = self._grow(sequence, sequence.num_computed + count, plan)
        assert grown, "pages were counted before"
        self._commit(sequence, count, plan)
        return count

    def _start(self, sequence: Sequence) -> None:
        self.waiting.pop(0)
        _insert(self.running, sequence)
        sequence.status, sequence.row = Status.RUNNING, self._free_rows.pop()

    def _stop(self, sequence: Sequence) -> None:
        """It runs no more: its row is another's from now on."""
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.status, sequence.row = Status.WAITING, -1

    def _swap_in(self, sequence: Sequence, plan: StepPlan) -> int:
        """A sequence whose pages are in host memory goes on where it was."""
        assert sequence.swapped is not None
        computed = sequence.swapped.num_computed
        pages = self.pool.allocate(pages_for(sequence.length, self.pool.page_size))
        if pages is None:
            return 0
        self._start(sequence)
        sequence.pages, sequence.num_computed = pages, computed
        plan.swap_in.append((sequence, pages[: sequence.swapped.num_pages]))
        self._drop_swapped(sequence)
        count = sequence.length - computed
        assert count == 1, "only answering sequences are swapped"
        self._commit(sequence, count, plan)
        return count

    def _drop_swapped(self, sequence: Sequence) -> None:
        if sequence.swapped is not None:
            self.swapped_pages -= sequence.swapped.num_pages
            sequence.swapped = None

    def _shares_last_page(self, sequence: Sequence) -> bool:
        """Whether the next token would be written into a page that others hold too."""
        inside = sequence.num_computed % self.pool.page_size
        return inside > 0 and self.pool.is_shared(sequence.pages[sequence.num_computed // self.pool.page_size])

    def _grow(self, sequence: Sequence, length: int, plan: StepPlan) -> bool:
        """Pages of its own for all positions up to `length`; False, and nothing changes, where too few are free."""
        copies = self._shares_last_page(sequence)
        size = self.pool.page_size
        wanted = max(0, pages_for(length, size) - len(sequence.pages)) + copies
        new = self.pool.allocate(wanted) if wanted else []
        if new is None:
            return False
        if copies:
            at, own = sequence.num_computed // size, new.pop(0)
            plan.copies.append((sequence.pages[at], own))
            self.pool.release([sequence.pages[at]])
            sequence.pages[at] = own
            sequence.num_replaced += 1
        sequence.pages += new
        if sequence.ahead:
            self._hold_ahead(sequence, length)
        return True

    def _hold_ahead(self, sequence: Sequence, length: int) -> None:
        """Pages for the guesses of the step after this, where everybody else can still get one."""
        reach = min(length + sequence.ahead, len(sequence.prompt) + sequence.max_new)
        more = pages_for(reach, self.pool.page_size) - len(sequence.pages)
        if 0 < more <= self.pool.free - len(self.running):
            sequence.pages += self.pool.allocate(more) or []

    def _drop_ahead(self) -> bool:
        """Takes back all pages that nobody needs in this step; False where there are none."""
        before = self.pool.free
        for sequence in self.running:
            self._trim(sequence, sequence.num_computed)
        return self.pool.free > before

    def _trim(self, sequence: Sequence, length: int) -> None:
        """Gives back the pages behind so many tokens."""
        kept = pages_for(length, self.pool.page_size)
        if kept < len(sequence.pages):
            self.pool.release(sequence.pages[kept:])
            del sequence.pages[kept:]
            sequence.num_replaced += 1

    def _commit(self, sequence: Sequence, count: int, plan: StepPlan, draft: tuple[int, ...] = ()) -> None:
        start = sequence.num_computed
        samples = start + count == sequence.length
        assert samples or not draft, "drafts follow the last token"
        sequence.num_computed += count + len(draft)
        tree = sequence.tree[: len(draft)] if draft else ()
        plan.scheduled.append(Scheduled(sequence, start, count + len(draft), samples, draft, tree))
        self.publish(sequence)  # within a step, keys and values are written before anybody reads them
        sequence.num_pending += samples

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self.preemptions += 1
        victim.num_preemptions += 1
        self._stop(victim)
        answering = victim.num_computed + 1 >= victim.length
        if answering and self.swapped_pages + len(victim.pages) <= self.limits.swap_pages:
            victim.swapped = Swapped(len(victim.pages), victim.num_computed)
            self.swapped_pages += len(victim.pages)
            plan.swap_out.append((victim, victim.pages))
        self._release(victim)
        _insert(self.waiting, victim)
        plan.preempted.append(victim)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed = sequence.num_published = 0


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    """By rank, behind equals."""
    place = len(queue)
    while place and queue[place - 1].rank > sequence.rank:
        place -= 1
    queue.insert(place, sequence)
