"""Learned rounding of blocks: what it gains, that it never loses, and what it refuses."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.arch import FAMILIES, family_of
from quantkit.blocks import BlockRunner, run_block
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Awq, CtInt8, CtPacked, Gptq, IntegerFormat, Nf4
from quantkit.methods.tuned import TunedMethod
from quantkit.passes import CalibratedPass, QuantizedBlock
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

pytestmark = pytest.mark.usefixtures("few_scales")

FORMATS = {"sym": CtPacked(bits=3, group_size=64), "asym": CtPacked(bits=3, group_size=64, sym=False)}
SHORT = ("llama", "gemma2", "mixtral")  # families that are tuned in every run of the tests
Tune = Callable[..., list[QuantizedBlock]]


def blocks_of(
    source: Checkpoint, tokens: Tensor, fmt: IntegerFormat, scratch: Path, **options: Any
) -> Iterator[QuantizedBlock]:
    family = family_of(source.config)
    chosen = dict.fromkeys(family.linears(source.config), fmt)
    work = CalibratedPass(source, family, chosen, TunedMethod(**options), "cpu", scratch)
    work.begin(tokens)
    return work.blocks(lambda _: None)


@cache
def draft() -> tuple[Checkpoint, Tensor]:
    """The small bundled model, and tokens to tune it with."""
    source = Checkpoint(model_folder("demo-draft"))
    return source, Calibration(samples=48, seq_len=48).tokens(load_tokenizer(source.folder), 64)


@pytest.fixture(scope="module")
def tune(tmp_path_factory: pytest.TempPathFactory) -> Tune:
    """`tune(fmt, count=1, **options)`: the first blocks of the small bundled model."""

    def run(fmt: IntegerFormat, count: int = 1, **options: Any) -> list[QuantizedBlock]:
        return list(islice(blocks_of(*draft(), fmt, tmp_path_factory.mktemp("tuned"), **options), count))

    return run


def block_error(block: QuantizedBlock) -> float:
    """Of the first block, measured anew: squared error of its outputs, relative to their square."""
    source, tokens = draft()
    family = family_of(source.config)
    runner = BlockRunner(source, family)
    hidden = runner.embed(tokens)
    with torch.no_grad():
        parts = runner.load(0, runner.arguments(tokens.shape[1])[0])
        target = run_block(parts, hidden)
        prefix = f"{family.blocks}.0."
        for layer in block.layers:
            decoded = layer.quantized.dequantize()
            parts[0].block.get_parameter(f"{layer.module.removeprefix(prefix)}.weight").copy_(decoded)
        for name, tensor in block.changed.items():
            parts[0].block.get_parameter(name.removeprefix(prefix)).copy_(tensor)
        return float((run_block(parts, hidden) - target).square().sum() / target.square().sum())


@pytest.mark.parametrize("kind", [pytest.param("sym", marks=pytest.mark.long), "asym"])
def test_blocks_lose_less_than_gptq_leaves_them(tune: Tune, kind: str) -> None:
    blocks = tune(FORMATS[kind], count=2, steps=6, start="awq+gptq" if kind == "asym" else "gptq", target="layer")
    assert len(blocks) == 2
    for block in blocks:
        for layer in block.layers:
            log = layer.log
            assert log["start"] == "calibrated"
            assert log["block_start_loss"] == log["block_calibrated_loss"] < log["block_nearest_loss"]
            assert log["block_loss"] < log["block_calibrated_loss"]
            assert 1 <= log["step"] <= 6
            assert "loss" not in log  # GPTQ's is not that of these codes
    assert block_error(blocks[0]) == pytest.approx(blocks[0].layers[0].log["block_loss"], rel=0.05)  # bfloat16 products


@pytest.mark.long
def test_a_few_dozen_steps_beat_gptq_by_a_clear_margin(tune: Tune) -> None:
    (block,) = tune(FORMATS["sym"], steps=40, start="gptq", target="layer")
    log = block.layers[0].log
    assert log["block_loss"] < 0.9 * log["block_calibrated_loss"]
    assert log["step"] > 30


def test_adam_learns_too(tune: Tune) -> None:
    (block,) = tune(FORMATS["asym"], steps=6, lr=0.005, optimizer="adam", start="gptq")
    assert block.layers[0].log["block_loss"] < block.layers[0].log["block_calibrated_loss"]


def test_a_rate_that_ruins_the_block_leaves_the_start(tune: Tune) -> None:
    (block,) = tune(FORMATS["sym"], steps=2, lr=1.0, start="gptq")
    log = block.layers[0].log
    assert log["block_loss"] == log["block_start_loss"]
    assert log["step"] == 0


def test_the_same_seed_gives_the_same_codes(tune: Tune) -> None:
    def weights(**options: Any) -> Tensor:
        (block,) = tune(FORMATS["sym"], steps=2, start="gptq", target="layer", **options)
        assert block.layers[0].log["step"] > 0
        return torch.cat([layer.quantized.dequantize().flatten() for layer in block.layers])

    first = weights()
    assert torch.equal(first, weights())
    assert not torch.equal(first, weights(seed=1))


@pytest.mark.parametrize(
    "fmt", [Awq(group_size=64, sym=False), pytest.param(Gptq(group_size=64, sym=False), marks=pytest.mark.long)]
)
def test_what_is_stored_is_what_was_tuned(tune: Tune, fmt: IntegerFormat) -> None:
    (first,) = tune(fmt, steps=2)
    for layer in first.layers:
        assert torch.equal(fmt.unpack(fmt.pack(layer.quantized)).dequantize(), layer.quantized.dequantize())
    assert first.layers[0].log["block_loss"] <= first.layers[0].log["block_start_loss"]


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_every_family(name: str, family_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = Checkpoint(family_model(name))
    tokens = torch.randint(3, 112, (4, 24), generator=torch.Generator().manual_seed(0))
    fmt = CtPacked(bits=3, group_size=32, sym=False)
    blocks = list(blocks_of(source, tokens, fmt, tmp_path, steps=3, batch=4, lr=0.02))
    assert [layer.module for block in blocks for layer in block.layers] == family_of(source.config).linears(
        source.config
    )
    for block in blocks:
        log = block.layers[0].log
        assert (
            log["block_loss"] <= log["block_start_loss"] == min(log["block_calibrated_loss"], log["block_nearest_loss"])
        )


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    recipe = load_recipe("tuned-w3g64", ["method.steps=2", "method.start=gptq"])
    data = Calibration(samples=8, seq_len=32)

    def kill(item: str, _: int) -> None:
        if ".layers.1." in item:
            raise KeyboardInterrupt

    def run(name: str, **options: Any) -> Any:
        return quantkit.quantize("demo-draft", recipe, tmp_path / name, calibration=data, quality_windows=0, **options)

    report = run("whole")
    assert all(layer.log["block_loss"] <= layer.log["block_start_loss"] for layer in report.layers)
    with pytest.raises(KeyboardInterrupt):
        run("killed", on_layer=kill)
    run("killed")
    whole, killed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert whole == killed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method.steps=0", "'method.steps' is 0, but must be 1 to 100000"),
        ("method.steps=many", "'method.steps' is 'many', but must be a whole number"),
        ("method.batch=0", "'method.batch' is 0, but must be 1 to 1024"),
        ("method.lr=0", "'method.lr' is 0, but must be above 0 and at most 1"),
        ("method.lr=2.5", "'method.lr' is 2.5, but must be above 0 and at most 1"),
        ("method.seed=-1", "'method.seed' is -1, but must be 0 to"),
        ("method.optimizer=sgd", "'method.optimizer' is 'sgd', but must be one of sign, adam"),
        ("method.start=all", "'method.start' is 'all', but must be one of best, awq+gptq, awq, gptq"),
        ("method.stps=5", "unknown key 'method.stps' for method 'tuned'; did you mean 'steps'?"),
    ],
)
def test_wrong_options_are_refused(change: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        load_recipe("tuned-w4g64", [change])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_formats_that_it_cannot_learn_are_refused() -> None:
    with pytest.raises(InputError, match="method 'tuned' needs a format with an integer grid, not 'nf4'"):
        TunedMethod().check(Nf4())
    with pytest.raises(InputError, match="method 'tuned' learns weights for inputs in 16 bits, but 'ct-int8' rounds"):
        TunedMethod().check(CtInt8())
