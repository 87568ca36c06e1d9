"""`quantkit demo` from the first line to the report that it names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_the_quick_demo_ends_with_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantkit", "demo", "--quick", "--device", "cpu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    for word in ("bfloat16", "llm-int8", "nf4", "rtn-w3g128", "CPU", "95 % interval"):
        assert word in run.stdout
    page = tmp_path / "demo-output" / "report.html"
    assert f"The report: {page.relative_to(tmp_path)}" in run.stdout
    assert "demo" in page.read_text(encoding="utf-8")
    formats = json.loads((tmp_path / "demo-output" / "report.json").read_text(encoding="utf-8"))["formats"]
    losses = [found["quality"]["kl"]["value"] for found in formats]
    assert losses == sorted(losses)  # 16, 8, 4 and 3 bits
    for line in run.stdout.partition("Try next:")[2].split("\n"):
        if "quantkit generate" in line:
            folder = tmp_path / line.split()[2]
            assert (folder / "config.json").is_file()
