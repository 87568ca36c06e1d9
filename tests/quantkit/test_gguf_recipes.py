"""`quantize -r q4_k_m`: the mixes of llama.cpp, and files that hold what the method computed."""

from pathlib import Path

import pytest
from gguf import GGUFReader

from quantkit import quantize
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats.gguf.mixes import MIXES, Matrix, Role, type_of
from quantkit.gguf_import.folder import write_view
from quantkit.pipeline.report import QuantizeReport
from quantkit.recipe import Recipe, load_recipe
from tiny_models import save_model
from tiny_tokenizers import VOCAB_SIZE, save_byte_level

pytestmark = pytest.mark.usefixtures("few_scales")

LITTLE = Calibration(samples=2, seq_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of 256 numbers suit all blocks, but those of the MLP's last layer only blocks of 32."""
    folder = tmp_path_factory.mktemp("gguf") / "tiny"
    sizes = {"hidden_size": 256, "intermediate_size": 288, "head_dim": 64, "vocab_size": VOCAB_SIZE}
    save_model("llama", folder, "bfloat16", initializer_range=0.06, tie_word_embeddings=True, **sizes)
    save_byte_level(folder)
    return folder


def made(model: Path, recipe: str | Recipe, output: Path, quality_windows: int = 0) -> QuantizeReport:
    return quantize(model, recipe, output, calibration=LITTLE, quality_windows=quality_windows, device="cpu")


@pytest.mark.parametrize(
    ("mix", "role", "layer", "expected"),
    [
        ("q4_k_m", "q", 0, "Q4_K"),
        ("q4_k_m", "v", 3, "Q6_K"),
        ("q4_k_m", "v", 4, "Q4_K"),
        ("q4_k_m", "down", 6, "Q6_K"),
        ("q4_k_m", "down", 31, "Q6_K"),
        ("q4_k_m", "down", 7, "Q4_K"),
        ("q4_k_m", "output", 0, "Q6_K"),
        ("q4_k_m", "embedding", 0, "Q4_K"),
        ("q4_k_s", "v", 3, "Q5_K"),
        ("q4_k_s", "down", 4, "Q4_K"),
        ("q5_k_m", "v", 0, "Q6_K"),
        ("q3_k_m", "v", 1, "Q5_K"),
        ("q3_k_m", "v", 2, "Q4_K"),
        ("q3_k_m", "down", 1, "Q5_K"),
        ("q3_k_m", "attention_output", 9, "Q4_K"),
        ("q2_k", "v", 9, "Q4_K"),
        ("q2_k", "down", 9, "Q3_K"),
        ("q2_k", "attention_output", 9, "Q3_K"),
        ("q4_0", "down", 3, "Q4_1"),
        ("q4_0", "down", 4, "Q4_0"),
        ("iq4_xs", "v", 9, "Q5_K"),
        ("q8_0", "output", 0, "Q8_0"),
    ],
)
def test_mixes_of_a_model_with_32_layers(mix: str, role: Role, layer: int, expected: str) -> None:
    """As llama-quantize chose for Llama-like models with four query heads a key."""
    assert type_of(mix, Matrix(role, 4096, 32, 4, layer)) == expected


def test_rows_that_are_no_whole_number_of_blocks() -> None:
    """Types of SmolLM2-135M, whose hidden size is 576, as llama-quantize wrote them."""
    found = {mix: type_of(mix, Matrix("gate", 576, 30, 3, 9)) for mix in MIXES}
    assert found == {
        "q8_0": "Q8_0",
        "q6_k": "Q8_0",
        "q5_k_m": "Q5_1",
        "q4_k_m": "Q5_0",
        "q4_k_s": "Q5_0",
        "q4_0": "Q4_0",
        "iq4_xs": "IQ4_NL",
        "q3_k_m": "Q4_0",
        "q2_k": "Q4_0",
    }
    assert type_of("q4_k_m", Matrix("output", 576, 30, 3)) == "Q8_0"
    assert type_of("q4_k_m", Matrix("gate", 100, 30, 3)) == "F16"


@pytest.mark.parametrize("mix", ["q4_k_m", "q3_k_m", "iq4_xs"])
def test_the_file_holds_what_was_computed(mix: str, model: Path, tmp_path: Path) -> None:
    """That it decodes to what the method computed, the run itself has checked; here are types, sizes and losses."""
    report = made(model, mix, tmp_path / "model.gguf", quality_windows=1 if mix == "q4_k_m" else 0)
    write_view(tmp_path / "model.gguf", tmp_path)
    written, types = Checkpoint(tmp_path), {}
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        types[tensor.name] = tensor.tensor_type.name
    usual, fallback = MIXES[mix], {"q4_k_m": "Q8_0", "q3_k_m": "Q5_0", "iq4_xs": "IQ4_NL"}[mix]
    assert types["blk.0.attn_q.weight"] == usual
    assert types["blk.1.ffn_down.weight"] == fallback
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert report.format == f"gguf {mix}"
    assert report.bytes == (tmp_path / "model.gguf").stat().st_size
    for layer in report.layers:
        assert layer.log["loss"] <= layer.log["rounding_loss"]
        assert written.formats[layer.module].describe() == layer.scheme
    assert sum(layer.log["loss"] for layer in report.layers) < 0.9 * sum(x.log["rounding_loss"] for x in report.layers)
    source = Checkpoint(model).tensor("model.embed_tokens.weight").float()
    assert float((written.weight("model.embed_tokens") - source).norm() / source.norm()) < 0.03
    if mix == "q4_k_m":
        assert report.quality is not None
        assert 0 < report.quality.kl < 0.2


def test_the_same_run_writes_the_same_bytes_and_nothing_else(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        made(model, "q4_0", tmp_path / f"{name}.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gguf", "two.gguf"]


def test_nearest_rounding_and_one_type_for_all(model: Path, tmp_path: Path) -> None:
    changes = ["method.rounding=nearest", "format={name: gguf, kind: Q5_0}"]
    report = made(model, load_recipe("q4_0", changes), tmp_path / "model.gguf")
    assert {layer.scheme for layer in report.layers} == {"Q5_0"}
    assert all(layer.log["loss"] == layer.log["rounding_loss"] for layer in report.layers)


def test_input_scales_go_into_what_stands_before(model: Path, tmp_path: Path) -> None:
    """Into norms, which the file holds changed, and into rows of blocks; the model stays the same but for rounding."""
    report = made(model, load_recipe("q3_k_m", ["method.scaling=awq"]), tmp_path / "model.gguf", quality_windows=1)
    write_view(tmp_path / "model.gguf", tmp_path)
    scaled = [layer for layer in report.layers if layer.log["scaled_loss"] < layer.log["identity_loss"]]
    assert {layer.module.split(".", 3)[-1] for layer in scaled} >= {"self_attn.q_proj", "mlp.down_proj"}
    (first, *_) = (layer.module for layer in scaled if layer.module.endswith("q_proj"))
    norm = first.replace("self_attn.q_proj", "input_layernorm.weight")
    assert not Checkpoint(tmp_path).tensor(norm).float().equal(Checkpoint(model).tensor(norm).float())
    assert report.quality is not None
    assert 0 < report.quality.kl < 0.2


def test_refusals(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must end in \.gguf"):
        made(model, "q4_k_m", tmp_path / "folder")
    with pytest.raises(InputError, match="rounds to GGUF blocks, not to 'gptq'"):
        made(model, load_recipe("gptq-w4g128", ["method=block-search"]), tmp_path / "folder")
    with pytest.raises(InputError, match=r"'format\.mix' is 'q9', but must be one of"):
        load_recipe("q4_k_m", ["format.mix=q9"])
    save_model("mixtral", tmp_path / "experts", vocab_size=VOCAB_SIZE)
    save_byte_level(tmp_path / "experts")
    with pytest.raises(InputError, match="'mixtral' model cannot be written as GGUF"):
        made(tmp_path / "experts", "q4_k_m", tmp_path / "model.gguf")
    assert not any((tmp_path / name).exists() for name in ("folder", "model.gguf"))
