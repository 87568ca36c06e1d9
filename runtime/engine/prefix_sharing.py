"""Shared prefixes: a sequence begins with pages that others have computed."""

from __future__ import annotations

from quantkit.runtime.core.pages import pages_for
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.engine.page_pool import PagePool


def take_prefix(sequence: Sequence, plan: StepPlan, pool: PagePool) -> None:
    """For the scheduler: a sequence that is to start gets pages whose contents are there already, those of its leader
    or of anybody with the same beginning.

    At least one token is always computed, because the logits behind it are wanted.
    """
    size, known = pool.page_size, len(sequence.tokens) - 1
    if sequence.needs_all_logits:
        return
    leader = sequence.leader
    if leader is not None and not sequence.num_preemptions and not leader.finished and leader.num_computed >= size:
        settled = plan.settled(leader) >= known  # a page that this step fills cannot be copied before it
        computed = known if settled else min(leader.num_computed, known) // size * size
        pages = leader.pages[: pages_for(computed, size)]
    else:
        pages = _known_pages(sequence, known // size, pool)
        computed = len(pages) * size
    pool.hold(pages)
    sequence.pages = pages
    sequence.num_computed = computed
    sequence.num_published = computed // size


def _known_pages(sequence: Sequence, most: int, pool: PagePool) -> list[int]:
    """Pages of anybody that hold the beginning of this sequence."""
    pages: list[int] = []
    for page in range(most):
        found = pool.find(sequence.digest_of(page, pool.page_size))
        if found is None:
            break
        pages.append(found)
    return pages
