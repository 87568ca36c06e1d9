"""`quantkit.evaluate`: a model's quality on a text, by itself or against the model it was made from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.bundled import HELDOUT_TEXT
from quantkit.defaults import COMPARED_WINDOWS, DEVICE, WINDOW
from quantkit.devices import resolve_device
from quantkit.eval.quality.measure import QualityResult, measure_quality
from quantkit.eval.quality.predictors import load_predictor
from quantkit.eval.quality.windows import check_source, read_windows
from quantkit.progress import Progress, silent
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

Watch = Callable[[str], AbstractContextManager[Progress]]  # a name -> what shows how far it is


def _unwatched(name: str) -> AbstractContextManager[Progress]:
    return nullcontext(silent)


def evaluate(
    model: str | Path,
    base: str | Path | None = None,
    *,
    text: str | Path = HELDOUT_TEXT,
    window: int = WINDOW,
    max_windows: int | None = None,
    compared_windows: int = COMPARED_WINDOWS,
    device: str = DEVICE,
    seed: int = 0,
    watch: Watch = _unwatched,
    head_bits: int | None = None,
    kv_dtype: str | None = None,
    arithmetic: str | None = None,
    start_token: bool = True,
    null_kl: bool = False,
    **how: Any,
) -> QualityResult:
    """Perplexity of a model, quantized or not, with 95 % intervals; with `base` also how far their predictions differ.

    `text` is a UTF-8 file, or `wikitext2` or `c4` of the hub; `max_windows` of it are read, and `base` is compared on
    the first `compared_windows`. `how` is passed to `load_predictor`: backend ("reference" or "runtime"), dtype,
    activations, step_tokens, ranks. `head_bits` rounds the output layer of `model` alone; `kv_dtype` is the kind of its
    KV cache alone, `arithmetic` that of its packed weights alone. `start_token`: windows begin with the token that the
    tokenizer puts before every text, where it does. `null_kl`: also how far `base` is from itself in float32, which is
    what the arithmetic alone adds to KL; `base` is loaded once more for it.
    """
    check_source(text)
    device = resolve_device(device)
    for one in (model, base or model):
        model_folder(one)  # what is not there is told before minutes of loading
    with watch("loading") as advance:
        own: dict[str, Any] = {"head_bits": head_bits, "kv_dtype": kv_dtype, "arithmetic": arithmetic}
        predictor = load_predictor(model, window=window, device=device, on_part=advance, **own, **how)
    windows = read_windows(load_tokenizer(model), text, window=window, max_windows=max_windows, begin=start_token)
    reference = None
    if base is not None:
        with watch("loading base") as advance:
            reference = load_predictor(base, window=window, device=device, on_part=advance, **how)
    with watch("windows") as advance:
        found = measure_quality(
            predictor, windows, reference, base_windows=compared_windows, on_window=advance, seed=seed
        )
    if base is None or reference is None or not null_kl:
        return found
    with watch("loading base in float32") as advance:
        exact = load_predictor(base, window=window, device=device, dtype="float32", on_part=advance)
    with watch("windows of base") as advance:
        null = measure_quality(reference, windows.first(compared_windows), exact, on_window=advance, seed=seed)
    return replace(found, null_kl=null.kl)
