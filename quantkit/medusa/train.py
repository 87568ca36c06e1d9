"""From a model to heads in a folder: hidden states once, training that touches the heads alone, a measurement.

The same model, texts, options and number of threads on the same machine give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.medusa.loss import LmHead, guess_loss
from quantkit.medusa.measure import TokensPerStep, accuracies, guess, tokens_per_step
from quantkit.medusa.states import Trace, answers, trace
from quantkit.medusa.texts import MOST_TOKENS, PROMPT, Texts, choose_output, read_texts
from quantkit.progress import Progress, silent
from quantkit.runtime.drafters.medusa_heads import MOST_HEADS, MOST_LAYERS, MedusaHeads, Target, save_heads
from quantkit.runtime.drafters.medusa_tree import MOST_NODES, Tree, choose_tree
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder
from quantkit.wording import model_name

Stage = Callable[[str], AbstractContextManager[Progress]]  # a progress bar for a part of the work with this name

PIECE = 128  # consecutive positions that are computed at once
BATCH = 8  # pieces of an optimizer step
SEQUENCES = 32  # answered at the same time
ANSWER = 96  # tokens of an answer that is measured
SAMPLED = 192  # tokens of an answer that is trained on
WARM_UP = 30  # steps at most
_RATE = 1.25  # learning rate times hidden size; tuned on the bundled model, 512 wide


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `quantkit train-medusa` takes besides texts and places."""

    heads: int = 4
    layers: int = 1
    nodes: int = MOST_NODES  # of the tree
    epochs: int = 3
    self_generated: int = 0  # answers of the model itself to train on, besides the text
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (("heads", MOST_HEADS), ("layers", MOST_LAYERS), ("nodes", MOST_NODES), ("epochs", 1000)):
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"{name} is {getattr(self, name)}, but must be from 1 to {most}")
        most = MOST_TOKENS // 2 // (PROMPT + SAMPLED)
        if not 0 <= self.self_generated <= most:
            raise InputError(f"self_generated is {self.self_generated}, but must be from 0 to {most}")
        if not 0 <= self.seed < 2**62:
            raise InputError(f"seed is {self.seed}, but must be 0 or more, below 2**62")


@dataclass(frozen=True)
class TrainReport:
    """What came out, measured with the heads as they were saved."""

    model: str
    output: str
    bytes: int
    tokens: int  # trained on
    first_losses: list[float]  # of each head, nats a position, mean over the first epoch
    last_losses: list[float]  # and over the last one
    heldout_losses: list[float]
    accuracies: list[list[float]]  # [head][rank], on held-out answers
    tree: Tree
    tokens_per_step: TokensPerStep

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tree": self.tree.to_dict()}


def train_medusa(
    model: str | Path,
    output: str | Path | None = None,
    *,
    text: Sequence[str | Path] = (),
    heldout: str | Path | None = None,
    options: TrainOptions | None = None,
    device: str = "auto",
    stage: Stage = lambda name: nullcontext(silent),
) -> TrainReport:
    """Trains heads for a model and saves them in `output`, or beside the checkpoint.

    `text`: sources as calibration takes them, the bundled text where none is given. `heldout`: what the tree is chosen
    and measured on; by default the bundled held-out text, or a tenth of the given text, which is then not trained on.
    """
    options = options or TrainOptions()
    checkpoint = Checkpoint(model_folder(model))
    if checkpoint.gguf is not None:
        raise InputError(f"heads are trained for a folder, but '{model}' is a GGUF file; import it first")
    target = Target.of(checkpoint)
    folder = choose_output(checkpoint.folder, output)
    texts = read_texts(checkpoint, text, heldout, options.seed, options.self_generated * (PROMPT + SAMPLED))
    prompts = texts.prompts_to_train(options.self_generated)
    with stage("loading") as advance:
        llm = LLM(
            checkpoint.folder,
            device=device,
            max_context=texts.context,
            max_sequences=SEQUENCES,
            kv_tokens=SEQUENCES * texts.context,
            on_block=advance,
        )
    weights = llm.engine.runner.decoder.weights
    lm_head, embedding = LmHead.of(llm.engine, checkpoint), weights.embedding
    assert isinstance(embedding, Tensor)  # only GGUF files have it in blocks
    learned = _training_traces(llm, texts, prompts, options.seed, stage)
    heads = MedusaHeads(target.hidden_size, options.heads, options.layers).to(embedding.device)
    losses = fit(heads, lm_head, embedding, learned, options, stage)
    heads = heads.to(torch.bfloat16).to(weights.dtype).requires_grad_(False)  # as the file will hold them
    measured = _heldout_traces(llm, texts, options, stage)
    choosing, judging = measured[::2], measured[1::2]
    heads.tree = choose_tree(accuracies(guess(heads, lm_head, embedding, choosing)), options.nodes)
    guesses = guess(heads, lm_head, embedding, judging)
    report = TrainReport(
        model=model_name(model),
        output=str(folder),
        bytes=sum(value.numel() * 2 for value in heads.state_dict().values()),
        tokens=sum(len(one.tokens) for one in learned),
        first_losses=losses[0],
        last_losses=losses[-1],
        heldout_losses=heldout_losses(heads, lm_head, embedding, judging),
        accuracies=accuracies(guesses),
        tree=heads.tree,
        tokens_per_step=tokens_per_step(guesses, heads.tree),
    )
    save_heads(folder, heads, target, _facts(report, texts, options))
    return report


def _training_traces(llm: LLM, texts: Texts, prompts: Tensor, seed: int, stage: Stage) -> list[Trace]:
    """Of the text, and of sampled answers to the prompts [prompts, tokens]."""
    sequences = list(texts.windows)
    if len(prompts):
        with stage("answers") as advance:
            length = min(SAMPLED, texts.context - prompts.shape[1])
            sequences += answers(llm, prompts, length, 1.0, seed, advance)
    with stage("hidden states") as advance:
        return trace(llm.engine, sequences, on_item=advance)


def _heldout_traces(llm: LLM, texts: Texts, options: TrainOptions, stage: Stage) -> list[Trace]:
    prompts = texts.prompts
    with stage("held-out answers") as advance:
        length = min(ANSWER, texts.context - prompts.shape[1])
        found = answers(llm, prompts, length, 0.0, options.seed, advance)
    with stage("hidden states") as advance:
        return trace(llm.engine, found, [prompts.shape[1]] * len(found), advance)


def fit(
    heads: MedusaHeads,
    lm_head: LmHead,
    embedding: Tensor,
    traces: Sequence[Trace],
    options: TrainOptions,
    stage: Stage = lambda name: nullcontext(silent),
) -> list[list[float]]:
    """Trains heads in place; the loss of every head, mean over each epoch."""
    pieces = _pieces(traces, heads.count)
    if not pieces:
        raise InputError(
            f"no text has more than {heads.count} tokens, too few for {heads.count} heads; use longer ones"
        )
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    per_epoch = -(-len(pieces) // BATCH)
    total, step = per_epoch * options.epochs, 0
    generator = torch.Generator().manual_seed(options.seed)
    losses = []
    with stage("training") as advance:
        for _ in range(options.epochs):
            seen, summed = 0, torch.zeros(heads.count)
            for chosen in torch.randperm(len(pieces), generator=generator).split(BATCH):
                optimizer.param_groups[0]["lr"] = _rate(step, total, embedding.shape[1])
                rows, loss = _train_step(heads, lm_head, embedding, [pieces[index] for index in chosen], optimizer)
                seen, summed, step = seen + rows, summed + loss, step + 1
                advance(f"loss {float(loss.mean()) / rows:.3f}", total)
            losses.append((summed / seen).tolist())
    return losses


def _rate(step: int, total: int, width: int) -> float:
    """A short way up, then half a cosine down to zero."""
    up = min(1.0, (step + 1) / min(WARM_UP, 1 + total // 10))
    return _RATE / width * up * 0.5 * (1 + math.cos(math.pi * step / total))


def _pieces(traces: Sequence[Trace], heads: int) -> list[Trace]:
    """Cuts of up to PIECE positions that are trained, with the `heads` positions behind them."""
    return [
        Trace(one.tokens[start : start + PIECE + heads], one.states[start : start + PIECE + heads])
        for one in traces
        for start in range(0, len(one.tokens) - heads, PIECE)
    ]


def _train_step(
    heads: MedusaHeads, lm_head: LmHead, embedding: Tensor, pieces: list[Trace], optimizer: torch.optim.Optimizer
) -> tuple[int, Tensor]:
    """Positions of the step, and the sum of their losses for each head."""
    counts = [len(piece.tokens) - heads.count for piece in pieces]
    ahead, states = _ahead(heads, embedding, pieces, counts)
    gradient, losses = torch.empty_like(ahead), torch.zeros(heads.count)
    for part, out, own in zip(ahead.detach().split(counts, 1), gradient.split(counts, 1), states, strict=True):
        loss, slope = guess_loss(lm_head, part, own)
        out.copy_(slope)
        losses += loss.cpu()
    optimizer.zero_grad()
    ahead.backward(gradient / sum(counts))
    optimizer.step()
    return sum(counts), losses


def _ahead(
    heads: MedusaHeads, embedding: Tensor, pieces: Sequence[Trace], counts: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """What heads say at the first positions of pieces, in the heads' dtype, and the states of each piece."""
    device, dtype = embedding.device, heads.keep.dtype
    states = [piece.states.to(device) for piece in pieces]
    h = torch.cat([own[:count] for own, count in zip(states, counts, strict=True)]).to(dtype)
    following = torch.cat([piece.tokens[1 : count + 1] for piece, count in zip(pieces, counts, strict=True)])
    return heads(h, embedding[following.to(device)].to(dtype)), states


@torch.no_grad()
def heldout_losses(heads: MedusaHeads, lm_head: LmHead, embedding: Tensor, traces: Sequence[Trace]) -> list[float]:
    """Of every head, nats a position: cross entropy against the model's own distributions."""
    seen, summed = 0, torch.zeros(heads.count)
    for piece in _pieces(traces, heads.count):
        count = len(piece.tokens) - heads.count
        ahead, (states,) = _ahead(heads, embedding, [piece], [count])
        seen, summed = seen + count, summed + guess_loss(lm_head, ahead, states)[0].cpu()
    return (summed / max(seen, 1)).tolist()


def _facts(report: TrainReport, texts: Texts, options: TrainOptions) -> dict[str, Any]:
    """For medusa.json: no paths and no times of this machine."""
    return {
        "model": report.model,
        "text": texts.records,
        "heldout": texts.heldout,
        "tokens": report.tokens,
        **asdict(options),
        "losses": [round(loss, 4) for loss in report.last_losses],
        "heldout_losses": [round(loss, 4) for loss in report.heldout_losses],
        "top1": [round(row[0], 4) for row in report.accuracies],
        "top3": [round(sum(row[:3]), 4) for row in report.accuracies],
        "tokens_per_step": {name: round(value, 4) for name, value in report.tokens_per_step.to_dict().items()},
        "torch": torch.__version__,
    }
