"""`quantkit train-medusa` as a user types it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.checkpoint import Checkpoint
from quantkit.medusa import train
from quantkit.medusa.texts import read_texts
from quantkit.runtime.drafters.medusa_heads import FACTS, WEIGHTS, Target, load_heads
from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
QUICK = ("--heads", 2, "--nodes", 5, "--epochs", 2, "--device", "cpu")


def shorten_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the model to train on and to measure are most of the time."""
    monkeypatch.setattr(train, "SAMPLED", 24)
    monkeypatch.setattr(train, "ANSWER", 16)


@pytest.mark.long
@pytest.mark.parametrize("short", [True, False])
def test_the_same_command_gives_the_same_bytes(
    short: bool, run_cli: Cli, small_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if short:
        shorten_answers(monkeypatch)
    args = ("train-medusa", "demo-draft", "--text", small_text, "--self-generated", 3, *QUICK)
    code, out, err = run_cli(*args, "-o", tmp_path / "a")
    assert (code, err) == (0, "")
    for word in ("medusa heads for demo-draft", "top 1", "top 3", "tokens per step", "tree of 5 nodes"):
        assert word in out
    report = json.loads(run_cli(*args, "-o", tmp_path / "b", "--json")[1])
    for name in (WEIGHTS, FACTS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert report["last_losses"] < report["first_losses"]
    assert len(report["tree"]["parents"]) == 5
    assert report["tokens_per_step"]["tree"] >= 1
    facts = json.loads((tmp_path / "a" / FACTS).read_text())
    assert facts["training"]["text"][0]["source"] == "small.txt"
    assert facts["training"]["tokens"] > 3 * 512, "the answers count too"
    heads = load_heads(tmp_path / "a", Target.of(Checkpoint(model_folder("demo-draft"))))
    assert (heads.count, len(heads.tree)) == (2, 5)


def test_heads_of_a_quantized_model_stand_beside_it(
    run_cli: Cli,
    small_text: Path,
    tmp_path: Path,
    quantized_draft: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the folder stays a checkpoint that loads."""
    shorten_answers(monkeypatch)
    shutil.copytree(quantized_draft("rtn-w4g64"), tmp_path / "w4")
    before = {file.name for file in (tmp_path / "w4").iterdir()}
    code, _, err = run_cli("train-medusa", tmp_path / "w4", "--text", small_text, *QUICK)
    assert (code, err) == (0, "")
    assert {file.name for file in (tmp_path / "w4").iterdir()} - before == {FACTS, WEIGHTS}
    checkpoint = Checkpoint(tmp_path / "w4")
    assert not any("medusa" in str(stored.file) for stored in checkpoint.tensors.values())
    assert load_heads(tmp_path / "w4", Target.of(checkpoint)).count == 2


def test_what_is_measured_is_not_trained_on(small_text: Path) -> None:
    texts = read_texts(Checkpoint(model_folder("demo-draft")), [small_text], None, 0)
    trained = {tuple(piece.tolist()) for row in texts.windows for piece in row.split(64)}
    assert texts.windows.shape == (3, 512)
    assert texts.prompts.shape == (8, 64)
    assert not trained & {tuple(row.tolist()) for row in texts.prompts}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("demo",), ("bundled", "-o")),
        (("demo-draft", "-o", "{tmp}/heads", "--heads", 9), ("heads is 9", "1 to 8")),
        (("demo-draft", "-o", "{tmp}/heads", "--nodes", 99), ("nodes is 99", "1 to 15")),
        (("demo-draft", "-o", "{tmp}/heads", "--text", "{tmp}/none.txt"), ("no text", "none.txt")),
        (("demo-draft", "-o", "{tmp}/heads", "--text", "{tmp}/short.txt"), ("less than one window",)),
        (("demo-draft", "-o", "{tmp}/heads", "--text", "{tmp}/one.txt"), ("one window", "--heldout")),
        (("demo-draft", "-o", "{tmp}/heads", "--heldout", "{tmp}/none.txt"), ("no text", "none.txt")),
        (
            ("demo-draft", "-o", "{tmp}/heads", "--self-generated", 500, "--text", "{tmp}/small.txt"),
            ("24 prompts", "500"),
        ),
        (("demo-draft", "-o", "{tmp}/short.txt"), ("is a file", "-o")),
        (("demo-draft", "-o", "{tmp}/heads", "--device", "tpu"), ("device 'tpu' is not known",)),
        (("{tmp}/nothing",), ("no model at",)),
        (("{tmp}/odd", "--epochs", 1), ("no model.safetensors", "-o")),
    ],
)
def test_wrong_input_is_one_line(
    assert_refused: Refused, tmp_path: Path, small_text: Path, args: tuple[object, ...], words: tuple[str, ...]
) -> None:
    shutil.copy(small_text, tmp_path / "small.txt")
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    (tmp_path / "one.txt").write_text(small_text.read_text(encoding="utf-8")[:2600], encoding="utf-8")
    shutil.copytree(model_folder("demo-draft"), tmp_path / "odd")
    (tmp_path / "odd" / "model.safetensors").rename(tmp_path / "odd" / "weights.safetensors")
    given = [str(arg).replace("{tmp}", str(tmp_path)) for arg in args]
    assert_refused(tmp_path, "train-medusa", *given, words=words)
