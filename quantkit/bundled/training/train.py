"""Trains one of the bundled models within a wall-clock budget and writes it as a Hugging Face folder.

Run as `python -m quantkit.bundled.training.train --size demo --data FOLDER --out FOLDER --minutes 8`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import __version__ as transformers_version

from .experts import stack_experts
from .export import evaluate, pack, routing_of, save, verify
from .loss import Loss, load_teacher
from .model import SIZES, Decoder, make_config
from .muon import Muon
from .noise import RoundingNoise

START = time.time()
DECAY_SHARE = 0.6
WARMUP_SHARE = 0.015
CHOOSERS = ("embed_tokens.weight", "mlp.gate.weight")  # a row stands for a token or an expert: not for Muon


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="demo")
    parser.add_argument("--data", type=Path, required=True, help="folder with tokens.bin (uint16), from prepare.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer files")
    parser.add_argument("--eval-text", type=Path, required=True, help="held-out text, UTF-8")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="budget for everything: compile, training, evaluation, saving"
    )
    parser.add_argument(
        "--reserve", type=float, default=40.0, help="seconds of the budget kept for evaluation and saving"
    )
    parser.add_argument(
        "--tokens", type=float, default=math.inf, help="stop after this many tokens, if the budget lasts longer"
    )
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument(
        "--lr", type=float, default=4e-3, help="peak learning rate of the matrices (Muon, Adam-sized steps)"
    )
    parser.add_argument(
        "--lr-embedding", type=float, default=3e-3, help="peak learning rate of embedding, routers and norms (AdamW)"
    )
    parser.add_argument(
        "--teacher", type=Path, help="folder of the trained demo model, whose predictions are also learned"
    )
    parser.add_argument(
        "--balance", type=float, default=0.01, help="weight of the loss that keeps all experts of a layer at work"
    )
    parser.add_argument("--init", type=Path, help="folder of a trained model to go on from")
    parser.add_argument("--noise", type=float, default=0.0, help="rounding noise, in steps of a 4-bit grid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--split-output", type=Path, help="also write the folder as tar parts below 15 MiB into this folder"
    )
    return parser.parse_args()


def batches(tokens: Tensor, length: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of windows; every pass cuts the stream at a new offset and shuffles the windows."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(length + 1, device=tokens.device)
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        count = (len(tokens) - offset - 1) // length
        starts = offset + length * torch.randperm(count, generator=generator)
        starts = starts.to(tokens.device)
        for first in range(0, count - rows + 1, rows):
            yield tokens[starts[first : first + rows, None] + steps].long()


def schedule(progress: float) -> float:
    """Learning-rate factor: short warm-up, constant, then linear to zero."""
    return max(0.0, min(1.0, progress / WARMUP_SHARE + 0.02, (1.0 - progress) / DECAY_SHARE))


class Trainer:
    """Model, optimisers and clock of one run."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.tokens = float(args.tokens)
        self.config = make_config(args.size, 4096, 0)
        self.model = Decoder(self.config).to(device)
        if args.init is not None:
            self.model.load_state_dict(stack_experts(load_file(str(args.init / "model.safetensors"))))
        loss = Loss(self.model, load_teacher(args.teacher, 4096, device), args.balance)
        self.loss = loss if args.no_compile else torch.compile(loss, dynamic=False)
        hidden = {n: p.ndim > 1 and not n.endswith(CHOOSERS) for n, p in self.model.named_parameters()}
        matrices = [p for n, p in self.model.named_parameters() if hidden[n]]
        others = [p for n, p in self.model.named_parameters() if not hidden[n]]
        self.muon = Muon(matrices)
        self.noise = RoundingNoise(matrices, args.noise)
        self.adam = torch.optim.AdamW(
            others, lr=args.lr_embedding, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=device.type == "cuda"
        )
        self.end = START + float(args.minutes) * 60 - float(args.reserve)
        self.begin = time.time()
        self.steps = self.seen = 0

    def progress(self) -> float:
        """Share of the budget used: the larger of time and tokens."""
        clock = (time.time() - self.begin) / max(self.end - self.begin, 1e-9)
        return max(clock, self.seen / self.tokens)

    def step(self, batch: Tensor) -> Tensor:
        """One optimiser step; returns the plain loss."""
        factor = schedule(self.progress())
        with self.noise():
            total, plain = self.loss(batch)
            total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(self.args.lr * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.args.lr_embedding * factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
        self.seen += batch.shape[0] * (batch.shape[1] - 1)
        detached: Tensor = plain.detach()
        return detached

    def warm_up(self, batch: Tensor) -> None:
        """Compiles before the clock of the schedule starts; leaves the weights as they were."""
        total, _ = self.loss(batch)
        total.backward()
        total.detach().item()
        self.model.zero_grad(set_to_none=True)
        self.begin = time.time()

    def save_early(self) -> None:
        """Saves a copy shortly before the end, in case the run is cut."""
        note: dict[str, object] = {"note": "intermediate copy, saved before the end of training"}
        save(self.model, self.config, self.args.tokenizer, self.args.out, note)
        if self.args.split_output is not None:
            pack(self.args.out, self.args.split_output)

    def run(self, data: Iterator[Tensor]) -> float:
        """Trains until the budget is used; returns the mean loss of the last steps."""
        self.warm_up(next(data))
        print(f"compiled after {time.time() - START:.0f} s, training until {self.end - START:.0f} s", flush=True)
        recent: list[Tensor] = []
        report = (time.time(), 0)
        saved = False
        while (progress := self.progress()) < 1.0:
            recent.append(self.step(next(data)))
            if self.steps % 50 == 0 or self.steps in (1, 10, 20):
                mean = float(torch.stack(recent[-50:]).mean())
                now = time.time()
                rate = (self.seen - report[1]) / max(now - report[0], 1e-9)
                report = (now, self.seen)
                recent = recent[-50:]
                print(
                    f"step {self.steps} share {progress:.3f} tokens {self.seen / 1e6:.1f}M "
                    f"loss {mean:.4f} {rate / 1e6:.3f}M tokens/s",
                    flush=True,
                )
                if not math.isfinite(mean):
                    raise SystemExit("the loss is not finite: lower --lr")
            if progress > 0.93 and not saved:
                saved = True
                self.save_early()
        return float(torch.stack(recent[-50:]).mean())


def facts_of(
    trainer: Trainer, raw: np.ndarray[tuple[int], np.dtype[np.uint16]], final: float, device: torch.device
) -> dict[str, object]:
    """What is known about a finished run, for training.json."""
    args = trainer.args
    return {
        "size": args.size,
        "data_sha256": hashlib.sha256(raw.tobytes()).hexdigest(),
        "data_tokens": len(raw),
        "tokens_seen": trainer.seen,
        "passes": round(trainer.seen / len(raw), 2),
        "steps": trainer.steps,
        "final_loss": round(final, 4),
        "batch_tokens": args.batch_tokens,
        "seq_len": args.seq_len,
        "lr": args.lr,
        "lr_embedding": args.lr_embedding,
        "distilled": args.teacher is not None,
        "rounding_noise": args.noise,
        "seed": args.seed,
        "torch": torch.__version__,
        "transformers": transformers_version,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    """Trains, saves, checks and evaluates."""
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    raw = np.fromfile(args.data / "tokens.bin", dtype=np.uint16)
    tokens = torch.from_numpy(raw.astype(np.int16)).to(device)
    trainer = Trainer(args, device)
    print(
        f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(raw) / 1e6:.1f} M tokens, {device}",
        flush=True,
    )
    final = trainer.run(batches(tokens, args.seq_len, max(1, args.batch_tokens // args.seq_len), args.seed))
    facts = facts_of(trainer, raw, final, device)
    save(trainer.model, trainer.config, args.tokenizer, args.out, facts)
    facts["logit_difference"] = verify(trainer.model, args.out)
    facts["heldout_bits_per_byte"] = evaluate(args.out, args.eval_text, device)
    if routing := routing_of(args.out, args.eval_text, device):
        facts |= {"balance": args.balance, "heldout_routing": routing}
    facts["wall_seconds"] = round(time.time() - START, 1)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2), flush=True)
    if args.split_output is not None:
        pack(args.out, args.split_output)


if __name__ == "__main__":
    main()
