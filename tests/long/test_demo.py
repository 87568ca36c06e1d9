"""`quantkit demo` from the first line to the report that it names."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_the_demo_ends_with_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantkit", "demo", "--windows", "2", "--device", "cpu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    for word in ("bfloat16", "llm-int8", "nf4", "gptq-w4g128", "awq-w4g128", "gptq-w3g128", "CPU"):
        assert word in run.stdout
    page = tmp_path / "demo-output" / "report.html"
    assert f"The report: {page.relative_to(tmp_path)}" in run.stdout
    assert "demo" in page.read_text(encoding="utf-8")
