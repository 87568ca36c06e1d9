"""One checkpoint in one engine: whether it loads, and how far its log-probabilities are from ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.bundled import HELDOUT_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import perplexity_of, token_losses
from quantkit.eval.interop.adapters import Adapter, version_of
from quantkit.eval.quality.predictors import load_predictor
from quantkit.eval.quality.windows import read_windows
from quantkit.reference import load_tokenizer

_LONGEST_REASON = 240


@dataclass(frozen=True)
class Seen:
    """Numbers are None where it does not load. `loads` is None where that cannot be told."""

    loads: bool | None
    reason: str = ""
    dtype_there: str = ""
    dtype_here: str = ""
    perplexity_there: float | None = None
    perplexity_here: float | None = None
    difference: float | None = None  # of log-probabilities, the mean of magnitudes, nats

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def token_windows(checkpoint: Checkpoint, windows: int, window: int) -> Tensor:
    """The first windows of the held-out text."""
    return read_windows(load_tokenizer(checkpoint.folder), HELDOUT_TEXT, window=window, max_windows=windows).ids


def missing_packages(adapter: Adapter, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Without them the engine was not given a chance, so there is nothing to write down."""
    return tuple(name for name in adapter.packages(checkpoint) if not version_of(name))


def package_versions(adapter: Adapter, checkpoint: Checkpoint) -> str:
    """Of those that matter beside the engine."""
    return ", ".join(f"{name} {version_of(name)}" for name in (*adapter.packages(checkpoint), "torch"))


def try_checkpoint(adapter: Adapter, checkpoint: Checkpoint, ids: Tensor, device: str) -> Seen:
    """What the engine raises is the answer that it does not load, but where it has an excuse."""
    try:
        dtype = adapter.load(checkpoint, ids.shape[1])
        there = adapter.logprobs(ids)
    except (Exception, SystemExit) as error:
        said = first_line(error)
        return Seen(None if any(excuse in said for excuse in adapter.excuses) else False, said)
    finally:
        adapter.forget()
    try:
        here = reference_logprobs(checkpoint, ids, dtype, device)
    except Exception as error:
        return Seen(None, f"our own reference failed: {first_line(error)}")
    return Seen(
        loads=True,
        dtype_there=dtype,
        dtype_here=dtype,
        perplexity_there=round(perplexity_of(-float(there.mean())), 4),
        perplexity_here=round(perplexity_of(-float(here.mean())), 4),
        difference=round(float((there - here).abs().mean()), 5),
    )


def reference_logprobs(checkpoint: Checkpoint, ids: Tensor, dtype: str, device: str) -> Tensor:
    """What the checkpoint means: decoded weights, activations rounded as they are served."""
    predictor = load_predictor(checkpoint.folder, window=ids.shape[1], dtype=dtype, device=device)
    found = torch.stack([-token_losses(predictor.logits(row).cpu(), row[1:]) for row in ids])
    del predictor
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def first_line(error: BaseException) -> str:
    """Engines explain themselves at length, and wrap what went wrong: the innermost reason, its first line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines[1:] if len(lines) > 1 and "validation error" in lines[0] else lines  # pydantic's headline
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return said if len(said) <= _LONGEST_REASON else said[: _LONGEST_REASON - 3] + "..."
