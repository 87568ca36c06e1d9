"""The output layer in 8 or 4 bits: what it computes, what it takes, what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import CtPacked
from quantkit.kernels.cpu.installed import can_compile
from quantkit.kernels.linear.op import prepare
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.layers import Linear
from quantkit.runtime.model.lm_head import head_in_bits, more_bytes
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.parallel.rank_memory import resident_bytes
from quantkit.runtime.startup import start_engine


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The meaning: rows in groups, symmetric."""
    group = next(size for size in (128, 64, 32, weight.shape[1]) if weight.shape[1] % size == 0)
    fmt = CtPacked(bits=bits, group_size=group if weight.shape[1] % 32 == 0 else -1, sym=True, dtype="float32")
    return fmt.quantize(weight).dequantize(torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("hidden", [256, 192, 96, 100])
def test_rows_are_rounded_in_groups(hidden: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.runtime.model.lm_head._ROWS", 128)  # three pieces
    weight = torch.randn(300, hidden, generator=torch.Generator().manual_seed(hidden))
    head = head_in_bits(Linear((weight,)), bits, torch.float32, lambda name, *given: prepare(*given, torch.float32))
    assert head.outputs == 300
    x = torch.randn(5, hidden)
    torch.testing.assert_close(head(x), x @ rounded(weight, bits).T, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(head(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_without_bits_nothing_changes() -> None:
    head = Linear((torch.randn(8, 32),))
    assert head_in_bits(head, None, torch.float32, prepare) is head  # type: ignore[arg-type]
    nobody = Linear(())
    assert head_in_bits(nobody, 8, torch.float32, prepare) is nobody  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_engine_computes_with_it(bits: int, tiny_model: Path) -> None:
    """Everything but the output layer is as before."""
    options = {"device": "cpu", "max_sequences": 4, "max_context": 64}
    plain = start_engine(tiny_model, EngineOptions(**options))
    engine = start_engine(tiny_model, EngineOptions(**options, head_bits=bits))
    before, after = plain.runner.decoder.weights, engine.runner.decoder.weights
    assert torch.equal(before.embedding, after.embedding)
    (weight,) = before.head.weights
    assert isinstance(weight, Tensor)
    hidden = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(after.head(hidden), hidden @ rounded(weight, bits).T, rtol=1e-4, atol=1e-4)
    expected = after.head(hidden).argmax(1)
    assert torch.equal(expected, (hidden @ rounded(weight, bits).T).argmax(1))


def test_answers_of_the_bundled_model(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    """Eight bits change nothing at the beginning of a greedy answer; other bits are refused in one line."""
    asked = ("generate", "demo", "The river", "--max-tokens", "4", "--device", "cpu")
    (code, plain, _), (rounded_code, eight, _) = run_cli(*asked), run_cli(*asked, "--head-bits", "8")
    assert code == rounded_code == 0
    assert plain == eight
    code, _, message = run_cli(*asked, "--head-bits", "5")
    assert code != 0
    assert "head_bits is 5, but must be 8 or 4" in message


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_bytes(bits: int, tied: bool, tiny_model: Path, family_model: Callable[[str], Path]) -> None:
    """A tied head becomes a weight of its own, or in 8 bits the embedding, too."""
    checkpoint = Checkpoint(family_model("gemma2") if tied else tiny_model)
    config = read_model_config(checkpoint.config)
    assert config.tied is tied
    device, dtype = torch.device("cpu"), torch.float32
    before, after = (
        resident_bytes(load_weights(checkpoint, config, dtype, device, head_bits=given)) for given in (None, bits)
    )
    if tied and bits == 8 and can_compile():
        assert after < before  # there is one matrix
    else:
        assert after - before == pytest.approx(more_bytes(config, dtype, bits), rel=0.02)
    assert (more_bytes(config, dtype, bits) > 0) is tied


def test_ranks_round_the_rows_they_have(tiny_model: Path) -> None:
    checkpoint = Checkpoint(tiny_model)
    config = read_model_config(checkpoint.config)
    cpu = torch.device("cpu")
    whole = load_weights(checkpoint, config, torch.float32, cpu, head_bits=4).head
    parts = [load_weights(checkpoint, config, torch.float32, cpu, ranks=Ranks(2, 1, rank), head_bits=4).head
             for rank in range(2)]  # fmt: skip
    x = torch.randn(3, config.hidden)
    torch.testing.assert_close(torch.cat([part(x) for part in parts], 1), whole(x))
    sizes = [more_bytes(config, torch.float32, 4, Ranks(2, 1, rank)) for rank in range(2)]
    assert sum(sizes) == pytest.approx(more_bytes(config, torch.float32, 4), abs=64)
    assert more_bytes(config, torch.float32, 4, Ranks(1, 2, 1)) == 0  # the last stage has no output layer


@pytest.mark.parametrize("bits", [0, 3, 16, 8.0, True, "8"])
def test_refuses_other_bits(bits: object) -> None:
    with pytest.raises(InputError, match=r"head_bits is .*, but must be 8 or 4"):
        EngineOptions(head_bits=bits)  # type: ignore[arg-type]


def test_refuses_a_head_that_is_quantized_already() -> None:
    fmt = CtPacked(bits=4, group_size=32, sym=True, dtype="float32")
    quantized = prepare(fmt, fmt.quantize(torch.randn(64, 32)), torch.float32)
    with pytest.raises(InputError, match="quantized output layer already"):
        head_in_bits(Linear((quantized,)), 8, torch.float32, prepare)  # type: ignore[arg-type]


def test_a_tied_embedding_is_read_from_the_head(family_model: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(family_model("gemma2"))
    config, cpu = read_model_config(checkpoint.config), torch.device("cpu")
    plain, eight = (load_weights(checkpoint, config, torch.float32, cpu, head_bits=bits) for bits in (None, 8))
    assert isinstance(plain.embedding, torch.Tensor)
    assert eight.embedding.shape == plain.embedding.shape
    if not can_compile():
        return
    ids = torch.tensor([0, 5, config.vocab - 1, -1, config.vocab])
    places, rows = eight.embedding.look_up(ids)  # type: ignore[union-attr]
    assert places.tolist() == [0, 1, 2, -1, -1]
    wanted = rounded(plain.embedding, 8)[ids[:3]]
    torch.testing.assert_close(rows[:3], wanted, rtol=1e-5, atol=1e-6)
