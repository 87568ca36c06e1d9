"""Heads as a module and as files: the same numbers after loading, and one clear line for files that do not fit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError, StorageError
from quantkit.runtime.drafters.medusa_heads import (
    FACTS,
    WEIGHTS,
    MedusaHeads,
    Target,
    find_heads,
    load_heads,
    save_heads,
)
from quantkit.runtime.drafters.medusa_tree import choose_tree
from quantkit.sources import model_folder

TARGET = Target("llama", 64, 100, 2, "0" * 64)


def random_heads(count: int = 3, layers: int = 2) -> MedusaHeads:
    heads = MedusaHeads(64, count, layers)
    random = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn(parameter.shape, generator=random)).bfloat16().float()
    heads.tree = choose_tree([[0.5, 0.2]] * count, 5)
    return heads


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_heads(tmp_path / "heads", random_heads(), TARGET, {"note": "made up"})
    return tmp_path / "heads"


def test_fresh_heads_say_what_the_model_says() -> None:
    h, token = torch.randn(2, 5, 64).unbind()
    found = MedusaHeads(64, 3, 2).hidden(h, token)
    assert found.shape == (3, 5, 64)
    torch.testing.assert_close(found, h.expand(3, 5, 64))


def test_heads_follow_their_formula() -> None:
    heads = random_heads()
    h, token = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).unbind()
    found = heads.hidden(h, token)
    for head in range(3):
        for row in range(5):
            scale = h[row].square().mean().sqrt()
            z = h[row] / scale + heads.mix @ (token[row] / token[row].square().mean().sqrt())
            x = heads.keep[head] * z + torch.nn.functional.silu(heads.blocks[0, head] @ z)
            x = x + torch.nn.functional.silu(heads.blocks[1, head] @ x)
            torch.testing.assert_close(found[head, row], scale * x, rtol=1e-4, atol=1e-5)


def test_rows_do_not_see_each_other() -> None:
    heads = random_heads()
    h, token = torch.randn(2, 7, 64).unbind()
    whole = heads.hidden(h, token)
    torch.testing.assert_close(heads.hidden(h[3:4], token[3:4]), whole[:, 3:4])


def test_loading_gives_the_same_guesses(saved: Path) -> None:
    heads, loaded = random_heads(), load_heads(saved, TARGET)
    h, token = torch.randn(2, 5, 64).unbind()
    assert torch.equal(loaded.hidden(h, token), heads.hidden(h, token))
    assert loaded.tree == heads.tree
    assert (loaded.count, loaded.layers) == (3, 2)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_loading_in_another_dtype(saved: Path) -> None:
    h, token = torch.randn(2, 5, 64).unbind()
    exact = load_heads(saved, TARGET).hidden(h, token)
    half = load_heads(saved, TARGET, dtype=torch.bfloat16).hidden(h.bfloat16(), token.bfloat16())
    assert half.dtype == torch.bfloat16
    assert float((half.float() - exact).norm() / exact.norm()) < 0.02


def test_saving_is_repeatable_and_names_no_place(saved: Path, tmp_path: Path) -> None:
    save_heads(tmp_path / "again", random_heads(), TARGET, {"note": "made up"})
    for name in (WEIGHTS, FACTS):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(file.name for file in saved.iterdir()) == [FACTS, WEIGHTS]
    assert str(tmp_path) not in (saved / FACTS).read_text()
    assert (saved / WEIGHTS).stat().st_mode == (saved / FACTS).stat().st_mode, "whoever may read one may read both"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "model_type llama, this model has qwen2"),
        ({"hidden_size": 128}, "hidden_size 64, this model has 128"),
        ({"vocab_size": 101}, "vocab_size 100, this model has 101"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 2, this model has 3"),
        ({"norm_sha256": "1" * 64}, "other weights"),
    ],
)
def test_heads_of_another_model_are_refused(saved: Path, change: dict[str, str | int], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        load_heads(saved, replace(TARGET, **change))  # type: ignore[arg-type]
    assert "quantkit train-medusa" in str(caught.value)
    assert "\n" not in str(caught.value)


def change_facts(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / FACTS).read_text()) | changes
        (folder / FACTS).write_text(json.dumps(facts))

    return change


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / FACTS).read_text())
        del facts[name]
        (folder / FACTS).write_text(json.dumps(facts))

    return change


def cut_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def break_one(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["mix"][3, 4] = float("nan")
    save_file(weights, folder / WEIGHTS)


def drop_one(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["keep"]
    save_file(weights, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / FACTS).write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / FACTS).unlink(), "no medusa heads in"),
        (change_facts(version=2), "has version 2"),
        (without("target"), "is damaged"),
        (change_facts(target={"hidden_size": 64}), "is damaged"),
        (change_facts(tree={"parents": [0], "heads": [0], "ranks": [0]}), "is damaged: node 0"),
        (change_facts(heads="3"), "is damaged: '3' heads"),
        (change_facts(heads=1), "is damaged: 1 heads"),  # the tree is deeper
        (change_facts(heads=4), "keep in .* has shape"),
        (change_facts(layers=1), "blocks in .* has shape"),
        (cut_weights, "missing or damaged"),
        (no_weights, "missing or damaged"),
        (break_one, "mix in .* holds NaN"),
        (drop_one, "keep in .* is missing"),
    ],
)
def test_damaged_files_are_refused(saved: Path, damage: Callable[[Path], None], words: str) -> None:
    load_heads(saved, TARGET)
    damage(saved)
    with pytest.raises(StorageError, match=words) as caught:
        load_heads(saved, TARGET)
    assert "\n" not in str(caught.value)


def test_the_bundled_heads_are_found_by_name_and_fit_the_demo_model_alone() -> None:
    heads = load_heads("demo-medusa", Target.of(Checkpoint(model_folder("demo"))))
    assert heads.count >= 3
    assert len(heads.tree) == 15
    with pytest.raises(InputError, match="belong to another model, with hidden_size 512"):
        load_heads("demo-medusa", Target.of(Checkpoint(model_folder("demo-draft"))))
    folder = find_heads("demo-medusa")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3_000_000
    assert json.loads((folder / FACTS).read_text())["training"]["tokens_per_step"]["tree"] > 1.6


def test_quantizing_leaves_a_model_the_same_target(tmp_path: Path, quantized_draft: Callable[..., Path]) -> None:
    """Heads of the original serve its quantized forms; another model of the same shape is another target."""
    own = Target.of(Checkpoint(model_folder("demo-draft")))
    assert Target.of(Checkpoint(quantized_draft("rtn-w4g64"))) == own
    other = Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert replace(Target.of(Checkpoint(other)), norm_sha256=own.norm_sha256) == own
    assert Target.of(Checkpoint(other)) != own
