"""What `import quantkit` offers: all names are there and are documented, and measuring gives what the commands give."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import quantkit
from quantkit.errors import InputError, StorageError


def test_all_names_have_docstrings_and_stand_in_the_overview() -> None:
    assert quantkit.__doc__ is not None
    for name in quantkit.__all__:
        assert getattr(quantkit, name).__doc__, name
    for name in set(quantkit.__all__) - {"GuideSpec"}:
        assert f"quantkit.{name}" in quantkit.__doc__
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = quantkit.quantise


def test_evaluate_measures_what_the_command_prints(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    found = quantkit.evaluate("demo-draft", "demo-draft", window=64, max_windows=3, compared_windows=2, device="cpu")
    assert found.kl is not None
    assert found.kl.value == pytest.approx(0, abs=1e-6)
    assert (found.windows, found.compared_windows) == (3, 2)
    code, out, _ = run_cli("eval", "demo-draft", "--window", "64", "--max-windows", "3", "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["perplexity"]["value"] == found.perplexity.value


def test_wrong_arguments_of_evaluate() -> None:
    with pytest.raises(StorageError, match="no text 'nowhere"):
        quantkit.evaluate("demo-draft", text="nowhere.txt")
    with pytest.raises(InputError, match="backend"):
        quantkit.evaluate("demo-draft", device="cpu", backend="vllm")


def test_compare_writes_a_report(tmp_path: Path) -> None:
    found = quantkit.compare(
        "demo-draft",
        ["nf4"],
        tmp_path,
        windows=2,
        window=32,
        batches=[1],
        new_tokens=2,
        reference=False,
        layers=False,
        card_windows=0,
        device="cpu",
        in_one_process=True,
    )
    assert [(one.name, one.error) for one in found.formats] == [("bfloat16", None), ("nf4", None)]
    assert "demo-draft" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "nf4" / "config.json").is_file()
    with pytest.raises(InputError, match="batches"):
        quantkit.compare("demo-draft", ["nf4"], tmp_path, batches=[0], device="cpu")
