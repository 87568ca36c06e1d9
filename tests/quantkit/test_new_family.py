"""Adding a dense family touches quantkit/arch/ only: nothing else names one, and one more is taken everywhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import quantkit
from quantkit import arch
from quantkit.arch import FAMILIES, Family
from quantkit.checkpoint import Checkpoint
from quantkit.eval.plan.model import read_model
from quantkit.inspection import inspect_checkpoint
from quantkit.pipeline.job import prepare
from quantkit.planning import make_plan
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.loading import load_blocks

ROOT = Path(__file__).parents[2]
SEARCHED = ("quantkit", "kernels", "runtime", "eval")
# Files that speak about another program's names, or about one model: a new family does without them.
MAY_NAME_FAMILIES = {
    "quantkit/launch/commands.py",  # dtypes that vLLM refuses
    "quantkit/gguf_import/families.py",  # what GGUF files call their architectures
    "quantkit/gguf_import/tokenizer.py",  # and their tokenizers
    "quantkit/gguf_import/placement.py",  # how they order rows
    "quantkit/gguf_import/rope.py",  # which of them rotate a part of each head
    *(f"quantkit/gguf_export/{name}.py" for name in ("metadata", "rope", "split_rules", "tensors", "tokenizer")),
    "quantkit/bundled/training/model.py",  # the bundled model is a Llama
    "runtime/drafters/eagle_folder.py",  # whose layers heads have that others trained
    "eval/shapes.py",  # sizes of published models, to measure speed with
}


def sources() -> Iterator[Path]:
    """Every source file once: four folders of the package are links to those beside it."""
    for folder in SEARCHED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT / folder).parts
            if not (ROOT / folder / inside[0]).is_symlink() and "__pycache__" not in inside:
                yield file


def families_named(file: Path) -> set[str]:
    """model_types, class names, and the constants of quantkit/arch/ that stand in a file's code."""
    words = {family.model_type for family in FAMILIES.values()} | {each.architecture for each in FAMILIES.values()}
    constants = {name for name, value in vars(arch).items() if isinstance(value, Family)}
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and node.value in words:
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("quantkit.arch"):
            found |= {alias.name for alias in node.names} & constants
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "arch":
            found |= {node.attr} & constants
    return found


def test_no_other_file_names_a_family() -> None:
    naming = {file.relative_to(ROOT).as_posix() for file in sources() if families_named(file)}
    assert {name for name in naming if not name.startswith("quantkit/arch/")} == MAY_NAME_FAMILIES


class OneMoreConfig(LlamaConfig):
    model_type = "one_more"


class OneMoreForCausalLM(LlamaForCausalLM):
    config_class = OneMoreConfig


AutoConfig.register(OneMoreConfig.model_type, OneMoreConfig)
AutoModelForCausalLM.register(OneMoreConfig, OneMoreForCausalLM)


def test_one_more_family_is_one_more_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("one_more", "OneMoreForCausalLM")
    monkeypatch.setitem(FAMILIES, family.model_type, family)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}
    config = OneMoreConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    OneMoreForCausalLM(config).save_pretrained(tmp_path / "model")
    plan = make_plan(prepare(tmp_path / "model", "rtn-w4g32", tmp_path / "out"))
    report = quantkit.quantize(tmp_path / "model", "rtn-w4g32", tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    assert plan.output.bytes == report.bytes == inspect_checkpoint(tmp_path / "out").bytes
    assert set(checkpoint.formats) == set(family.linears(checkpoint.config)) != set()
    (block,) = load_blocks(checkpoint, read_model_config(checkpoint.config), torch.float32, torch.device("cpu"))
    assert block.qkv(torch.ones(1, 64)).shape == (1, 64 + 2 * 32)
    decoder = read_model("model", checkpoint.config).decoder
    assert decoder is not None
    assert decoder.parameters == plan.model.parameters
