"""One rank's decoder: answers prompts as any rank of a group does. Run as a script, it is one process of it.

python decoder_rank.py RANK WORLD FOLDER    reads FOLDER/jobs.json, writes FOLDER/RANK.pt
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.decoder import Decoder
from quantkit.runtime.model.layers import Weights
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.model.ranks import Ranks, check_parallel, local_config
from quantkit.runtime.model.rope import rope_tables
from quantkit.runtime.model.tensor_group import Group, OneRank, TorchGroup

PAGE, PAGES = 16, 4  # tokens in a page, pages of a sequence
TOKENS = 3  # in an answer
CPU = torch.device("cpu")
Step = Callable[[Batch], Tensor | None]


class Answer(NamedTuple):
    logits: Tensor  # of all tokens of the prompts, then of every answered token
    tokens: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank holds."""

    decoder: Decoder
    cache: KvCache
    ranks: Ranks

    @property
    def weights(self) -> Weights:
        return self.decoder.weights


def make_part(folder: str | Path, ranks: Ranks, group: Group, dtype: torch.dtype, sequences: int) -> Part:
    checkpoint = Checkpoint(folder)
    config = read_model_config(checkpoint.config)
    check_parallel(config, checkpoint, ranks)
    weights = load_weights(checkpoint, config, dtype, CPU, ranks=ranks)
    local = local_config(config, ranks)
    tables = rope_tables(checkpoint.config, local, PAGE * PAGES, CPU)
    kinds, heads, width = local.cache_entry
    cache = torch.zeros(local.layers, kinds, sequences * PAGES, heads, PAGE, width, dtype=dtype)
    return Part(Decoder(local, weights, tables, ops_for(CPU, dtype), group=group, ranks=ranks), KvCache(cache), ranks)


def answer(step: Step, prompts: list[list[int]]) -> Answer:
    """Greedy. A rank that gets no logits passes by the same steps, without knowing the tokens."""
    new, lengths, rows = prompts, [0] * len(prompts), []
    chosen: list[list[int]] = [[] for _ in prompts]
    for _ in range(TOKENS):
        logits = step(_batch(new, lengths))
        lengths = [length + len(ids) for length, ids in zip(lengths, new, strict=True)]
        last = torch.tensor([len(ids) for ids in new]).cumsum(0) - 1
        best = [0] * len(prompts) if logits is None else logits[last].argmax(1).tolist()
        rows.append(torch.empty(0) if logits is None else logits)
        new = [[token] for token in best]
        for answered, token in zip(chosen, best, strict=True):
            answered.append(token)
    return Answer(torch.cat(rows), chosen)


def _batch(new: list[list[int]], lengths: list[int]) -> Batch:
    starts = torch.tensor([0, *(len(ids) for ids in new)]).cumsum(0)
    positions = [range(length, length + len(ids)) for ids, length in zip(new, lengths, strict=True)]
    kv_slots = [place * PAGE * PAGES + position for place, own in enumerate(positions) for position in own]
    return Batch(
        ids=torch.tensor([token for ids in new for token in ids]),
        positions=torch.tensor([position for own in positions for position in own]),
        kv_slots=torch.tensor(kv_slots),
        page_table=torch.arange(len(new) * PAGES, dtype=torch.int32).view(len(new), PAGES),
        context_lengths=torch.tensor([own.stop for own in positions], dtype=torch.int32),
        query_starts=starts.int(),
        max_queries=max(map(len, new)),
    )


def prompts_below(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in (9, 21)]


def alone(folder: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32) -> tuple[Answer, Weights]:
    """What one process answers, and its weights."""
    part = make_part(folder, Ranks(), OneRank(), dtype, len(prompts))
    decoder = part.decoder
    return answer(lambda batch: decoder.logits(decoder.hidden_states(batch, part.cache)), prompts), part.weights


def weight_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Of all tensors inside a value; what shares its memory counts once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        place = value.untyped_storage().data_ptr()
        return 0 if place in seen or seen.add(place) else value.nbytes  # type: ignore[func-returns-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return sum(weight_bytes(one, seen) for one in value) if isinstance(value, list | tuple) else 0


def step_over_processes(part: Part, width: int) -> Step:
    """A step of this rank, with hidden states from and to its neighbours."""
    ranks, decoder = part.ranks, part.decoder
    last = ranks.world - ranks.tensor + ranks.tensor_rank

    def step(batch: Batch) -> Tensor | None:
        received = None
        if not ranks.first_stage:
            received = torch.empty(len(batch.ids), width)
            dist.recv(received, ranks.rank - ranks.tensor)
        hidden = decoder.hidden_states(batch, part.cache, received)
        if ranks.pipeline > 1 and ranks.last_stage:
            dist.send(hidden, ranks.tensor_rank)
        elif ranks.pipeline > 1:
            dist.send(hidden, ranks.rank + ranks.tensor)
            if ranks.first_stage:
                dist.recv(hidden, last)
        return decoder.logits(hidden) if ranks.first_stage else None

    return step


def _run(rank: int, job: dict[str, Any]) -> dict[str, Any] | None:
    shape = Ranks(job["tensor"], job["pipeline"])
    groups = [
        dist.new_group(list(range(stage * shape.tensor, (stage + 1) * shape.tensor))) for stage in range(shape.pipeline)
    ]
    if rank >= shape.world:
        return None
    ranks = dataclasses.replace(shape, rank=rank)
    group = TorchGroup(groups[ranks.stage], ranks.tensor_rank, ranks.tensor)
    part = make_part(job["folder"], ranks, group, torch.float32, len(job["prompts"]))
    found = answer(step_over_processes(part, part.decoder.config.hidden), job["prompts"])
    return {
        "logits": found.logits.tolist(),
        "tokens": found.tokens,
        "blocks": weight_bytes(part.weights.blocks),
        "all": weight_bytes(part.weights),
    }


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    jobs = json.loads((folder / "jobs.json").read_text())
    (folder / f"{rank}.json").write_text(json.dumps([_run(rank, job) for job in jobs]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
