"""The calibrated pass: block by block, resumable, whatever the batches and whichever layers are kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from long_cases import others_long
from pairwise import cover
from quantkit import working_memory
from quantkit.arch import GEMMA2, LLAMA, PHI3, QWEN2, Family
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import CtInt8, CtPacked, Format, Gptq, LlmInt8
from quantkit.methods import Method
from quantkit.methods.awq import AwqMethod
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.method import Rounded
from quantkit.methods.rtn import RtnMethod
from quantkit.methods.smoothquant import SmoothQuantMethod
from quantkit.methods.statistics import InputStatistics
from quantkit.passes import CalibratedPass, QuantizedBlock, calibrated

pytestmark = pytest.mark.usefixtures("few_scales")

STAGES = LLAMA.stages(0, {})
LINEARS = [stage.linears for stage in STAGES]
KEPT = ("qkv", "o", "gate up", "down", "qkv gate up")
LAYERS = 3
LENGTH = 48  # tokens of a calibration sequence
FOUR_BITS = CtPacked(group_size=32, sym=False, dtype="float32")
EIGHT_BITS = CtPacked(bits=8, group_size=32, sym=False, dtype="float32")
METHODS: dict[str, tuple[Method, Format]] = {
    "gptq": (GptqMethod(target="layer"), FOUR_BITS),
    "gptq desc_act": (GptqMethod(order="desc_act", target="layer"), Gptq(group_size=32, act_order=True)),
    "gptq with scales": (GptqMethod(scaling="awq", target="layer"), FOUR_BITS),
    "gptq to the model": (GptqMethod(scaling="awq"), FOUR_BITS),
    "awq": (AwqMethod(points=3), FOUR_BITS),
    "awq without clip": (AwqMethod(points=3, clip=False), FOUR_BITS),
    "smoothquant": (SmoothQuantMethod(points=3), CtInt8()),
    "llm-int8": (RtnMethod(), LlmInt8()),
}

every_method = pytest.mark.parametrize(("method", "fmt"), METHODS.values(), ids=METHODS)
several_methods = pytest.mark.parametrize(
    ("method", "fmt"), others_long(METHODS, ("gptq to the model", "smoothquant", "llm-int8"))
)
Saver = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A saved model and its calibration tokens."""

    source: Checkpoint
    family: Family
    model: Any
    tokens: Tensor
    scratch: Path

    def begin(self, method: Method, fmt: Format, kept: tuple[str, ...] = ()) -> CalibratedPass:
        work = self.new(method, fmt, kept)
        work.begin(self.tokens)
        return work

    def new(self, method: Method, fmt: Format, kept: tuple[str, ...] = ()) -> CalibratedPass:
        chosen = {name: fmt for name in self.family.linears(self.source.config) if not name.endswith(kept)}
        return CalibratedPass(self.source, self.family, chosen, method, "cpu", self.scratch)


@pytest.fixture
def make_case(save_model: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    """13 sequences, in batches of 6, 6 and 1."""
    monkeypatch.setattr(working_memory, "BATCH_TOKENS", 6 * LENGTH + 7)

    def make(family: Family = LLAMA, **changes: Any) -> Case:
        model = save_model(family, tmp_path / "model", num_hidden_layers=LAYERS, **changes)
        tokens = torch.randint(1, 96, (13, LENGTH), generator=torch.Generator().manual_seed(3))
        return Case(Checkpoint(tmp_path / "model"), family, model, tokens, tmp_path)

    return make


@pytest.fixture
def case(make_case: Callable[..., Case]) -> Case:
    return make_case()


def ignore(_: object) -> None:
    """No progress is shown."""


def tensors_of(block: QuantizedBlock) -> Iterator[tuple[str, Tensor]]:
    """Everything that will be written of a block."""
    for layer in block.layers:
        for suffix, part in layer.fmt.pack(layer.quantized).items():
            yield f"{layer.module}.{suffix}", part
    yield from block.changed.items()


def assert_equal(found: list[QuantizedBlock], expected: list[QuantizedBlock]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        tensors, wanted = dict(tensors_of(one)), dict(tensors_of(other))
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
        assert [layer.log for layer in one.layers] == [layer.log for layer in other.layers]


@torch.no_grad()
def put_into(model: Any, block: QuantizedBlock) -> None:
    """Decoded weights and changed tensors in place of the original ones."""
    weights = {f"{layer.module}.weight": layer.quantized.dequantize() for layer in block.layers}
    for name, weight in (weights | dict(block.changed)).items():
        model.get_parameter(name).copy_(weight)


@torch.no_grad()
def change_of_logits(case: Case, blocks: list[QuantizedBlock]) -> float:
    """How far the model with quantized layers is from the original, relative to its logits."""
    before = case.model(case.tokens[:2], use_cache=False).logits
    for block in blocks:
        put_into(case.model, block)
    after = case.model(case.tokens[:2], use_cache=False).logits
    return float((after - before).norm() / before.norm())


@several_methods
def test_resumes_behind_any_block(case: Case, method: Method, fmt: Format) -> None:
    work = case.begin(method, fmt)
    assert [len(batch) for batch in work.hidden] == [6, 6, 1]
    whole, states = [], []
    for block in work.blocks(ignore):
        whole.append(block)
        states.append({name: batch.clone() for name, batch in work.states().items()})
    assert len(whole) == LAYERS
    for done in range(1, LAYERS):
        again = case.new(method, fmt)
        again.resume(case.tokens, iter(states[done - 1].items()))
        assert_equal(list(again.blocks(ignore, first=done)), whole[done:])


@pytest.mark.parametrize("name", ["gptq", "awq", "gptq with scales"])
def test_every_block_sees_what_the_quantized_blocks_before_it_produce(case: Case, name: str) -> None:
    """Up to products in bfloat16, which a pass may use."""
    work = case.begin(*METHODS[name])
    for index, block in enumerate(work.blocks(ignore)):
        put_into(case.model, block)
        with torch.no_grad():
            outputs = case.model(case.tokens, use_cache=False, output_hidden_states=True).hidden_states
        if index + 1 < LAYERS:  # behind the last block transformers gives the normed states
            found = torch.cat(list(work.states().values()))
            assert float((found - outputs[index + 1]).norm() / found.norm()) < 0.02


class _Seen(GptqMethod):
    """Keeps samples of what layers read."""

    samples: ClassVar[list[Tensor]] = []

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        self.samples.append(inputs.sample)
        return super().round(weight, fmt, inputs)


def test_inputs_in_float8_are_seen_so_and_passed_on_so(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are of rounded inputs, and blocks behind read what rounded inputs leave; nothing stays hooked."""
    fmt = replace(FOUR_BITS, activations="fp8")
    monkeypatch.setattr(_Seen, "samples", [])
    work = case.begin(_Seen(target="layer"), fmt)
    for index, block in enumerate(work.blocks(ignore)):
        put_into(case.model, block)
        for layer in block.layers:
            linear = case.model.get_submodule(layer.module)
            linear.register_forward_pre_hook(lambda _, inputs: fmt.served_inputs(inputs[0]))
        with torch.no_grad():
            outputs = case.model(case.tokens, use_cache=False, output_hidden_states=True).hidden_states
        if index + 1 < LAYERS:
            found = torch.cat(list(work.states().values()))
            assert float((found - outputs[index + 1]).norm() / found.norm()) < 0.02
    assert len(_Seen.samples) == LAYERS * 4
    for sample in _Seen.samples:
        torch.testing.assert_close(fmt.served_inputs(sample), sample)
    assert not any(module._forward_pre_hooks for module in work.runner.load(0, [])[0].block.modules())


@pytest.mark.parametrize("family", [LLAMA, QWEN2, GEMMA2, PHI3], ids=lambda family: family.model_type)
@pytest.mark.parametrize("name", others_long(["gptq", "gptq with scales", "awq"], ["gptq with scales"]))
def test_eight_bits_leave_the_model_as_it_was(make_case: Callable[..., Case], family: Family, name: str) -> None:
    """Scales that were folded wrongly would show here; what remains is 8-bit rounding."""
    case = make_case(family)
    blocks = list(case.begin(METHODS[name][0], EIGHT_BITS).blocks(ignore))
    assert any(block.changed for block in blocks) == (name != "gptq")
    assert change_of_logits(case, blocks) < 0.05


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize("kept", [*LINEARS, LINEARS[0] + LINEARS[2]], ids=KEPT)
def test_some_layers_are_kept(case: Case, name: str, kept: tuple[str, ...]) -> None:
    """A kept value layer takes the scales of the output layer as it is, and so does a kept up layer."""
    blocks = list(case.begin(METHODS[name][0], EIGHT_BITS, kept).blocks(ignore))
    found = [layer.module for block in blocks for layer in block.layers]
    assert found == [module for module in case.family.linears(case.source.config) if not module.endswith(kept)]
    changed = {name.split(".", 3)[3].removesuffix(".weight") for block in blocks for name in block.changed}
    folds = [stage.fold for stage in STAGES if stage.fold and not set(stage.linears) & set(kept)]
    plain = {fold.producer for fold in folds if fold.kind == "norm" or fold.producer in kept}
    assert changed == (plain if name == "awq" else set())
    assert change_of_logits(case, blocks) < 0.05


def test_a_block_that_is_kept_whole_is_run_as_it_is(case: Case) -> None:
    chosen = dict.fromkeys(case.family.linears(case.source.config)[7:14], FOUR_BITS)
    work = CalibratedPass(case.source, case.family, chosen, GptqMethod(), "cpu", case.scratch)
    work.begin(case.tokens)
    assert [len(block.layers) for block in work.blocks(ignore)] == [0, 7, 0]


def test_a_dense_block_runs_once_for_all_its_stages(case: Case) -> None:
    """Of a batch, keys are computed once and the gate is activated once, whatever is asked about their block."""
    work = case.begin(*METHODS["gptq"])
    calls: list[str] = []
    for block in work.runner.blocks:
        for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.act_fn", "mlp.down_proj"):
            block.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    list(work.blocks(ignore))
    assert len(calls) == 4 * LAYERS * len(work.hidden)
    assert {calls.count(name) for name in set(calls)} == {LAYERS * len(work.hidden)}


@several_methods
def test_neither_batches_nor_memory_matter(
    case: Case, method: Method, fmt: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller batches; and what does not fit is computed twice."""
    expected = list(case.begin(method, fmt).blocks(ignore))
    with monkeypatch.context() as small:
        small.setattr(working_memory, "BATCH_TOKENS", 3 * LENGTH)
        work = case.begin(method, fmt)
        assert [len(batch) for batch in work.hidden] == [3, 3, 3, 3, 1]
        assert_alike(list(work.blocks(ignore)), expected)
    monkeypatch.setattr(calibrated, "KEPT_INNER_BYTES", 0)
    assert_alike(list(case.begin(method, fmt).blocks(ignore)), expected)


def assert_alike(found: list[QuantizedBlock], expected: list[QuantizedBlock]) -> None:
    """Products may be rounded to bfloat16 on the way, and a search may end at the next point: no more than that."""
    one, other = ([layer for block in blocks for layer in block.layers] for blocks in (found, expected))
    assert [layer.module for layer in one] == [layer.module for layer in other]
    for values in ("loss", "scaled_loss"):
        totals = [sum(layer.log.get(values, 0) for layer in layers) for layers in (one, other)]
        assert totals[0] == pytest.approx(totals[1], rel=0.05)
    errors = [sum(layer.relative_error for layer in layers) for layers in (one, other)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


@pytest.mark.parametrize("name", ["gptq", "awq", "awq without clip", "gptq with scales"])
def test_every_layer_loses_less_than_plainly_rounded(case: Case, name: str) -> None:
    seen: list[str] = []
    for block in case.begin(*METHODS[name]).blocks(lambda layer: seen.append(layer.module)):
        for layer in block.layers:
            assert layer.log["loss"] <= layer.log["rounding_loss"]
            assert name == "awq without clip" or layer.log["loss"] < layer.log["rounding_loss"]
            assert "warning" not in layer.log
            assert ("damping" in layer.log) == name.startswith("gptq")
            assert ("scaled_loss" in layer.log) == (name != "gptq")
            if name != "gptq":
                assert layer.log["scaled_loss"] <= layer.log["identity_loss"]
            if name != "gptq" and layer.module.endswith(("o_proj", "down_proj")):  # alone in their groups
                promised = layer.log["scaled_loss"]
                if name == "awq without clip":
                    assert layer.log["rounding_loss"] == pytest.approx(promised, rel=0.02)
                assert layer.log["loss"] <= 1.02 * promised
    assert seen == case.family.linears(case.source.config)


def test_llm_int8_lists_outlier_columns(make_case: Callable[..., Case]) -> None:
    case = make_case()
    with torch.no_grad():
        case.model.model.layers[1].input_layernorm.weight.fill_(0.1)
        case.model.model.layers[1].input_layernorm.weight[[5, 40]] = 60.0
    case.model.save_pretrained(case.source.folder)
    case = replace(case, source=Checkpoint(case.source.folder))
    blocks = list(case.begin(RtnMethod(), LlmInt8()).blocks(ignore))
    for layer in blocks[1].layers[:3]:
        assert layer.log["outlier_columns"] == [5, 40]


@pytest.mark.parametrize("name", ["awq", "smoothquant", "gptq with scales"])
def test_families_without_folds_are_refused(case: Case, name: str) -> None:
    without_folds = replace(LLAMA, layout=tuple(replace(stage, fold=None) for stage in STAGES))
    with pytest.raises(InputError) as error:
        replace(case, family=without_folds).begin(*METHODS[name])
    assert "'llama'" in str(error.value)
    assert "\n" not in str(error.value)
    replace(case, family=without_folds).begin(*METHODS["gptq"])


@pytest.mark.parametrize(
    ("name", "value", "group"),
    cover(
        ["gptq", "awq", "gptq with scales", "smoothquant"],
        [1e30, float("3e38")],
        [("input_layernorm", "self_attn.q_proj"), ("post_attention_layernorm", "mlp.gate_proj")],
    ),
)
def test_overflow_names_the_layer(case: Case, name: str, value: float, group: tuple[str, str]) -> None:
    norm, layer = group
    with torch.no_grad():
        case.model.get_parameter(f"model.layers.1.{norm}.weight").fill_(value)
    case.model.save_pretrained(case.source.folder)
    work = replace(case, source=Checkpoint(case.source.folder)).begin(*METHODS[name])
    with pytest.raises(InputError, match=rf"model\.layers\.1\.{layer}: .*not finite") as error:
        list(work.blocks(ignore))
    assert "\n" not in str(error.value)
