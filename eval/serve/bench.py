"""A whole benchmark: ask the server what it is, warm it up, send each load, hand over each row when it is measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError, QuantkitError
from quantkit.eval.serve.client import Client, Target
from quantkit.eval.serve.facts import Facts, ask_facts, wait_until_rehearsed
from quantkit.eval.serve.loads import Limits, Load
from quantkit.eval.serve.prompts import FilePrompts, Prompts, RequestMaker, file_prompts, synthetic_prompts
from quantkit.eval.serve.results import ServeRow
from quantkit.eval.serve.run import measure

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    url: str
    loads: tuple[Load, ...]
    model: str | None = None
    endpoint: str = "chat"
    prompt_len: int = 128
    new_tokens: int = 256
    vary: float = 0.0  # answers have up to this share more or fewer tokens
    prompts: Path | None = None
    api_key: str | None = None
    seed: int = 0
    ignore_eos: bool = True
    limits: Limits | None = None
    timeout: float = 600.0
    warm_up: int | None = None  # requests before each load; None: as many as it has streams

    def tokens_of(self, number: int) -> int:
        """Of the answer to a request of a load, by chance but the same every time."""
        share = random.Random(f"{self.seed} {number}").uniform(1 - self.vary, 1 + self.vary)
        return max(1, round(self.new_tokens * share))

    @property
    def most_tokens(self) -> int:
        return round(self.new_tokens * (1 + self.vary))


@dataclass(frozen=True)
class Report:
    facts: Facts
    rows: tuple[ServeRow, ...]
    notes: tuple[str, ...]


async def run_bench(
    plan: Plan, on_row: Callable[[ServeRow], None], on_load: Callable[[Load], None] = lambda load: None
) -> Report:
    """Every load after the other."""
    client = Client(Target.parse(plan.url), plan.api_key, plan.timeout)
    try:
        facts = await ask_facts(client, plan.url, plan.model)
        await wait_until_rehearsed(client)
        prompts = await _prompts(client, facts, plan)
        maker = RequestMaker(facts.model, plan.endpoint, prompts, plan.ignore_eos)
        rows: list[ServeRow] = []
        sent = 0  # numbers of prompts go on from load to load, so that no cache has seen one before
        for load in plan.loads:
            on_load(load)
            sent += await _warm_up(client, maker, plan, load, sent)
            row = await _measure(client, maker, plan, load, sent, facts)
            sent += len(row.measured.answers)
            rows.append(row)
            on_row(row)
    finally:
        await client.close()
    return Report(facts, tuple(rows), tuple(_notes(prompts, sent)))


async def _prompts(client: Client, facts: Facts, plan: Plan) -> Prompts:
    if plan.prompts is not None:
        return await file_prompts(client, facts, plan.prompts, plan.endpoint, plan.prompt_len)
    most = facts.max_context
    if most is not None and plan.prompt_len + plan.most_tokens > most:
        raise InputError(
            f"--prompt-len {plan.prompt_len} and --new-tokens {plan.most_tokens} are more than the {most} tokens "
            f"that {facts.model} takes; choose smaller ones"
        )
    return await synthetic_prompts(client, facts, plan.endpoint, plan.prompt_len, plan.seed)


async def _warm_up(client: Client, maker: RequestMaker, plan: Plan, load: Load, sent: int) -> int:
    """Short answers at the load's width: kernels get compiled, connections opened. Gives the number of requests."""
    count = load.streams if plan.warm_up is None else plan.warm_up
    if count == 0:
        return 0
    tokens = min(_WARM_UP_TOKENS, plan.new_tokens)
    width = Load(concurrency=min(load.streams, count), requests=count)
    found = await measure(client, maker.path, lambda number: maker.body(sent + number, tokens), width)
    failed = [answer for answer in found.answers if answer.error is not None]
    if len(failed) == count:
        hint = "; servers without ignore_eos need --no-ignore-eos" if "ignore_eos" in failed[0].message else ""
        raise QuantkitError(f"every warm-up request failed: {failed[0].error}: {failed[0].message}{hint}")
    return count


async def _measure(client: Client, maker: RequestMaker, plan: Plan, load: Load, sent: int, facts: Facts) -> ServeRow:
    def body(number: int) -> bytes:
        return maker.body(sent + number, plan.tokens_of(number))

    measured = await measure(client, maker.path, body, load, plan.seed)
    least = plan.new_tokens if not plan.vary else 0  # of varied answers nobody knows how long they should be
    return ServeRow(facts, plan.endpoint, least, plan.limits, measured)


def _notes(prompts: Prompts, sent: int) -> list[str]:
    found = [prompts.note] if prompts.note else []
    if isinstance(prompts, FilePrompts) and sent > len(prompts.prompts):
        found.append(f"{len(prompts.prompts)} prompts were sent {sent} times: a prefix cache knows them")
    return found
