"""Which part of a model every rank holds, what is refused, and that a rank reads its part of the files only."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Awq, CtFloat8, CtPacked, Format, Gptq, LlmInt8, Nf4, dialect_of
from quantkit.recipe import load_recipe
from quantkit.runtime.model.config import ROLES, ModelConfig, read_model_config
from quantkit.runtime.model.ranks import Ranks, check_parallel, local_config
from quantkit.runtime.model.shards import Share, pieces, share_of_block
from quantkit.sources import model_folder


@pytest.fixture(scope="module")
def demo() -> ModelConfig:
    return read_model_config(Checkpoint(model_folder("demo")).config)


@pytest.mark.parametrize(
    ("layers", "pipeline", "expected"),
    [(5, 1, [5]), (5, 2, [2, 3]), (6, 4, [1, 1, 2, 2]), (4, 4, [1, 1, 1, 1]), (7, 3, [2, 2, 3])],
)
def test_stages_hold_consecutive_blocks(layers: int, pipeline: int, expected: list[int]) -> None:
    stages = [Ranks(2, pipeline, 2 * stage).blocks(layers) for stage in range(pipeline)]
    assert [len(blocks) for blocks in stages] == expected
    assert [layer for blocks in stages for layer in blocks] == list(range(layers))


def test_places_of_ranks() -> None:
    ranks = [Ranks(2, 3, rank) for rank in range(6)]
    assert [rank.stage for rank in ranks] == [0, 0, 1, 1, 2, 2]
    assert [rank.tensor_rank for rank in ranks] == [0, 1, 0, 1, 0, 1]
    assert [rank.first_stage for rank in ranks] == [True, True, False, False, False, False]
    assert [rank.last_stage for rank in ranks] == [False, False, False, False, True, True]


@pytest.mark.parametrize(("vocab", "tensor"), [(4096, 4), (10, 4), (9, 4), (3, 4), (1, 2)])
def test_the_vocabulary_is_cut_into_parts_of_at_most_one_width(vocab: int, tensor: int) -> None:
    parts = [Ranks(tensor, 1, rank).vocabulary(vocab) for rank in range(tensor)]
    width = Ranks(tensor).vocabulary_width(vocab)
    assert [token for part in parts for token in range(vocab)[part]] == list(range(vocab))
    assert all(part.stop - part.start == width or part.stop == vocab for part in parts)


@pytest.mark.parametrize(("tensor", "kv_heads"), [(1, [2]), (2, [1, 1]), (4, [1, 1, 1, 1]), (8, [1] * 8)])
def test_queries_find_their_keys(tensor: int, kv_heads: list[int], demo: ModelConfig) -> None:
    """Eight heads share two KV heads: a rank's heads read the KV heads that it holds."""
    for rank in range(tensor):
        ranks = Ranks(tensor, 1, rank)
        local = local_config(demo, ranks)
        assert (local.heads, local.kv_heads, local.intermediate) == (8 // tensor, kv_heads[rank], 1280 // tensor)
        held = range(demo.kv_heads)[ranks.kv_heads(demo.kv_heads)]
        for place, head in enumerate(range(demo.heads)[ranks.share(demo.heads)]):
            assert held[place // (local.heads // local.kv_heads)] == head // 4


def test_the_local_model_has_the_windows_of_its_blocks(demo: ModelConfig) -> None:
    mixed = replace(demo, windows=(1, 2, 3, 4, 5))
    assert local_config(mixed, Ranks(1, 2, 0)).windows == (1, 2)
    assert local_config(mixed, Ranks(2, 2, 3)).windows == (3, 4, 5)
    assert local_config(mixed, Ranks()) == mixed


def test_pieces_begin_with_a_block() -> None:
    assert list(pieces(slice(64, 320), 128)) == [slice(64, 128), slice(128, 320)]
    assert list(pieces(slice(64, 100), 128)) == [slice(64, 100)]
    assert list(pieces(slice(128, 300), 128)) == [slice(128, 300)]
    assert list(pieces(slice(64, 320), 1)) == [slice(64, 320)]


# What cannot be cut


def refusal(config: ModelConfig, checkpoint: Checkpoint | None, tensor: int, pipeline: int = 1) -> str:
    with pytest.raises(InputError) as caught:
        check_parallel(config, checkpoint, Ranks(tensor, pipeline))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_heads_that_do_not_divide(demo: ModelConfig) -> None:
    assert refusal(demo, None, 3) == (
        "tensor parallel is 3, but the model has 8 attention heads, which it does not divide; use 1, 2, 4 or 8"
    )


def test_kv_heads_that_do_not_divide(demo: ModelConfig) -> None:
    six = replace(demo, heads=12, kv_heads=6, intermediate=1536, hidden=768)
    assert "6 key-value heads" in refusal(six, None, 4)
    assert refusal(six, None, 4).endswith("use 1, 2, 3, 6 or 12")


def test_channels_that_do_not_divide(demo: ModelConfig) -> None:
    assert "1282 channels" in refusal(replace(demo, intermediate=1282), None, 4)
    assert "hidden states have 514 channels" in refusal(replace(demo, hidden=514), None, 4)


def test_a_model_that_cannot_be_cut(demo: ModelConfig) -> None:
    assert refusal(replace(demo, heads=1, kv_heads=1), None, 2).endswith("cannot be cut, use pipeline parallel")


def test_more_stages_than_blocks(demo: ModelConfig) -> None:
    assert refusal(demo, None, 1, 6) == (
        "pipeline parallel is 6, but the model has 5 blocks, and every stage needs one; use at most 5"
    )
    check_parallel(demo, None, Ranks(1, 5))


@pytest.mark.parametrize(
    ("ranks", "words"), [((0, 1, 0), "tensor parallel is 0"), ((1, -1, 0), "pipeline parallel is -1"), ((2, 2, 4), "4")]
)
def test_wrong_shapes(ranks: tuple[int, int, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Ranks(*ranks)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("rtn-w4g128", "model.layers.0.self_attn.o_proj has 2 groups of 128 inputs"),
        ("rtn-w4g128-ct", "model.layers.0.self_attn.o_proj has 2 groups of 128 inputs"),
        ("nf4", "model.layers.0.mlp.down_proj has 6 groups of 64 inputs"),
        ("rtn-w8a8", None),
        ("llm-int8", None),
        ("fp8-block", None),  # gathered where blocks do not divide
    ],
)
def test_groups_that_do_not_divide(recipe: str, problem: str | None, quantized_tiny: Callable[..., Path]) -> None:
    """Four ranks have 64 of 256 inputs and 96 of 384 channels each."""
    checkpoint = Checkpoint(quantized_tiny(recipe))
    config = read_model_config(checkpoint.config)
    if problem is None:
        check_parallel(config, checkpoint, Ranks(4))
        return
    assert problem in refusal(config, checkpoint, 4)


# Shares


def tried(folder: Path, ranks: Ranks) -> tuple[Checkpoint, ModelConfig]:
    checkpoint = Checkpoint(folder)
    config = read_model_config(checkpoint.config)
    check_parallel(config, checkpoint, ranks)
    return checkpoint, config


def test_fused_layers_are_cut_in_every_part(family_model: Callable[[str], Path]) -> None:
    """4 heads and 2 KV heads of 16; gate and up of 96."""
    ranks = Ranks(2, 1, 1)
    checkpoint, config = tried(family_model("phi3"), ranks)
    shares = share_of_block(checkpoint, config, ranks, 0)
    qkv, output, gate_up, down = (shares[role] for role in ROLES)
    assert qkv.modules == (Share((slice(32, 64), slice(80, 96), slice(112, 128)), slice(0, 64)),)
    assert output.modules == (Share((slice(0, 64),), slice(32, 64)),)
    assert gate_up.modules == (Share((slice(48, 96), slice(144, 192)), slice(0, 64)),)
    assert down.modules == (Share((slice(0, 64),), slice(48, 96)),)
    assert (qkv.adds_bias, output.adds_bias, gate_up.adds_bias, down.adds_bias) == (True, False, True, False)


def test_act_order_cuts_an_mlp_by_the_groups_of_down(family_model: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = load_recipe("rtn-w4g32", ("format.group_size=16",))
    quantkit.quantize(family_model("llama"), recipe, tmp_path / "out", quality_windows=0)
    order = scatter(tmp_path / "out", "model.layers.0.mlp.down_proj", 96)
    scatter(tmp_path / "out", "model.layers.0.self_attn.o_proj", 64)
    held = []
    for rank in range(2):
        ranks = Ranks(2, 1, rank)
        checkpoint, config = tried(tmp_path / "out", ranks)
        shares = share_of_block(checkpoint, config, ranks, 0)
        _, output, gate_up, down = (shares[role] for role in ROLES)
        (channels,) = gate_up.modules[0].outputs
        assert isinstance(channels, Tensor)
        assert torch.equal(down.modules[0].inputs, channels)
        assert torch.equal(gate_up.modules[1].outputs[0], channels)
        assert not down.gathered
        assert output.gathered
        assert output.modules == (Share((slice(rank * 32, rank * 32 + 32),), slice(0, 64)),)
        held.append(channels)
    assert torch.equal(torch.cat(held).sort().values, torch.arange(96))
    assert set(order[held[0]].tolist()) == {0, 1, 2}  # whole groups
    assert set(order[held[1]].tolist()) == {3, 4, 5}


def scatter(folder: Path, name: str, inputs: int) -> Tensor:
    """Gives a layer's inputs other groups of 16, as many to each; returns the group of every input."""
    groups = (torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) // 16).int()
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | {f"{name}.g_idx": groups}, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    return groups


# Files

GUARD = Path(__file__).with_name("guarded_load.py")
WIDE = 1 << 15  # channels: half of them fill several pages in every format
SHAPES = {f"self_attn.{name}_proj": (128, 128) for name in "qkvo"}
SHAPES |= {"mlp.gate_proj": (WIDE, 128), "mlp.up_proj": (WIDE, 128), "mlp.down_proj": (128, WIDE)}
# How the tensors of gate, up and down lie in a file: rows, and the axis along which they are cut.
LAYOUTS: dict[str, tuple[Format | None, dict[str, tuple[int, int]], dict[str, tuple[int, int]]]] = {
    "plain": (None, {"weight": (WIDE, 0)}, {"weight": (128, 1)}),
    "gptq": (
        Gptq(group_size=128),
        {"qweight": (16, 1), "scales": (1, 1), "qzeros": (1, 1)},
        {"qweight": (WIDE // 8, 0), "scales": (WIDE // 128, 0), "qzeros": (WIDE // 128, 0)},
    ),
    "awq": (Awq(group_size=128), {"qweight": (128, 1), "scales": (1, 1)}, {"qweight": (WIDE, 0)}),
    "ct-packed": (
        CtPacked(group_size=128, sym=False),
        {"weight_packed": (WIDE, 0), "weight_scale": (WIDE, 0)},
        {"weight_packed": (128, 1)},
    ),
    "nf4": (Nf4(), {"weight": (WIDE, 0), "weight.absmax": (WIDE, 0)}, {"weight": (128, 1)}),
    "llm-int8": (LlmInt8(), {"weight": (WIDE, 0), "SCB": (WIDE, 0)}, {"weight": (128, 0)}),  # down is gathered
    "fp8": (CtFloat8(), {"weight": (WIDE, 0), "weight_scale": (WIDE, 0)}, {"weight": (128, 0)}),
    "fp8-block": (CtFloat8(strategy="block"), {"weight": (WIDE, 0)}, {"weight": (128, 1)}),
}


@cache
def wide_weight(name: str) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def wide_block(folder: Path, fmt: Format | None) -> Path:
    """One block, nearly all of it in its MLP."""
    folder.mkdir()
    config: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 8,
        "max_position_embeddings": 64,
    }
    tensors = {f"model.layers.0.{name}_layernorm.weight": torch.ones(128) for name in ("input", "post_attention")}
    quantized = {}
    for name in SHAPES:
        if fmt is not None and name.startswith("mlp"):
            parts, quantized[f"model.layers.0.{name}"] = fmt.encode(wide_weight(name)), fmt
        else:
            parts = {"weight": wide_weight(name).half()}
        tensors |= {f"model.layers.0.{name}.{part}": tensor for part, tensor in parts.items()}
    if quantized:
        kept = [f"model.layers.0.{name}" for name in SHAPES if not name.startswith("mlp")]
        config["quantization_config"] = dialect_of(quantized).write(quantized, kept)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def guarded_job(folder: Path, name: str, tensor: int, rank: int) -> dict[str, object]:
    _, of_gate_up, of_down = LAYOUTS[name]
    axes = {f"gate_proj.{part}": cut for part, cut in of_gate_up.items()}
    axes |= {f"up_proj.{part}": cut for part, cut in of_gate_up.items()}
    axes |= {f"down_proj.{part}": cut for part, cut in of_down.items()}
    full = {f"model.layers.0.mlp.{part}": cut for part, cut in axes.items()}
    return {"folder": str(folder), "tensor": tensor, "rank": rank, "axes": full}


def run_guarded(jobs: list[dict[str, object]]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GUARD, json.dumps(jobs)], capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the guard is made of Linux pages")
def test_a_rank_reads_its_part_of_the_files_only(tmp_path: Path) -> None:
    """Last comes a process that needs everything: the guard ends it, and would have ended the others."""
    folders = {name: wide_block(tmp_path / name, fmt) for name, (fmt, _, _) in LAYOUTS.items()}
    jobs = [(name, rank) for name in LAYOUTS for rank in range(2)]
    guarded = [guarded_job(folders[name], name, 2, rank) for name, rank in jobs]
    ended = run_guarded([*guarded, guarded_job(folders["plain"], "plain", 1, 0)])
    forbidden = ended.stdout.split()
    assert len(forbidden) >= len(jobs), f"{jobs[len(forbidden)]} ended with {ended.returncode}: {ended.stderr}"
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    for (name, _), count in zip(jobs, forbidden, strict=True):
        size = (folders[name] / "model.safetensors").stat().st_size
        assert int(count) > 0.3 * size  # of half, less the pages that both halves need
