"""docs/scaling.md and docs/plan.md show what the command prints: every transcript is run again."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"```console\n\$ quantkit (?P<command>plan [^\n]*)\n(?P<output>.+?)```", re.DOTALL)
ALL = "-r gptq-w4g128,nf4,llm-int8,fp8 --batch 1,8,32,256 --tensor-parallel 2,4,8,16"
LEFT_OUT = "..."  # a line that stands for output not shown


def transcripts(page: str) -> Iterator[tuple[str, str]]:
    """(command, output) of the blocks that begin with one command, and go on with what it prints."""
    for block in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        if not block["output"].startswith("$ "):
            yield block["command"], block["output"]


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


CASES = [(page, *found) for page in ("scaling.md", "plan.md") for found in transcripts(page) if "--gpu" in found[0]]


@pytest.mark.parametrize(("page", "command", "shown"), CASES, ids=[f"{page}: {command}" for page, command, _ in CASES])
def test_transcripts_are_what_the_command_prints(run_cli: Cli, page: str, command: str, shown: str) -> None:
    code, out, err = run_cli(*shlex.split(command))
    assert (code, err) == (0, "")
    printed, at = lines(out), 0
    for piece in "\n".join(lines(shown)).split(f"\n{LEFT_OUT}\n"):
        wanted = piece.strip("\n").split("\n")
        places = [place for place in range(at, len(printed)) if printed[place : place + len(wanted)] == wanted]
        assert places, f"{page} shows what `quantkit {command}` does not print:\n{piece}"
        at = places[0] + len(wanted)


def test_all_that_was_asked_for_is_shown() -> None:
    """Both models on 2, 4, 8 and 16 GPUs in five formats, over both links."""
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    for model in ("llama-3.1-70b", "llama-3.1-405b"):
        (shown,) = [output for command, output in transcripts("scaling.md") if f"{model} --gpu h200 {ALL}" in command]
        for gpus in (2, 4, 8, 16):
            assert re.search(rf"│ {gpus} +│ tensor {gpus} ", shown), (model, gpus)
        for word in ("bf16", "gptq-w4g128", "nf4", "llm-int8", "fp8", "bytes reduced", "nvlink 1 ", "pcie 256"):
            assert word in shown, (model, word)
    assert text.count("All tensor or all pipeline on the same GPUs (pcie)") == 2
    assert len(CASES) >= 5
