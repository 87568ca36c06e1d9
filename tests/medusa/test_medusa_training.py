"""Losses and their gradients, hidden states, training, and what heads are worth, on the bundled models."""

import pytest
import torch
from torch import Tensor

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.medusa.loss import LmHead, guess_loss
from quantkit.medusa.measure import RANKS, Guesses, accuracies, guess, tokens_per_step
from quantkit.medusa.states import Trace, answers, trace
from quantkit.medusa.train import TrainOptions, fit, heldout_losses
from quantkit.reference import load_reference, load_tokenizer
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.drafters.medusa_heads import MedusaHeads, Target, load_heads
from quantkit.runtime.drafters.medusa_tree import Tree, chain
from quantkit.runtime.llm import LLM
from quantkit.runtime.scoring import hidden_states, score_tokens
from quantkit.sources import model_folder


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_gradient_is_that_of_autograd(cap: float | None) -> None:
    random = torch.Generator().manual_seed(0)
    lm_head = LmHead(torch.randn(30, 8, generator=random), cap)
    ahead = torch.randn(2, 5, 8, generator=random, requires_grad=True)
    states = torch.randn(7, 8, generator=random)
    losses, gradient = guess_loss(lm_head, ahead.detach(), states)
    expected = torch.stack(
        [
            torch.nn.functional.cross_entropy(
                lm_head.logits(ahead[head]), lm_head.logits(states[head + 1 : head + 6]).softmax(-1), reduction="sum"
            )
            for head in range(2)
        ]
    )
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(gradient, ahead.grad)


@pytest.mark.parametrize("length", [1, 17, 200])
def test_hidden_states_are_what_the_lm_head_reads(draft_llm: LLM, draft_head: LmHead, length: int) -> None:
    ids = torch.randint(0, 4000, (length,), generator=torch.Generator().manual_seed(length))
    found = hidden_states(draft_llm.engine, ids)
    torch.testing.assert_close(draft_head.logits(found), score_tokens(draft_llm.engine, ids), rtol=1e-4, atol=1e-4)


def test_hidden_states_are_those_of_transformers() -> None:
    """Also where one text takes several steps of the engine."""
    llm = LLM("demo-draft", device="cpu", max_context=64, max_sequences=1, step_tokens=24)
    ids = torch.randint(0, 4000, (60,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected: Tensor = load_reference("demo-draft", "float32").model(ids[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden_states(llm.engine, ids), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="100000 tokens need"):
        hidden_states(llm.engine, torch.zeros(100_000, dtype=torch.long))
    pool = llm.engine.scheduler.pool
    assert pool.free == pool.usable


def test_answers_are_the_engines_own(draft_llm: LLM) -> None:
    prompts = Calibration(HELDOUT_TEXT, 3, 24, 0).tokens(load_tokenizer("demo-draft"), 256)
    greedy = draft_llm.generate([row.tolist() for row in prompts], SamplingParams(max_tokens=8))
    for one, row, done in zip(answers(draft_llm, prompts, 8, 0.0, 0), prompts, greedy, strict=True):
        assert one.tolist() == row.tolist() + done.answers[0].token_ids
    first, again, other = (answers(draft_llm, prompts, 8, 1.0, seed) for seed in (1, 1, 50))
    assert [one.tolist() for one in first] == [one.tolist() for one in again]
    assert [one.tolist() for one in first] != [one.tolist() for one in other]


def test_training_lowers_the_loss(draft_llm: LLM, draft_head: LmHead, traces: list[Trace]) -> None:
    embedding = draft_llm.engine.runner.decoder.weights.embedding
    heads, one = MedusaHeads(256, 2), traces[:1]  # a step of the optimizer each epoch, as with all three
    before = heldout_losses(heads, draft_head, embedding, one)
    losses = fit(heads, draft_head, embedding, one, TrainOptions(heads=2, epochs=25))
    after = heldout_losses(heads, draft_head, embedding, one)
    assert len(losses) == 25
    assert all(new < 0.6 * old for old, new in zip(before, after, strict=True)), (before, after)


def test_training_repeats(draft_llm: LLM, draft_head: LmHead, traces: list[Trace]) -> None:
    embedding = draft_llm.engine.runner.decoder.weights.embedding
    runs = []
    for _ in range(2):
        heads = MedusaHeads(256, 2)
        losses = fit(heads, draft_head, embedding, traces, TrainOptions(heads=2, epochs=4))
        runs.append((losses, heads.state_dict()))
    assert len(runs[0][0]) == 4
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_texts_too_short_for_the_heads_are_refused(draft_llm: LLM, draft_head: LmHead) -> None:
    short = trace(draft_llm.engine, [torch.tensor([1, 2, 3])])
    embedding = draft_llm.engine.runner.decoder.weights.embedding
    with pytest.raises(InputError, match="too few for 3 heads"):
        fit(MedusaHeads(256, 3), draft_head, embedding, short, TrainOptions(heads=3))
    with pytest.raises(InputError, match="nothing can be measured"):
        guess(MedusaHeads(256, 3), draft_head, embedding, [Trace(short[0].tokens, short[0].states, known=2)])


def test_guesses_are_compared_with_the_right_tokens(draft_llm: LLM, draft_head: LmHead, traces: list[Trace]) -> None:
    """Fresh heads repeat the lm head: at a step that begins with token p they favour what state p-1 favours."""
    embedding = draft_llm.engine.runner.decoder.weights.embedding
    one = Trace(traces[0].tokens, traces[0].states, known=100)
    (found,) = guess(MedusaHeads(256, 3), draft_head, embedding, [one])
    assert found.ranks.shape == (3, 27)  # steps may begin at 100 to 126: one more token follows
    for column, position in enumerate(range(100, 127)):
        best = draft_head.logits(one.states[position - 1].float()[None])[0].topk(RANKS).indices.tolist()
        for head in range(3):
            wanted = position + 1 + head
            assert bool(found.counted[head, column]) == (wanted < 128)
            token = int(one.tokens[wanted]) if wanted < 128 else -1
            assert found.ranks[head, column] == (best.index(token) if token in best else RANKS)


def test_tokens_per_step_by_hand() -> None:
    ranks = torch.tensor([[0, 1, 0, 2, RANKS, 0], [0, 0, 1, 0, 0, RANKS]])
    counted = torch.tensor([[True] * 6, [True] * 5 + [False]])
    tree = Tree.from_paths([(0,), (1,), (0, 0)])
    found = tokens_per_step([Guesses(ranks, counted)], tree)
    # Accepted at each position, tree: 2 1 1 0 0 1, chain: 2 0 1 0 0 1. Steps of both begin at 0, 3, 4, 5.
    assert found.tree == pytest.approx(1 + 5 / 6)
    assert found.chain == pytest.approx(1 + 4 / 6)
    assert found.tree_walk == found.chain_walk == 6 / 4
    assert (found.positions, found.answers) == (6, 1)
    rates = accuracies([Guesses(ranks, counted)])
    assert rates[0][:4] == pytest.approx([3 / 6, 1 / 6, 1 / 6, 0])
    assert rates[1][:2] == pytest.approx([4 / 5, 1 / 5])


@pytest.mark.parametrize(("count", "length", "new"), [(8, 32, 24), pytest.param(16, 64, 48, marks=pytest.mark.long)])
def test_the_bundled_heads_guess_well(count: int, length: int, new: int) -> None:
    """On a slice of the held-out text; docs/explanations/medusa.md has the whole measurement."""
    checkpoint = Checkpoint(model_folder("demo"))
    llm = LLM("demo", device="cpu", max_context=128, max_sequences=16)
    heads = load_heads("demo-medusa", Target.of(checkpoint))
    lm_head, embedding = LmHead.of(llm.engine, checkpoint), llm.engine.runner.decoder.weights.embedding
    prompts = Calibration(HELDOUT_TEXT, count, length, 7).tokens(load_tokenizer("demo"), 128)
    found = trace(llm.engine, answers(llm, prompts, new, 0.0, 0), [length] * count)
    measured = tokens_per_step(guess(heads, lm_head, embedding, found), heads.tree)
    assert measured.tree > 1.6
    assert measured.tree > measured.chain > 1.2
    fresh = MedusaHeads(512, heads.count)
    assert tokens_per_step(guess(fresh, lm_head, embedding, found), chain(1)).chain < measured.chain - 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 0}, "heads is 0, but must be from 1 to 8"),
        ({"heads": 9}, "heads is 9"),
        ({"layers": 5}, "layers is 5, but must be from 1 to 4"),
        ({"nodes": 16}, "nodes is 16, but must be from 1 to 15"),
        ({"epochs": 0}, "epochs is 0"),
        ({"self_generated": -1}, "self_generated is -1"),
        ({"self_generated": 10_000_000}, "self_generated is 10000000"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainOptions(**options)
