"""A method with candidates: each block is quantized by the one that errs least on sequences held back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from long_cases import others_long
from quantkit import working_memory
from quantkit.arch import family_of
from quantkit.blocks import BlockRunner, run_block
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.formats import CtPacked, Format
from quantkit.methods import Method
from quantkit.methods.awq import AwqMethod
from quantkit.methods.best import CANDIDATES, BestMethod
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.held_back import fitted, judged
from quantkit.methods.method import Rounded
from quantkit.methods.statistics import InputStatistics
from quantkit.passes import CalibratedPass, QuantizedBlock
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

FORMAT = CtPacked(bits=3, group_size=32, sym=False)
LENGTH = 24


@dataclass(frozen=True)
class ShrinkMethod(Method):
    """Rounds weights of one block made smaller, those of the others as they are: it knows a block by its weights."""

    name: ClassVar[str] = "shrink"
    largest: float = 0.0  # of the weights that it ruins

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        ruined = (float(weight.abs().max()) > 10) == (self.largest > 10)
        return Rounded(fmt.quantize(weight * 0.5 if ruined else weight), notes={"seen": float(inputs.tokens)})


@dataclass(frozen=True)
class EitherMethod(ShrinkMethod):
    """One of its candidates ruins blocks of large weights, the other all others."""

    name: ClassVar[str] = "either"

    @property
    def candidates(self) -> Mapping[str, Method]:
        return {"large": ShrinkMethod(largest=100), "small": ShrinkMethod(largest=1)}


@dataclass(frozen=True)
class QuickMethod(BestMethod):
    """The same choice between candidates that search less."""

    @property
    def candidates(self) -> Mapping[str, Method]:
        return {
            "awq+gptq": GptqMethod(scaling="awq", grid="minmax"),
            "awq": AwqMethod(points=3, clip=False),
            "gptq": GptqMethod(grid="minmax"),
        }


def random_tokens(count: int) -> Tensor:
    return torch.randint(3, 112, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def pass_of(folder: Path, method: Method, scratch: Path, fmt: Format = FORMAT) -> CalibratedPass:
    source = Checkpoint(folder)
    family = family_of(source.config)
    return CalibratedPass(source, family, dict.fromkeys(family.linears(source.config), fmt), method, "cpu", scratch)


def blocks_of(
    folder: Path, method: Method, tokens: Tensor, scratch: Path, fmt: Format = FORMAT
) -> Iterator[QuantizedBlock]:
    work = pass_of(folder, method, scratch, fmt)
    work.begin(tokens)
    return work.blocks(lambda _: None)


@torch.no_grad()
def error_by_hand(folder: Path, tokens: Tensor, block: QuantizedBlock) -> float:
    """Of the outputs of the first block on the last eighth of the sequences."""
    source = Checkpoint(folder)
    runner = BlockRunner(source, family_of(source.config))
    hidden = runner.embed(tokens[list(judged(len(tokens)))])
    parts = runner.load(0, runner.arguments(tokens.shape[1])[0])
    target = run_block(parts, hidden)
    weights = {f"{each.module}.weight": each.quantized.dequantize() for each in block.layers}
    for name, tensor in (weights | dict(block.changed)).items():
        parts[0].block.get_parameter(name.removeprefix(f"{runner.family.blocks}.0.")).copy_(tensor)
    return float((run_block(parts, hidden) - target).square().sum() / target.square().sum())


def choices(blocks: list[QuantizedBlock]) -> list[str]:
    """What each block was made by; it must be the one of the least error."""
    for block in blocks:
        assert len({str((layer.log["chosen"], layer.log["block_errors"])) for layer in block.layers}) == 1
        errors = block.layers[0].log["block_errors"]
        assert errors[block.layers[0].log["chosen"]] == min(errors.values())
    return [block.layers[0].log["chosen"] for block in blocks]


@pytest.fixture
def uneven(family_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Llama whose second block has weights above 10, in rows whose outputs hardly count."""
    folder = tmp_path / "uneven"
    folder.mkdir()
    for file in family_model("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers.1." in name and name.endswith("_proj.weight"):
            tensor[0, 0] = 11
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_each_block_takes_the_candidate_that_suits_it(uneven: Path, tmp_path: Path) -> None:
    tokens = random_tokens(16)
    blocks = list(blocks_of(uneven, EitherMethod(), tokens, tmp_path))
    assert choices(blocks) == ["large", "small"]
    for layer in (layer for block in blocks for layer in block.layers):
        assert layer.log["seen"] == tokens.numel()  # what is chosen is fitted to all sequences in the end


def test_candidates_never_see_what_judges_them(uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    original = CalibratedPass._statistics

    def statistics(*arguments: Any) -> InputStatistics:
        found = original(*arguments)
        seen.append((len(seen), found.tokens))
        return found

    monkeypatch.setattr(CalibratedPass, "_statistics", statistics)
    monkeypatch.setattr(working_memory, "BATCH_TOKENS", 5 * LENGTH)
    list(islice(blocks_of(uneven, EitherMethod(), random_tokens(16), tmp_path), 1))
    assert fitted(16) == 14
    assert [tokens for _, tokens in seen] == [14 * LENGTH] * 8 + [16 * LENGTH] * 4


@pytest.mark.parametrize("family", others_long(["gemma2", "mixtral", "llama"], ["gemma2"]))
def test_no_candidate_errs_less_than_the_chosen_one(
    family_model: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    folder, tokens = family_model(family), random_tokens(16)
    (block,) = islice(blocks_of(folder, QuickMethod(), tokens, tmp_path), 1)
    assert set(choices([block])) <= set(CANDIDATES)
    for name, logged in block.layers[0].log["block_errors"].items():
        (alone,) = islice(blocks_of(folder, QuickMethod().candidates[name], tokens[: fitted(16)], tmp_path), 1)
        assert logged == pytest.approx(error_by_hand(folder, tokens, alone), rel=0.02)  # bfloat16 products


@pytest.mark.parametrize("family", others_long(["gemma2", "mixtral"], ["gemma2"]))
@pytest.mark.parametrize("name", others_long(list(CANDIDATES), ["gptq"]))
def test_a_block_is_exactly_what_its_candidate_makes_of_it(
    family_model: Callable[[str], Path], family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where candidates before it have scaled the block's norms: one without scaling finds them as they were."""
    monkeypatch.setattr(working_memory, "BATCH_TOKENS", 2 * LENGTH)  # H is summed in the same order with two held back
    folder, tokens = family_model(family), random_tokens(16)
    (alone,) = islice(blocks_of(folder, QuickMethod().candidates[name], tokens, tmp_path), 1)
    errors = iter([float(each != name) for each in CANDIDATES])
    monkeypatch.setattr(CalibratedPass, "_error", lambda _: next(errors))
    (block,) = islice(blocks_of(folder, QuickMethod(), tokens, tmp_path), 1)
    assert block.layers[0].log["chosen"] == name
    assert bool(block.changed) == (name != "gptq")
    assert block.changed.keys() == alone.changed.keys()
    assert all(torch.equal(block.changed[key], alone.changed[key]) for key in alone.changed)
    for layer, other in zip(block.layers, alone.layers, strict=True):
        assert torch.equal(layer.quantized.dequantize(), other.quantized.dequantize())


def test_it_goes_on_after_any_block(uneven: Path, tmp_path: Path) -> None:
    tokens = random_tokens(16)
    work = pass_of(uneven, EitherMethod(), tmp_path)
    work.begin(tokens)
    blocks = work.blocks(lambda _: None)
    next(blocks)
    states = {name: batch.clone() for name, batch in work.states().items()}
    (expected,) = blocks
    again = pass_of(uneven, EitherMethod(), tmp_path)
    again.resume(tokens, iter(states.items()))
    (found,) = again.blocks(lambda _: None, first=1)
    assert [layer.log for layer in found.layers] == [layer.log for layer in expected.layers]
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(layer.quantized.dequantize(), other.quantized.dequantize())


@pytest.mark.parametrize(
    ("model", "method"),
    others_long([("demo-draft", QuickMethod()), ("demo", BestMethod())], [("demo-draft", QuickMethod())]),
)
def test_trained_models_choose_by_the_least_error(model: str, method: Method, tmp_path: Path) -> None:
    folder = model_folder(model)
    tokens = Calibration(samples=16, seq_len=64).tokens(load_tokenizer(folder), 64)
    blocks = list(blocks_of(folder, method, tokens, tmp_path, CtPacked(bits=3, group_size=64, sym=False)))
    choices(blocks)
    assert all(0 < error < 1 for block in blocks for error in block.layers[0].log["block_errors"].values())


@pytest.mark.long
@pytest.mark.parametrize("bits", [4, 3])
def test_the_best_loses_no_more_than_either(bits: int, tmp_path: Path) -> None:
    losses = {}
    for method in ("best", "awq", "gptq"):
        recipe = load_recipe("tuned-w3g64", [f"method={method}", f"format.bits={bits}"])
        data = Calibration(samples=32, seq_len=256)
        report = quantkit.quantize("demo-draft", recipe, tmp_path / method, calibration=data, quality_windows=4)
        assert report.quality is not None
        losses[method] = report.quality.kl
    assert losses["best"] <= 1.02 * min(losses["awq"], losses["gptq"])
