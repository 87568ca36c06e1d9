"""Perplexity, bits per byte, KL divergence and agreement of first choices, in one pass over the windows.

Perplexity asks how well a model knows a text. KL divergence asks what quantization changed, also where the change
happened to help; it needs far fewer tokens for a clear answer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from quantkit.divergence import perplexity_of, pieces, token_divergence, token_losses
from quantkit.errors import InputError, QuantkitError
from quantkit.eval.quality.bootstrap import Interval, Resamples
from quantkit.eval.quality.predictors import Predictor
from quantkit.eval.quality.windows import Windows
from quantkit.progress import Progress, silent
from quantkit.reference import load_tokenizer

_INTERVALS = ("perplexity", "bits_per_byte", "base_perplexity", "perplexity_ratio", "kl", "kl_p99", "top1_agreement")
_BY_WINDOW = ("window_losses", "window_kl")
_LATER = (*_BY_WINDOW, "null_kl")  # fields that older files lack


@dataclass(frozen=True)
class QualityResult:
    """What was measured, and all that is needed to measure it again. None: no base to compare with."""

    perplexity: Interval
    bits_per_byte: Interval
    base_perplexity: Interval | None  # this and what follows: over the first `compared_windows`
    perplexity_ratio: Interval | None  # model / base, from paired differences: narrower than the two perplexities
    kl: Interval | None  # KL(base || model), nats, mean over predicted tokens
    kl_p99: Interval | None  # 99 of 100 predicted tokens have no more
    top1_agreement: Interval | None  # share of predicted tokens where both prefer the same one
    tokens: int  # predicted ones
    bytes: int
    windows: int
    window: int
    compared_windows: int
    text: str
    protocol: str
    backend: str
    dtype: str
    device: str
    arithmetic: str
    seed: int  # of the bootstrap
    window_losses: tuple[float, ...] | None = None  # mean of every window, nats; None: measured before they were kept
    window_kl: tuple[float, ...] | None = None  # the same of KL divergence, of the compared windows
    null_kl: Interval | None = None  # KL(base in float32 || base as it was computed here); None: not asked for

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> QualityResult:
        values = {field.name: given[field.name] for field in fields(cls) if field.name not in _LATER}
        for name in _INTERVALS:
            values[name] = None if values[name] is None else Interval.from_dict(values[name])
        for name in _BY_WINDOW:
            values[name] = None if given.get(name) is None else tuple(given[name])
        null = given.get("null_kl")
        return cls(**values, null_kl=None if null is None else Interval.from_dict(null))


@dataclass(frozen=True, eq=False)
class _Compared:
    """Of the windows that the base saw too, float64 [windows, tokens]."""

    base_losses: Tensor
    divergence: Tensor
    agreed: Tensor


def measure_quality(
    model: Predictor,
    windows: Windows,
    base: Predictor | None = None,
    *,
    base_windows: int | None = None,
    on_window: Progress = silent,
    seed: int = 0,
) -> QualityResult:
    """Quality of a model on windows, compared with `base` on the first `base_windows` of them (None: on all)."""
    _check_vocabulary("model", model, windows)
    if base is not None:
        _check_vocabulary("base", base, windows)
        check_comparable(model, base, windows)
    losses, compared = _run(model, windows, base, base_windows, on_window)
    everything = Resamples.draw(len(windows), seed)
    tokens, sizes = _token_counts(losses), torch.tensor(windows.window_bytes, dtype=torch.float64)
    how = model.describe()
    return QualityResult(
        perplexity=everything.ratio(losses.sum(1), tokens).scaled(perplexity_of),
        bits_per_byte=everything.ratio(losses.sum(1), sizes).scaled(lambda nats: nats / math.log(2)),
        **_comparison(losses, compared, seed),
        tokens=windows.tokens,
        bytes=windows.bytes,
        windows=len(windows),
        window=windows.window,
        text=windows.text,
        protocol=windows.protocol,
        backend=how.backend,
        dtype=how.dtype,
        device=how.device,
        arithmetic=str(how),
        seed=seed,
        window_losses=_window_means(losses),
    )


def check_comparable(model: Predictor, base: Predictor, windows: Windows) -> None:
    """Refuses a base that numbers tokens otherwise: comparing the two would compare apples with pears."""
    if model.vocab_size != base.vocab_size:
        raise InputError(
            f"the base has {base.vocab_size} tokens, the model {model.vocab_size}; choose the model it was made from"
        )
    folders = [folder.resolve() for folder in (model.folder, base.folder)]
    if folders[0] == folders[1] or not all(any(folder.glob("tokenizer*")) for folder in folders):
        return  # without tokenizers, ids are all that there is
    own, other = (load_tokenizer(folder) for folder in folders)
    texts = [own.decode(ids) for ids in windows.ids[:8]]
    encoded = [tokenizer(texts, add_special_tokens=False)["input_ids"] for tokenizer in (own, other)]
    if encoded[0] != encoded[1]:
        raise InputError(
            f"the tokenizers of {model.folder} and {base.folder} read {windows.text} as different tokens, so their "
            "predictions do not compare; choose the model it was made from"
        )


def _check_vocabulary(role: str, predictor: Predictor, windows: Windows) -> None:
    highest = int(windows.ids.max())
    if highest >= predictor.vocab_size:
        raise InputError(
            f"the text has token {highest}, but the {role} {predictor.folder} knows {predictor.vocab_size} tokens; "
            "read the text with the model's own tokenizer"
        )


def _run(
    model: Predictor, windows: Windows, base: Predictor | None, base_windows: int | None, on_window: Progress
) -> tuple[Tensor, _Compared | None]:
    """Losses of all tokens, float64 [windows, tokens], and the comparison of the first windows."""
    losses, base_losses, divergence, agreed = [], [], [], []
    compared = 0 if base is None else len(windows.first(base_windows))
    for index, ids in enumerate(windows.ids):
        logits = model.logits(ids)
        losses.append(_losses(logits, ids, "model", index))
        if base is not None and index < compared:
            expected = base.logits(ids).to(logits.device)
            base_losses.append(_losses(expected, ids, "base", index))
            divergence.append(token_divergence(expected, logits).cpu())
            agreed.append((expected.argmax(-1) == logits.argmax(-1)).double().cpu())
        on_window(f"window {index + 1}", len(windows))
    if not compared:
        return torch.stack(losses), None
    return torch.stack(losses), _Compared(torch.stack(base_losses), torch.stack(divergence), torch.stack(agreed))


@torch.inference_mode()
def _losses(logits: Tensor, ids: Tensor, role: str, index: int) -> Tensor:
    """Negative log-likelihood of every predicted token, nats, float64 [tokens] on the CPU."""
    if not all(bool(torch.isfinite(rows).all()) for rows in pieces(logits)):
        raise QuantkitError(
            f"the {role} gives NaN or Inf logits in window {index + 1}, no number would mean anything; its weights "
            "are damaged or overflow in this dtype: check them with quantkit inspect, or use --dtype float32"
        )
    return token_losses(logits, ids[1:].to(logits.device)).cpu()


def _comparison(losses: Tensor, compared: _Compared | None, seed: int) -> dict[str, Any]:
    """The fields of a result that need a base."""
    if compared is None:
        names = ("base_perplexity", "perplexity_ratio", "kl", "kl_p99", "top1_agreement", "window_kl")
        return {"compared_windows": 0} | dict.fromkeys(names)
    count = len(compared.base_losses)
    resamples, tokens = Resamples.draw(count, seed), _token_counts(compared.base_losses)
    differences = (losses[:count] - compared.base_losses).sum(1)
    return {
        "compared_windows": count,
        "base_perplexity": resamples.ratio(compared.base_losses.sum(1), tokens).scaled(perplexity_of),
        "perplexity_ratio": resamples.ratio(differences, tokens).scaled(perplexity_of),
        "kl": resamples.ratio(compared.divergence.sum(1), tokens),
        "kl_p99": resamples.quantile(compared.divergence, 0.99),
        "top1_agreement": resamples.ratio(compared.agreed.sum(1), tokens),
        "window_kl": _window_means(compared.divergence),
    }


def _window_means(values: Tensor) -> tuple[float, ...]:
    """Of values [windows, tokens]."""
    return tuple(values.mean(1).tolist())


def _token_counts(values: Tensor) -> Tensor:
    """Tokens of every window, float64 [windows]."""
    return torch.full((values.shape[0],), float(values.shape[1]), dtype=torch.float64)
