"""docs/reference/eval.md about behaviour: its transcript is run again, and its example prompts are read."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.eval.behaviour.prompts import read_prompts

Cli = Callable[..., tuple[int, str, str]]
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "eval.md").read_text(encoding="utf-8")
TRANSCRIPT = re.compile(
    r"```console\n\$ quantkit (?P<make>quantize .*)\n\$ quantkit (?P<run>.*)\n(?P<shown>(?s:.+?))```"
)
EXAMPLES = re.compile(r"```json\n(?P<lines>(?s:.+?))```")


@pytest.mark.long
def test_the_transcript_is_what_the_command_prints(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """On a GPU, or with other ways to add up, an answer of this small model may be another one."""
    (found,) = TRANSCRIPT.finditer(PAGE)
    monkeypatch.chdir(tmp_path)
    assert run_cli(*shlex.split(found["make"]), "--device", "cpu")[0] == 0
    code, out, err = run_cli(*shlex.split(found["run"]), "--device", "cpu")
    assert code == 1
    assert [line.rstrip() for line in (out + err).splitlines()] == found["shown"].splitlines()


def test_the_examples_are_prompts(tmp_path: Path) -> None:
    (found,) = EXAMPLES.finditer(PAGE)
    file = tmp_path / "examples.jsonl"
    file.write_text(found["lines"], encoding="utf-8")
    assert [prompt.kind for prompt in read_prompts(file)] == ["chat", "json", "tools"]
