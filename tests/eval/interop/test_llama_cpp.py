"""Perplexity of a GGUF file in llama.cpp and here; a script stands in for llama-perplexity."""

from pathlib import Path

import pytest
import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import Calibration
from quantkit.errors import QuantkitError
from quantkit.eval.interop.llama_cpp import COLUMNS, Windows, measure, perplexities_here, perplexity_there
from quantkit.eval.interop.llama_rounding import block_of, rounded
from quantkit.formats import Gguf
from quantkit.gguf_export import export_gguf
from quantkit.pipeline import quantize
from quantkit.recipe import load_recipe

WINDOWS = Windows(HELDOUT_TEXT, 2, 32)


def program(folder: Path, text: str) -> Path:
    file = folder / "llama-perplexity"
    file.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n", encoding="utf-8")
    file.chmod(0o755)
    return folder


def test_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.gguf_import.folder.cache_folder", lambda: tmp_path / "cache")
    export_gguf("demo-draft", tmp_path / "draft.gguf")
    here = perplexities_here("demo-draft", WINDOWS)
    assert here.rounded == here.decoded  # no blocks
    assert here.engine == pytest.approx(here.decoded, rel=0.02)  # bfloat16
    said = f"version: 7\nload: warning: strange\nFinal estimate: PPL = {here.decoded * 1.001:.4f} +/- 1.0"
    row = measure(program(tmp_path, said), tmp_path / "draft.gguf", WINDOWS)
    assert set(row) == set(COLUMNS)
    assert row["perplexity_here"] == round(here.decoded, 4)  # the file means what the folder means
    assert row["difference_percent"] == row["rounded_difference_percent"] == pytest.approx(0.1, abs=0.01)
    engine = here.decoded * 1.001 / here.engine - 1
    assert row["engine_difference_percent"] == pytest.approx(100 * engine, abs=0.02)
    assert (row["engine"], row["warnings"]) == ("llama.cpp 7", "load: warning: strange")
    assert "15 x BF16" in row["types"]


def test_a_program_without_an_answer(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=r"gave no number for .*no\.gguf, exit code 0: cannot load"):
        perplexity_there(program(tmp_path, "cannot load"), tmp_path / "no.gguf", WINDOWS)


def test_inputs_are_rounded_by_the_blocks_of_the_weight() -> None:
    """A large input costs those that share its scale their digits, and no others."""
    x = torch.full((1, 512), 0.01)
    x[0, 0] = 127.0
    small, large = rounded(x, block_of(Gguf("Q4_0"))), rounded(x, block_of(Gguf("Q4_K")))
    assert small[0, 0] == large[0, 0] == 127.0
    assert (small == 0).sum() == 31
    assert (large == 0).sum() == 255
    assert torch.equal(rounded(torch.zeros(2, 64), 32), torch.zeros(2, 64))
    assert block_of(Gguf("IQ4_XS")) == 256
    assert block_of(Gguf("IQ4_NL")) == 32


def test_linears_of_a_file_see_rounded_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.gguf_import.folder.cache_folder", lambda: tmp_path / "cache")
    little = Calibration(samples=2, seq_len=64)
    quantize("demo-draft", load_recipe("q8_0"), tmp_path / "draft.gguf", calibration=little, quality_windows=0)
    here = perplexities_here(tmp_path / "draft.gguf", WINDOWS)
    assert here.rounded != here.decoded
    assert here.rounded == pytest.approx(here.decoded, rel=0.02)
