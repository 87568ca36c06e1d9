"""Steps with many rows are sampled in parts, for the sake of memory: nobody can tell from the tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_result import Samples
from quantkit.runtime.device.memory import _logits_bytes
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.sampling import rejection, sampler
from quantkit.runtime.sampling.rejection import Proposed
from quantkit.runtime.sampling.sampler import Sampler

VOCAB = 40
GUESSES = 3
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 1.2, "top_k": 9, "repetition_penalty": 1.4},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": {5: 4.0}},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
]


def sequences_of(kinds: list[dict[str, Any]]) -> list[Sequence]:
    made = []
    for number, kind in enumerate(kinds):
        params = SamplingParams(**kind)
        made.append(Sequence(number, [1, 2, number % 9], params, 0.0, params.seed or number, 64, row=number))
    return made


def rows_of(sequences: list[Sequence]) -> tuple[list[Sequence], list[tuple[int, ...]], Tensor]:
    """Owners, guesses in front of each row, positions."""
    owners = [one for one in sequences for _ in range(1 + GUESSES)]
    before = [tuple(range(ahead)) for _ in sequences for ahead in range(1 + GUESSES)]
    return owners, before, torch.arange(len(owners)) % (1 + GUESSES) + 2


def proposal(logits: Tensor, guesses: Tensor) -> Proposed:
    rows = [row for row in range(len(logits)) if row % (1 + GUESSES) < GUESSES]
    return Proposed(rows, guesses[rows], list(logits[rows]))


def sampled(proposed: Proposed | None, logits: Tensor, kinds: list[dict[str, Any]]) -> Samples:
    sequences = sequences_of(kinds)
    owners, before, positions = rows_of(sequences)
    cpu = torch.device("cpu")
    make = Sampler(ops_for(cpu, torch.float32), VOCAB, len(sequences), cpu, seed=7)
    owner_rows = torch.tensor([one.row for one in owners])
    return make(logits, owners, owner_rows, positions, before, proposed)


@pytest.mark.parametrize("rows", [1, 3, 6, 19])
def test_parts_give_what_the_whole_gives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess is certain where both distributions are the same: then no random number matters."""
    logits = 2 * torch.randn(len(KINDS) * (1 + GUESSES), VOCAB, generator=torch.Generator().manual_seed(1))
    plain = [kind for kind in KINDS if "logit_bias" not in kind and "repetition_penalty" not in kind] + [{}] * 2
    surest = logits.argmax(-1)
    runs = {}
    for most in (sampler.SAMPLED_ROWS, rows):
        monkeypatch.setattr(sampler, "SAMPLED_ROWS", most)
        monkeypatch.setattr(sampler, "_PENALIZED_ROWS", most)
        runs[most] = [sampled(None, logits, KINDS), sampled(proposal(logits, surest), logits, plain)]
    whole, parts = runs.values()
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        for name in ("logprobs", "top", "top_logprobs"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    sure = parts[1].tokens.view(-1, 1 + GUESSES)[:, :GUESSES]
    drawn = [number for number, kind in enumerate(plain) if kind.get("temperature", 1.0) > 0]
    assert torch.equal(sure[drawn], surest.view(-1, 1 + GUESSES)[drawn, :GUESSES])


@pytest.mark.parametrize("few", [1, 2, 5])
def test_guesses_are_verified_in_parts(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same random numbers, however many at a time."""
    random = torch.Generator().manual_seed(2)
    kinds = [{"temperature": 0.5 + 0.1 * number, "top_k": number} for number in range(8)]
    logits, other = (2 * torch.randn(8 * (1 + GUESSES), VOCAB, generator=random) for _ in range(2))
    proposed = proposal(other, torch.randint(0, VOCAB, (len(logits),), generator=random))
    whole = sampled(proposed, logits, kinds).tokens
    monkeypatch.setattr(rejection, "VERIFIED_BYTES", few * VOCAB * rejection._OF_A_LOGIT)
    assert torch.equal(sampled(proposed, logits, kinds).tokens, whole)
    kept = (whole[proposed.logits_rows] == proposed.guesses).sum()
    assert 0 < kept < len(proposed.logits), "some guesses hold, some do not"


@pytest.mark.gpu
def test_the_plan_has_room_for_verification() -> None:
    """128 sequences with four guesses each and a large vocabulary, with everything that a request may ask for."""
    vocab, count, guesses = 128_256, 128, 4
    device, rows = torch.device("cuda"), 128 * 5
    kinds: list[dict[str, Any]] = [{"temperature": 0.8, "top_p": 0.9, "logprobs": 5, "presence_penalty": 0.5}] * count
    sequences = sequences_of(kinds)
    owners = [one for one in sequences for _ in range(1 + guesses)]
    before = [tuple(range(ahead)) for _ in sequences for ahead in range(1 + guesses)]
    logits = torch.randn(rows, vocab, dtype=torch.bfloat16, device=device)
    drawn = torch.randn(guesses * count, vocab, dtype=torch.bfloat16, device=device)
    at = [row for row in range(rows) if row % (1 + guesses) < guesses]
    proposed = Proposed(at, torch.zeros(len(at), dtype=torch.int64, device=device), list(drawn))
    make = Sampler(ops_for(device, torch.bfloat16), vocab, count, device)
    owner_rows = torch.tensor([one.row for one in owners], device=device)
    options = EngineOptions(device="cuda", max_sequences=count, speculative="draft=somewhere,k=4")
    planned = _logits_bytes(vocab, torch.bfloat16, options, drafted=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.cuda.memory_allocated() - logits.nbytes - drawn.nbytes
    make(logits, owners, owner_rows, torch.zeros(rows, dtype=torch.int64, device=device), before, proposed)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - kept
    assert taken <= planned
    assert taken > planned / 4, "the plan is not idle either"


def test_a_thousand_sequences_of_every_kind() -> None:
    """More rows than are sampled at a time: each token is that of its sequence alone."""
    count, random = 1_100, torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(count, VOCAB, generator=random)
    sequences = sequences_of([KINDS[number % len(KINDS)] | {"seed": number} for number in range(count)])
    cpu, positions = torch.device("cpu"), torch.arange(count) % 7

    def drawn(rows: slice) -> Tensor:
        make = Sampler(ops_for(cpu, torch.float32), VOCAB, count, cpu)
        owner_rows = torch.tensor([one.row for one in sequences[rows]])
        return make(logits[rows], sequences[rows], owner_rows, positions[rows]).tokens

    together = drawn(slice(None))
    assert together.shape == (count,)
    for row in (0, 511, 512, 513, 1_023, 1_024, count - 1):
        assert torch.equal(together[row : row + 1], drawn(slice(row, row + 1)))
    greedy = sequences_of([{"temperature": 0.0}] * count)
    make = Sampler(ops_for(cpu, torch.float32), VOCAB, count, cpu)
    assert torch.equal(make(logits, greedy, torch.arange(count), positions).tokens, logits.argmax(-1))
