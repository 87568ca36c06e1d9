"""Any number of ranks computes what one process computes, for every family, format and odd size. Ranks are threads;
`test_parallel_processes.py` has real ones."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from long_cases import one_of_each
from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Gptq
from quantkit.recipe import load_recipe
from quantkit.runtime.model.batch import Batch
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.ranks import Ranks, check_parallel
from tiny_models import WITH_EXPERTS

SCRIPT = Path(__file__).with_name("decoder_rank.py")
ACT_ORDER = ("method.order=desc_act", "format.act_order=true")


def load_script() -> Any:
    spec = spec_from_file_location("decoder_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["decoder_rank"] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


rank_of = load_script()


@dataclass
class Table:
    """Where the threads of a group put their tensors."""

    size: int
    places: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.places[rank] = x.clone()
        self.barrier.wait()
        found = [self.places[other] for other in range(self.size)]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadGroup:
    table: Table
    rank: int
    calls: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.table.size

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return torch.stack(self.table.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls.append("gather")
        return torch.stack(self.table.exchange(self.rank, x), 1).flatten(1)  # as torch's own: of one width

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self.table.exchange(self.rank, x)[source])


def in_threads(
    folder: Path, tensor: int, pipeline: int, prompts: list[list[int]], dtype: torch.dtype = torch.float32
) -> tuple[list[Any], list[ThreadGroup], list[Any]]:
    """The answers of all ranks of the first stage, their groups, and all parts."""
    has_experts = any(".experts." in name for name in Checkpoint(folder).tensors)
    shape = Ranks(tensor, pipeline, experts=has_experts and tensor > 1)
    tables = [Table(tensor) for _ in range(pipeline)]
    groups = [ThreadGroup(tables[rank // tensor], rank % tensor) for rank in range(shape.world)]
    parts = [
        rank_of.make_part(folder, replace(shape, rank=rank), group, dtype, len(prompts))
        for rank, group in enumerate(groups)
    ]

    def step(column: list[Any], batch: Batch) -> Tensor:
        """Of the ranks of all stages that have one tensor rank."""
        hidden = None
        for part in column:
            hidden = part.decoder.hidden_states(batch, part.cache, hidden)
        logits: Tensor = column[0].decoder.logits(hidden)
        return logits

    def run(tensor_rank: int) -> Any:
        return rank_of.answer(partial(step, parts[tensor_rank::tensor]), prompts)

    with ThreadPoolExecutor(tensor) as pool:
        return list(pool.map(run, range(tensor))), groups, parts


@cache
def alone(folder: Path, vocab: int) -> Any:
    """The answer of one process, which several layouts are compared with."""
    return rank_of.alone(folder, rank_of.prompts_below(vocab))[0]


def assert_as_alone(folder: Path, tensor: int, pipeline: int = 1, vocab: int = 112) -> tuple[list[ThreadGroup], Any]:
    prompts = rank_of.prompts_below(vocab)
    expected = alone(folder, vocab)
    found, groups, parts = in_threads(folder, tensor, pipeline, prompts)
    assert expected.logits.std() > 0.01
    for answer in found:
        torch.testing.assert_close(answer.logits, expected.logits, rtol=1e-5, atol=1e-4)
        assert answer.tokens == expected.tokens
    return groups, parts


DENSE = [name for name in FAMILIES if name not in WITH_EXPERTS]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    one_of_each((family, *layout) for family in DENSE for layout in ((2, 1), (4, 1), (2, 2))),
)
def test_every_family(family: str, tensor: int, pipeline: int, family_model: Callable[[str], Path]) -> None:
    """Fused layers, biases, norms, windows, soft caps, tied and own heads; 4 ranks have 2 KV heads."""
    assert_as_alone(family_model(family), tensor, pipeline)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    one_of_each((family, *layout) for family in WITH_EXPERTS for layout in ((1, 2), (2, 1), (4, 1), (2, 2))),
)
def test_experts(family: str, tensor: int, pipeline: int, family_model: Callable[[str], Path]) -> None:
    """Divided among ranks, unevenly where 4 ranks have 6; dense layers and shared experts beside them are cut, and so
    are the heads of latent attention. One sum for attention and one for the MLP, experts or not."""
    groups, parts = assert_as_alone(family_model(family), tensor, pipeline)
    exchanges = ["sum", *["sum", "sum"] * (2 // pipeline), *(["gather"] if tensor > 1 else [])]
    assert groups[0].calls == exchanges * rank_of.TOKENS
    mlps = [part.weights.blocks[-1].mlp for part in parts[-tensor:]]
    starts = [mlp.first for mlp in mlps]
    assert starts == sorted(set(starts))
    assert [mlp.first + len(mlp.experts) for mlp in mlps] == [*starts[1:], mlps[0].router.outputs]


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("mixtral", "rtn-w4g32"),
        ("qwen3_moe", "rtn-w4g32"),
        ("deepseek_v3", "rtn-w4g32"),
        ("qwen2_moe", "fp8"),
        pytest.param("qwen3_moe", "nf4", marks=pytest.mark.long),
        pytest.param("deepseek_v2", "llm-int8", marks=pytest.mark.long),
    ],
)
def test_quantized_experts(family: str, recipe: str, family_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Whole, whatever their groups are; FP8's attention and shared experts are gathered."""
    options = {"rtn-w4g32": ("format.name=ct-packed", "format.group_size=16"), "nf4": ("format.block=32",)}
    loaded = load_recipe(recipe, options.get(recipe, ()))
    quantkit.quantize(family_model(family), loaded, tmp_path / "out", quality_windows=0)
    assert_as_alone(tmp_path / "out", 2)


WRONG_SHAPES = {
    "no flag": ("mixtral", Ranks(2), "is 2, but model_type 'mixtral' has experts, .*; add --expert-parallel"),
    "no experts": ("llama", Ranks(2, experts=True), "divides experts, but model_type 'llama' has none; leave it out"),
    "too many ranks": ("mixtral", Ranks(8, experts=True), "of 4 experts, and every rank needs one; use at most 4"),
}


@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_ranks_that_do_not_suit_experts(case: str, family_model: Callable[[str], Path]) -> None:
    family, ranks, message = WRONG_SHAPES[case]
    checkpoint = Checkpoint(family_model(family))
    with pytest.raises(InputError, match=message) as caught:
        check_parallel(read_model_config(checkpoint.config), checkpoint, ranks)
    assert "\n" not in str(caught.value)


QUICK_FAMILIES = {("phi3", "rtn-w4g32"), ("phi3", "rtn-w4g128-ct"), ("phi3", "fp8"), ("qwen2", "rtn-w4g32")}
QUICK_FAMILIES |= {("qwen2", "rtn-w8a8")}


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        pytest.param(*case, marks=() if case in QUICK_FAMILIES else pytest.mark.long)
        for case in product(("phi3", "qwen2"), ("rtn-w4g32", "rtn-w4g128-ct", "fp8", "rtn-w8a8"))
    ],
)
def test_quantized_families(family: str, recipe: str, family_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Fused layers whose parts do not end where words end; biases beside quantized weights."""
    options = ("format.group_size=16",) if recipe.startswith("rtn-w4") else ()
    quantkit.quantize(family_model(family), load_recipe(recipe, options), tmp_path / "out", quality_windows=0)
    assert_as_alone(tmp_path / "out", 2, 2)


SMALL_GROUPS = dict.fromkeys(("rtn-w4g64", "rtn-w4g128-asym", "rtn-w8", "rtn-w4g128-ct"), ("format.group_size=32",))
SMALL_GROUPS |= dict.fromkeys(("nf4", "nf4-plain", "fp4"), ("format.block=32",))
ROUNDED = ("fp8", "rtn-w8a8", "llm-int8")
IN_TWO = ("rtn-w4g64", "nf4", "fp8")  # one of each kind; the others are long
IN_FOUR = ("rtn-w4g128-asym", "rtn-w8", "fp4", "llm-int8", "rtn-w8a8")  # and one of each other


@pytest.mark.parametrize(
    ("recipe", "tensor"),
    [
        pytest.param(recipe, tensor, marks=() if recipe in (IN_TWO if tensor == 2 else IN_FOUR) else pytest.mark.long)
        for recipe, tensor in product((*SMALL_GROUPS, *ROUNDED), (2, 4))
    ],
)
def test_every_kind_of_format(recipe: str, tensor: int, quantized_tiny: Callable[..., Path]) -> None:
    """Heads of their own here; four ranks have two KV heads. One exchange for attention and one for the MLP, or two
    where all inputs of a token are rounded together."""
    groups, _ = assert_as_alone(quantized_tiny(recipe, *SMALL_GROUPS.get(recipe, ())), tensor, vocab=512)
    layers = 2
    exchanges = ["gather", "gather"] if recipe in ROUNDED else ["sum"]
    assert groups[0].calls == ["sum", *[*exchanges, *exchanges] * layers, "gather"] * rank_of.TOKENS


def scattered(folder: Path, copy: Path) -> Path:
    """The same codes, where the inputs of the layers that are cut by inputs have other groups, as act order leaves
    them."""
    shutil.copytree(folder, copy)
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("down_proj.g_idx", "o_proj.g_idx"))]:
        order = torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(0))
        tensors[name] = tensors[name][order]
    save_file(tensors, file)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_act_order_needs_no_exchange_of_its_own(quantized_tiny: Callable[..., Path], tmp_path: Path) -> None:
    assert_cut_by_groups(scattered(quantized_tiny("rtn-w4g64", "format.group_size=32"), tmp_path / "model"), vocab=512)


@pytest.mark.long
def test_the_order_of_gptq(quantized_draft: Callable[..., Path]) -> None:
    assert_cut_by_groups(quantized_draft("gptq-w4g32", *ACT_ORDER), vocab=4096)


def assert_cut_by_groups(folder: Path, vocab: int) -> None:
    """An MLP's channels are cut by the groups of down; only the attention output is gathered."""
    checkpoint = Checkpoint(folder)
    assert checkpoint.scattered_groups("model.layers.0.mlp.down_proj") is not None
    groups, parts = assert_as_alone(folder, 2, vocab=vocab)
    layers = checkpoint.config["num_hidden_layers"]
    assert groups[0].calls == ["sum", *["gather", "gather", "sum"] * layers, "gather"] * rank_of.TOKENS
    downs = [block.mlp.down for part in parts for block in part.weights.blocks]
    assert all(weight.order is None for down in downs for weight in down.weights)


@pytest.mark.parametrize("tensor", [2, 4])
def test_blocks_of_128(tensor: int, quantized_tiny: Callable[..., Path]) -> None:
    """Heads of 64 end inside blocks. Two ranks add what they computed from attention: a last bit more or less can turn
    the rounding of what follows around."""
    folder = quantized_tiny("fp8-block")
    prompts = rank_of.prompts_below(512)
    expected, _ = rank_of.alone(folder, prompts)
    found, groups, _ = in_threads(folder, tensor, 1, prompts)
    rows = (found[0].logits - expected.logits).norm(dim=1) / expected.logits.norm(dim=1)
    assert float(rows.max()) < (5e-2 if tensor == 2 else 1e-5)  # seen: 0.025 on ARM, less on x86
    assert float(rows.min()) < 1e-5
    attention = ["sum"] if tensor == 2 else ["gather", "gather"]
    assert groups[0].calls == ["sum", *[*attention, "gather", "gather"] * 2, "gather"] * rank_of.TOKENS


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [110, 112])
def test_heads(vocab: int, tied: bool, family_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A vocabulary that 4 does not divide; a tied head is rows of the embedding and takes no memory."""
    folder = with_head(family_model("llama"), tmp_path / "model", vocab, tied)
    _, parts = assert_as_alone(folder, 4, vocab=vocab)
    rows = [part.weights.head.outputs for part in parts]
    assert sum(rows) == vocab
    assert max(rows) == 28
    for part in parts:
        (head,) = part.weights.head.weights
        assert (head.untyped_storage().data_ptr() == part.weights.embedding.untyped_storage().data_ptr()) == tied


def with_head(model: Path, folder: Path, vocab: int, tied: bool) -> Path:
    """The first tokens of a model, with or without a head of its own."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab, "tie_word_embeddings": tied}))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:vocab].contiguous()
    if tied:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_quantized_head(quantized_tiny: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(quantized_tiny("rtn-w4g64", "format.group_size=32"), tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    parts = Gptq(group_size=32).encode(tensors.pop("lm_head.weight").float())
    save_file(tensors | {f"lm_head.{name}": part for name, part in parts.items()}, file)
    (tmp_path / "out" / "model.safetensors.index.json").unlink(missing_ok=True)
    assert "lm_head" in Checkpoint(tmp_path / "out").formats
    assert_as_alone(tmp_path / "out", 4, vocab=512)


def test_later_stages_hold_neither_embedding_nor_head(family_model: Callable[[str], Path]) -> None:
    _, parts = assert_as_alone(family_model("llama"), 1, 2)
    first, last = (part.weights for part in parts)
    assert (first.embedding.shape, last.embedding.shape) == ((112, 64), (0, 64))
    assert (first.head.outputs, last.head.outputs) == (112, 0)
    assert first.norm is None
    assert last.norm is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe"])
def test_stages_are_exact_in_16_bit(
    family: str, dtype: torch.dtype, family_model: Callable[[str], Path]
) -> None:  # fmt: skip
    """The residual sum is rounded where one process rounds it."""
    prompts = rank_of.prompts_below(112)
    expected, _ = rank_of.alone(family_model(family), prompts, dtype)
    (found,), _, _ = in_threads(family_model(family), 1, 2, prompts, dtype)
    assert torch.equal(found.logits, expected.logits)
