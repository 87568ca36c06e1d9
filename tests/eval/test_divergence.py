"""KL divergence against a straightforward second computation, and what `quantkit eval --base` reports."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit import divergence
from quantkit.bundled import HELDOUT_TEXT
from quantkit.divergence import token_divergence
from quantkit.errors import InputError
from quantkit.eval.divergence import measure_divergence
from quantkit.pipeline import quantize
from quantkit.reference import load_reference, load_tokenizer

Cli = Callable[..., tuple[int, str, str]]


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


def test_tokens_that_the_base_excludes_add_nothing() -> None:
    base, other = two_logits(5, 40)
    base[:, 7] = -torch.inf
    some = token_divergence(base, other)
    other[:, 7] = -torch.inf
    assert torch.isfinite(some).all()
    assert torch.isfinite(token_divergence(base, other)).all()
    assert bool((some > token_divergence(base, other)).all())


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "int8"
    quantize("demo", "llm-int8", folder)
    return folder


def test_what_is_rounded_more_diverges_more(int8: Path, tmp_path: Path) -> None:
    quantize("demo", "nf4", tmp_path / "nf4")
    base, tokenizer = load_reference("demo", "float32"), load_tokenizer("demo")
    models = [
        base,
        load_reference(int8, "float32"),
        load_reference(int8, "float32", activations="served"),
        load_reference(tmp_path / "nf4", "float32", activations="served"),
    ]
    found = [measure_divergence(base, model, tokenizer, HELDOUT_TEXT, window=256, max_windows=4) for model in models]
    assert (found[0].kl, found[0].top1_agreement) == (0, 1)
    assert 0 < found[1].kl < found[2].kl < 0.2 * found[3].kl
    assert found[3].top1_agreement < found[2].top1_agreement < 1
    assert (found[0].tokens, found[0].windows) == (4 * 255, 4)


def test_other_vocabularies_are_refused(tiny_model: Path) -> None:
    with pytest.raises(InputError, match="choose the model it was made from"):
        measure_divergence(load_reference(tiny_model), load_reference("demo"), load_tokenizer("demo"), HELDOUT_TEXT)


def test_the_command_reports_both(int8: Path, run_cli: Cli) -> None:
    args = ("eval", int8, "--base", "demo", "--window", 128, "--max-windows", 3, "--kl-windows", 2)
    served = json.loads(run_cli(*args, "--json")[1])
    exact = json.loads(run_cli(*args, "--json", "--exact-activations")[1])
    assert (served["activations"], exact["activations"]) == ("served", "exact")
    assert (served["windows"], served["divergence"]["windows"]) == (3, 2)
    assert 0 < exact["divergence"]["kl"] < served["divergence"]["kl"] < 0.1
    code, out, _ = run_cli(*args)
    assert code == 0
    assert f"perplexity {served['perplexity']:.4f}" in out
    assert f"KL divergence {served['divergence']['kl']:.5f} nats per token from demo" in out
    assert f"{served['divergence']['top1_agreement']:.2%}" in out


def test_kl_windows_without_a_base_are_refused(run_cli: Cli) -> None:
    code, _, err = run_cli("eval", "demo", "--kl-windows", 2)
    assert code == 2
    assert "--base" in err
