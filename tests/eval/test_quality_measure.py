"""Perplexity and KL against straightforward second computations, and numbers that must not be given."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import divergence
from quantkit.bundled import HELDOUT_TEXT
from quantkit.divergence import perplexity_of, token_divergence
from quantkit.errors import InputError, QuantkitError
from quantkit.eval.quality.measure import QualityResult, measure_quality
from quantkit.eval.quality.predictors import BACKENDS, Predictor, load_predictor
from quantkit.eval.quality.windows import Windows, read_windows
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

Measured = Callable[..., QualityResult]


@cache
def heldout(window: int, count: int) -> Windows:
    return read_windows(load_tokenizer("demo"), HELDOUT_TEXT, window=window, max_windows=count)


@pytest.fixture(scope="module")
def measured(quantized_demo: Callable[..., Path], quantized_draft: Callable[..., Path]) -> Measured:
    """`measured(model, recipe)`: a bundled model by a recipe against itself unquantized, measured once."""

    @cache
    def base_of(model: str) -> tuple[Windows, Predictor]:
        window = 256 if model == "demo" else 128
        return heldout(window, 6), load_predictor(model, window=window)

    @cache
    def measure(model: str, recipe: str, activations: str = "served") -> QualityResult:
        windows, base = base_of(model)
        folder = (quantized_demo if model == "demo" else quantized_draft)(recipe)
        predictor = load_predictor(folder, window=windows.window, activations=activations)
        return measure_quality(predictor, windows, base, base_windows=5)

    return measure


def random_windows(vocabulary: int = 512) -> Windows:
    ids = torch.randint(vocabulary, (3, 40), generator=torch.Generator().manual_seed(0))
    return Windows(ids, "random", (100, 120, 90))


def test_equals_a_plain_transformers_script() -> None:
    folder = model_folder("demo-draft")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = HELDOUT_TEXT.read_text(encoding="utf-8")[:10_000]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    losses = []
    with torch.no_grad():
        for start in range(0, 4 * 256, 256):
            window = ids[None, start : start + 256]
            losses.append(float(model(window, labels=window).loss))
    expected = math.exp(sum(losses) / len(losses))
    windows = heldout(256, 4)
    for backend in BACKENDS:
        found = measure_quality(load_predictor("demo-draft", backend, window=256), windows)
        assert found.perplexity.value == pytest.approx(expected, rel=1e-5)
        nats = sum(losses) * 255
        assert found.bits_per_byte.value == pytest.approx(nats / math.log(2) / windows.bytes, rel=1e-5)
        assert (found.tokens, found.windows, found.bytes, found.backend) == (4 * 255, 4, windows.bytes, backend)
        assert found.kl is found.perplexity_ratio is None
        assert found.compared_windows == 0


@pytest.mark.parametrize("step_tokens", [None, 1, 7])
def test_a_model_does_not_differ_from_itself(step_tokens: int | None) -> None:
    windows = heldout(32 if step_tokens else 256, 2)
    reference = load_predictor("demo-draft", window=windows.window)
    runtime = load_predictor("demo-draft", "runtime", window=windows.window, step_tokens=step_tokens)
    for model, base in ((reference, reference), (runtime, runtime), (runtime, reference)):
        found = measure_quality(model, windows, base)
        assert found.kl
        assert found.top1_agreement
        assert found.perplexity_ratio
        assert abs(found.kl.value) < 1e-6
        assert found.top1_agreement.value == 1
        assert found.perplexity_ratio.value == pytest.approx(1, abs=1e-5)


# Two layers 256 wide lose far more to rounding than the five of `demo`: the order is the same, the sizes are not.
@pytest.mark.parametrize(("model", "least"), [("demo-draft", 0.01), pytest.param("demo", 0.4, marks=pytest.mark.long)])
def test_what_is_rounded_more_diverges_more(measured: Measured, model: str, least: float) -> None:
    asked = (("llm-int8", "exact"), ("llm-int8",), ("nf4",), ("rtn-w3g128",))
    results = [measured(model, *one) for one in asked]
    kl, tail, same = ([getattr(one, name).value for one in results] for name in ("kl", "kl_p99", "top1_agreement"))
    assert 0 < kl[0] < kl[1] < 0.2 * kl[2] < 0.1 * kl[3]
    assert 0 < tail[0] < tail[1] < tail[2] < tail[3]
    assert all(high > low for low, high in zip(kl, tail, strict=True))
    assert 1 > same[0] >= same[1] > same[2] > same[3] > least
    assert {(one.windows, one.compared_windows) for one in results} == {(6, 5)}


@pytest.mark.parametrize(
    ("model", "nothing", "most", "times"),
    [("demo-draft", 0.01, 2, 2), pytest.param("demo", 0.005, 0.2, 3, marks=pytest.mark.long)],
)
def test_formats_order_as_their_bits_do(
    measured: Measured, model: str, nothing: float, most: float, times: float
) -> None:
    """8 bits cost next to nothing, plain 4 bits measurably, 3 bits clearly."""
    ratios = [measured(model, recipe).perplexity_ratio for recipe in ("llm-int8", "nf4", "rtn-w4g128", "rtn-w3g128")]
    int8, nf4, w4, w3 = (math.log(ratio.value) for ratio in ratios if ratio)
    assert abs(int8) < nothing
    assert nothing < nf4 < w4 + 0.05
    assert nothing < w4 < most
    assert w3 > times * w4


@pytest.mark.parametrize(
    ("model", "recipe"), [("demo-draft", "llm-int8"), pytest.param("demo", "nf4", marks=pytest.mark.long)]
)
def test_paired_differences_tell_more_than_two_perplexities(measured: Measured, model: str, recipe: str) -> None:
    """The interval of the ratio is far narrower than those of the two perplexities, where rounding costs little."""
    found = measured(model, recipe)
    base, ratio = found.base_perplexity, found.perplexity_ratio
    assert base
    assert base.low
    assert base.high
    assert ratio
    assert ratio.low
    assert ratio.high
    assert ratio.low < ratio.value < ratio.high < 1.2
    assert ratio.high - ratio.low < 0.2 * (base.high - base.low) / base.value


def test_the_ratio_is_that_of_the_perplexities(tiny_model: Path) -> None:
    model, base = load_predictor(tiny_model, window=40), load_predictor(tiny_model, window=40, dtype="bfloat16")
    found = measure_quality(model, random_windows(), base)
    assert found.base_perplexity
    assert found.perplexity_ratio
    assert found.perplexity_ratio.value != 1
    expected = found.perplexity.value / found.base_perplexity.value
    assert found.perplexity_ratio.value == pytest.approx(expected, rel=1e-9)


def test_a_result_survives_json(tiny_model: Path) -> None:
    model, base = (load_predictor(tiny_model, backend, window=40) for backend in reversed(BACKENDS))
    for given in (None, base):
        found = measure_quality(model, random_windows(), given, seed=7)
        assert QualityResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.seed == 7
    single = measure_quality(model, random_windows().first(1), base)
    assert single.perplexity.low is None
    assert "NaN" not in json.dumps(single.to_dict())
    assert QualityResult.from_dict(json.loads(json.dumps(single.to_dict()))) == single


def test_nan_weights_give_no_number(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    healthy, broken = load_predictor(tiny_model, window=40), load_predictor(folder, window=40)
    for model, base, role in ((broken, None, "model"), (healthy, broken, "base")):
        with pytest.raises(QuantkitError, match=f"the {role} gives NaN or Inf logits in window 1"):
            measure_quality(model, random_windows(), base)
    with pytest.raises(QuantkitError, match=r"up_proj.weight holds 1 NaN"):
        load_predictor(folder, "runtime", window=40)


def renamed_tokens(folder: Path) -> Path:
    """The small bundled model with a tokenizer in which two frequent tokens have changed places."""
    shutil.copytree(model_folder("demo-draft"), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]
    file.write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_what_does_not_compare_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    demo, windows = load_predictor("demo-draft", window=40), heldout(40, 2)
    others: list[tuple[Predictor, Predictor, str]] = [
        (demo, load_predictor(tiny_model, window=40), "knows 512 tokens|choose the model it was made from"),
        (load_predictor(tiny_model, window=40), demo, "read the text with the model's own tokenizer"),
        (demo, load_predictor(renamed_tokens(tmp_path / "other"), window=40), "read heldout.txt as different tokens"),
    ]
    for model, base, words in others:
        with pytest.raises(InputError, match=words) as caught:
            measure_quality(model, windows, base)
        assert "\n" not in str(caught.value)
    few = Windows(torch.randint(500, (2, 40)), "few", (1, 1))
    with pytest.raises(InputError, match=r"the base has 512 tokens, the model .* choose the model it was made from"):
        measure_quality(demo, few, load_predictor(tiny_model, window=40))


def two_logits(positions: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    base = 4 * torch.randn(positions, vocabulary, generator=generator)
    return base, base + 0.3 * torch.randn(positions, vocabulary, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1, 700, 1 << 24])
def test_token_divergence_is_the_definition(chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_VALUES", chunk)
    base, other = (logits.to(dtype) for logits in two_logits(13, 300))
    p, q = base.double().softmax(-1), other.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1)
    found = token_divergence(base, other)
    assert found.shape == (13,)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert not token_divergence(base, base).any()


def test_a_perplexity_beyond_every_number_is_said_in_words() -> None:
    assert perplexity_of(2.0) == pytest.approx(math.e**2)
    assert perplexity_of(-1000.0) == 0.0
    with pytest.raises(QuantkitError, match=r"a token costs 1,234 nats, a perplexity beyond every number"):
        perplexity_of(1234.0)


def test_tokens_that_the_base_excludes_add_nothing() -> None:
    base, other = two_logits(5, 40)
    base[:, 7], other[:, 7] = -torch.inf, 3.0  # not so little that rounding hides it
    some = token_divergence(base, other)
    other[:, 7] = -torch.inf
    assert torch.isfinite(some).all()
    assert torch.isfinite(token_divergence(base, other)).all()
    assert bool((some > token_divergence(base, other)).all())
