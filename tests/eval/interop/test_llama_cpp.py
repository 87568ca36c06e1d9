"""Perplexity of a GGUF file in llama.cpp and here; a script stands in for llama-perplexity."""

from pathlib import Path

import pytest

from quantkit.bundled import HELDOUT_TEXT
from quantkit.errors import QuantkitError
from quantkit.eval.interop.llama_cpp import COLUMNS, Windows, measure, perplexities_here, perplexity_there
from quantkit.gguf_export import export_gguf

WINDOWS = Windows(HELDOUT_TEXT, 2, 32)


def program(folder: Path, text: str) -> Path:
    file = folder / "llama-perplexity"
    file.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n", encoding="utf-8")
    file.chmod(0o755)
    return folder


def test_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.gguf_import.folder.cache_folder", lambda: tmp_path / "cache")
    export_gguf("demo-draft", tmp_path / "draft.gguf")
    engine, here = perplexities_here("demo-draft", WINDOWS)
    said = f"version: 7\nload: warning: strange\nFinal estimate: PPL = {here * 1.001:.4f} +/- 1.0"
    row = measure(program(tmp_path, said), tmp_path / "draft.gguf", WINDOWS)
    assert set(row) == set(COLUMNS)
    assert row["perplexity_here"] == round(here, 4)  # the file means what the folder means
    assert row["difference_percent"] == pytest.approx(0.1, abs=0.01)
    assert row["perplexity_engine"] == pytest.approx(engine, rel=1e-3)
    assert engine == pytest.approx(here, rel=0.02)  # bfloat16
    assert row["engine_difference_percent"] == pytest.approx(100 * (here * 1.001 / engine - 1), abs=0.02)
    assert (row["engine"], row["warnings"]) == ("llama.cpp 7", "load: warning: strange")
    assert "15 x BF16" in row["types"]


def test_a_program_without_an_answer(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=r"gave no number for .*no\.gguf, exit code 0: cannot load"):
        perplexity_there(program(tmp_path, "cannot load"), tmp_path / "no.gguf", WINDOWS)
