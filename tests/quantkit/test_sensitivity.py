"""Sensitivities: streams carried block by block give what running a whole damaged model gives; predictions hold."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from long_cases import others_long
from quantkit.arch import FAMILIES, family_of
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_divergence
from quantkit.errors import InputError
from quantkit.expert_modules import module_name
from quantkit.formats import CtPacked, Format, IntegerFormat
from quantkit.methods import Method
from quantkit.methods.awq import AwqMethod
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.method import ScaleChoice, Tie
from quantkit.methods.rtn import RtnMethod
from quantkit.methods.sensitivity import Sensitivity, candidates, probe_for, rounding_errors
from quantkit.methods.statistics import InputStatistics
from quantkit.passes import sensitivity
from quantkit.passes.folding import tied_heads
from quantkit.passes.sensitivity import SCORED, SensitivityPass
from quantkit.reference import load_reference, load_tokenizer
from quantkit.sources import model_folder
from tiny_models import save_model

W3 = CtPacked(bits=3, group_size=32, dtype="float32")


def small_model(name: str, folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = save_model(name, folder, sliding_window=8)
    return model


def sensitivities(
    folder: Path, scratch: Path, tokens: Tensor, method: Method, modules: str = "", fmt: IntegerFormat = W3
) -> list[Sensitivity]:
    source = Checkpoint(folder)
    family = family_of(source.config)
    chosen = {name: fmt for name in family.linears(source.config) if modules in name}
    return SensitivityPass(source, family, chosen, method, "cpu", scratch).run(tokens, 3.5)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3"])
def test_streams_equal_a_whole_model_with_one_group_rounded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "fast_products", lambda _: nullcontext())  # the whole model has none
    model = small_model(name, tmp_path)
    tokens = torch.randint(1, 96, (4 * SCORED, 24))
    found = sensitivities(tmp_path, tmp_path, tokens, RtnMethod())
    assert [each.modules for each in found] == FAMILIES[name].linear_groups(Checkpoint(tmp_path).config)
    with torch.no_grad():
        base = model(tokens[:SCORED]).logits.flatten(0, 1)
        for each in found:
            kept = {module: model.get_submodule(module).weight.data for module in each.modules}
            for module, weight in kept.items():
                model.get_submodule(module).weight.data = W3.quantize(weight).dequantize()
            expected = float(token_divergence(base, model(tokens[:SCORED]).logits.flatten(0, 1)).mean())
            for module, weight in kept.items():
                model.get_submodule(module).weight.data = weight
            assert each.kl == pytest.approx(expected, rel=1e-3), each.modules
            assert each.kl > 1e-5


class Doubling(RtnMethod):
    """Plain rounding after scales that grow from column to column."""

    @property
    def scales_inputs(self) -> bool:
        return True

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        return ScaleChoice(tie(torch.linspace(0.5, 4.0, weight.shape[1])), 0.0, 1.0)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_probes_are_scaled_as_the_recipe_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are multiplied before rounding and divided afterwards, as a fold would; heads that share values too."""
    monkeypatch.setattr(sensitivity, "fast_products", lambda _: nullcontext())
    small_model(name, tmp_path)
    model = load_reference(tmp_path, "float32")
    tokens = torch.randint(1, 96, (4 * SCORED, 24), generator=torch.Generator().manual_seed(1))
    found = sensitivities(tmp_path, tmp_path, tokens, Doubling(), "layers.1.")
    family, config = FAMILIES[name], Checkpoint(tmp_path).config
    with torch.no_grad():
        base = model(tokens[:SCORED]).logits.flatten(0, 1)
        for each in found:
            linears = [model.get_submodule(module_name(family, module)) for module in each.modules]
            kept = [linear.weight.data.clone() for linear in linears]
            for linear in linears:
                scales = torch.linspace(0.5, 4.0, linear.weight.shape[1])
                if "o_proj" in each.modules[0]:
                    head = family.size_of_head(config)
                    scales = tied_heads(config["num_key_value_heads"] * head, len(scales), head)(scales)
                linear.weight.data = each.probe.quantize(linear.weight.data * scales).dequantize() / scales
            expected = float(token_divergence(base, model(tokens[:SCORED]).logits.flatten(0, 1)).mean())
            for linear, weight in zip(linears, kept, strict=True):
                linear.weight.data = weight
            assert each.kl == pytest.approx(expected, rel=1e-3), each.modules


def test_scales_that_gain_make_a_group_less_sensitive(tmp_path: Path) -> None:
    tokens = torch.randint(1, 96, (4 * SCORED, 24), generator=torch.Generator().manual_seed(1))
    small_model("llama", tmp_path)
    scaled, plain = (
        sensitivities(tmp_path, tmp_path, tokens, method, "down_proj") for method in (AwqMethod(points=8), Unscaled())
    )
    for one, other in zip(scaled, plain, strict=True):
        assert sum(one.errors.values()) < sum(other.errors.values())


class Unscaled(AwqMethod):
    """What AWQ rounds to without its scales."""

    @property
    def scales_inputs(self) -> bool:
        return False


def test_streams_on_disk_and_one_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model("llama", tmp_path)
    tokens = torch.randint(1, 96, (6, 24))
    in_memory = sensitivities(tmp_path, tmp_path, tokens, GptqMethod())
    monkeypatch.setattr(sensitivity, "choose_place", lambda *_: "disk")
    source = Checkpoint(tmp_path)
    chosen = dict.fromkeys(FAMILIES["llama"].linears(source.config), W3)
    work = SensitivityPass(source, FAMILIES["llama"], chosen, GptqMethod(), "cpu", tmp_path)
    seen = []

    def look(item: str, total: int) -> None:
        seen.append(item.split()[0])
        assert total == 8
        assert sum(not block.self_attn.o_proj.weight.is_meta for block in work.runner.blocks) == 1

    assert work.run(tokens, 3.5, look) == in_memory
    assert list(tmp_path.glob("activations-*"))
    assert seen == [each.modules[0] for each in in_memory]


def test_long_sequences_are_cut_and_few_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model("llama", tmp_path)
    tokens = torch.randint(1, 96, (2, 50))
    monkeypatch.setattr(sensitivity, "LENGTH", 24)
    pieces = torch.cat([tokens[:, :24], tokens[:, 24:48]])
    assert sensitivities(tmp_path, tmp_path, tokens, GptqMethod()) == sensitivities(
        tmp_path, tmp_path, pieces, GptqMethod()
    )
    one = sensitivities(tmp_path, tmp_path, tokens[:1, :24], GptqMethod())
    assert all(each.kl > 0 for each in one)


def test_kept_layers_are_not_measured(tmp_path: Path) -> None:
    small_model("llama", tmp_path)
    tokens = torch.randint(1, 96, (6, 24))
    every = sensitivities(tmp_path, tmp_path, tokens, RtnMethod())
    some = sensitivities(tmp_path, tmp_path, tokens, RtnMethod(), modules="layers.1.mlp")
    assert [each.modules[0] for each in some] == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"]
    assert some == every[6:]


def test_inputs_that_are_not_finite_name_the_layer(tmp_path: Path) -> None:
    model = small_model("llama", tmp_path)
    model.get_submodule("model.layers.1.mlp.up_proj").weight.data.fill_(1e30)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"^model\.layers\.1\.mlp\.down_proj: "):
        sensitivities(tmp_path, tmp_path, torch.randint(1, 96, (6, 24)), GptqMethod())


@pytest.mark.parametrize(("model", "block"), others_long([("demo-draft", "layers.1."), ("demo", "layers.2.")], ()))
def test_predictions_hold_for_schemes_that_were_not_measured(
    model: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a bundled model: 3 bits in groups of 64 are measured, then other schemes, and compared."""
    folder = model_folder(model)
    tokens = Calibration(samples=12, seq_len=128).tokens(load_tokenizer(folder), 128)
    fmt = CtPacked(bits=3, group_size=64)
    predicted = sensitivities(folder, tmp_path, tokens, GptqMethod(), block, fmt)
    for other, least, most in ((replace(fmt, bits=4, group_size=128), 0.75, 1.3), (replace(fmt, bits=2), 0.8, 1.8)):
        monkeypatch.setattr(sensitivity, "probe_for", lambda *_, other=other: other)
        measured = sensitivities(folder, tmp_path, tokens, GptqMethod(), block, fmt)
        for one, another in zip(predicted, measured, strict=True):
            assert least < another.kl / one.divergence(other) < most, (one.modules, other)


def test_group_sizes_that_do_not_divide_are_left_out() -> None:
    fmt = CtPacked(bits=4, group_size=64, sym=False)
    sizes = {inputs: {each.group_size for each in candidates(fmt, inputs)} for inputs in (256, 192, 96, 100)}
    assert sizes == {256: {32, 64, 128}, 192: {32, 64}, 96: {32}, 100: {-1}}
    assert all(not each.sym for each in candidates(fmt, 256))
    assert {each.bits for each in candidates(fmt, 256)} == {2, 3, 4, 5, 6, 8}
    assert [probe_for(fmt, inputs, 3.5).group_size for inputs in (256, 96, 100)] == [64, 32, -1]
    assert [probe_for(fmt, 256, target).bits for target in (2.5, 3.1, 3.25, 6)] == [2, 2, 3, 3]


def test_errors_fall_with_bits_and_with_smaller_groups() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(200, 256), torch.randn(1000, 256)
    schemes = candidates(CtPacked(), 256)
    errors = rounding_errors(weight, schemes, inputs.T @ inputs, search=True)
    plain = rounding_errors(weight, schemes, inputs.T @ inputs, search=False)
    for fmt in schemes:
        assert errors[fmt] <= plain[fmt] * 1.01
        for other in schemes:
            if fmt.bits > other.bits or (fmt.bits == other.bits and fmt.group_size < other.group_size):
                assert errors[fmt] < errors[other]


def test_a_layer_that_calibration_never_reached_costs_nothing() -> None:
    errors = dict.fromkeys(candidates(CtPacked(), 64), 0.0)
    assert Sensitivity(("a",), CtPacked(bits=3, group_size=64), 0.0, errors).divergence(next(iter(errors))) == 0
