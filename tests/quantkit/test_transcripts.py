"""Transcripts of all pages: each is run again here or by a test that is named, or a table says why nobody runs it.

Output is compared line by line, to the letter; a line `...` in a page stands for lines that are left out, and spaces at
the ends of lines do not count. Where numbers may differ from machine to machine, as those of `eval` in their last
digits, the words must be equal and the numbers close (`assert_close`). All run as on a machine without a GPU.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from guide_blocks import FOLDERS
from pages import PAGES, ROOT, Transcript, assert_close, not_printed, quantkit_arguments, transcripts

Cli = Callable[..., tuple[int, str, str]]
_LARGE_TABLE = "-r gptq-w4g128,nf4,llm-int8,fp8 --batch 1,8,32,256 --tensor-parallel 2,4,8,16"
_FILE = "needs SmolLM2-135M-Instruct.Q4_1.gguf, 90 MB of a PyPI package"
_QUESTION = '"Explain in two sentences why the sky is blue."'
LONG = {  # seconds each; all else that begins with `quantkit plan` runs in `make test`
    ("docs/explanations/scaling.md", f"quantkit plan llama-3.1-70b --gpu h200 {_LARGE_TABLE}"),
    ("docs/explanations/scaling.md", f"quantkit plan llama-3.1-405b --gpu h200 {_LARGE_TABLE}"),
}
MEASURED = {  # minutes, and numbers that need a tolerance
    ("docs/reference/eval.md", "quantkit eval demo-awq --base demo --layers"),
}
ELSEWHERE = {  # with what the test must prepare for them
    ("docs/reference/gguf.md", "quantkit convert demo --to gguf -o demo.gguf"):
        "tests/quantkit/gguf_export/test_export.py::test_the_documented_command",
    ("docs/explanations/scaling.md", "quantkit inspect model-w4 --launch --tensor-parallel 2 --max-context 8192"):
        "tests/quantkit/test_launch.py::test_the_documented_commands",
    ("docs/reference/eval.md",
     "quantkit eval draft-w2 --base demo-draft --behaviour --behaviour-tokens 64 --behaviour-gate"):
        "tests/eval/test_behaviour_docs.py::test_the_transcript_is_what_the_command_prints",
    ("docs/reference/serving.md", "quantkit serve large=demo small=demo-draft --device cpu --port 8123"):
        "tests/runtime/server/test_docs_several_models.py::test_the_transcript_is_what_the_server_prints",
}  # fmt: skip
NOT_RUN = {
    ("docs/reference/compare.md", "make demo"):
        "minutes, and speeds of one machine; tests/long/test_demo.py runs the quick one, its sizes are below",
    ("docs/reference/import.md", "quantkit import SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2"): _FILE,
    ("docs/reference/import.md", f"quantkit generate smollm2 {_QUESTION} --chat --max-tokens 80"): _FILE,
    ("docs/reference/import.md", "quantkit import half.gguf -o half"): _FILE,
    ("docs/reference/gguf.md",
     f"quantkit generate SmolLM2-135M-Instruct.Q4_1.gguf {_QUESTION} --chat --max-tokens 60"): _FILE,
    ("docs/explanations/medusa.md",
     "quantkit train-medusa demo -o demo-medusa --self-generated 600 --epochs 4 --device cpu"):
        "19 minutes of one core",
}  # fmt: skip
ALL = {transcript.name: transcript for transcript in transcripts()}
PLANS = {name for name in ALL if name[1].startswith("quantkit plan ")}
GUIDES = {name for name in ALL if name[0].startswith(FOLDERS)}  # tests/quantkit/test_docs_guides.py runs them all


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def ids(names: set[tuple[str, str]]) -> list[str]:
    return [f"{page}: {command}" for page, command in sorted(names)]


def check_plan(run_cli: Cli, transcript: Transcript) -> None:
    code, out, err = run_cli(*transcript.arguments)
    assert (code, err) == (0, "")
    piece = not_printed(transcript.shown, out)
    assert piece is None, f"{transcript.page} shows what `{transcript.command}` does not print:\n{piece}"


@pytest.mark.parametrize("name", sorted(PLANS - LONG), ids=ids(PLANS - LONG))
def test_plans_are_what_the_command_prints(run_cli: Cli, name: tuple[str, str]) -> None:
    check_plan(run_cli, ALL[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(LONG), ids=ids(LONG))
def test_large_plans_are_what_the_command_prints(run_cli: Cli, name: tuple[str, str]) -> None:
    check_plan(run_cli, ALL[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MEASURED), ids=ids(MEASURED))
def test_measured_numbers_are_close_to_the_page(
    run_cli: Cli, name: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcript = ALL[name]
    monkeypatch.chdir(tmp_path)
    for command in transcript.before:
        assert run_cli(*quantkit_arguments(command))[0] == 0
    code, out, err = run_cli(*transcript.arguments)
    assert (code, err) == (0, "")
    assert_close(transcript.shown, out)


def test_sizes_of_the_demo_are_those_of_the_plan(run_cli: Cli) -> None:
    """Of the transcript that takes minutes, what arithmetic knows: bytes, and bits per weight."""
    demo = ALL["docs/reference/compare.md", "make demo"].shown
    shown = re.findall(r"^│ ([\w-]+)(?: \*)? +│ +([\d.]+) MB │ +([\d.]+) │", demo, re.MULTILINE)
    recipes = ",".join(name for name, *_ in shown if name != "bfloat16")
    code, out, _ = run_cli("plan", "demo", "--gpu", "h200", "-r", recipes, "--json")
    assert code == 0
    found = [one["weights"] for one in json.loads(out)["formats"]]
    planned = [(one["name"], f"{one['bytes'] / 1e6:.2f}", f"{one['linear_bits']:.2f}") for one in found]
    assert planned == [(name.replace("bfloat16", "bf16"), *sizes) for name, *sizes in shown]
    assert len(planned) == 6


def test_every_transcript_is_in_one_group() -> None:
    """A new one must be entered; one that is gone must go here too."""
    groups = [PLANS, GUIDES, MEASURED, set(ELSEWHERE), set(NOT_RUN)]
    assert set().union(*groups) == set(ALL)
    assert sum(map(len, groups)) == len(ALL) == len(transcripts())
    assert LONG <= PLANS
    assert all(NOT_RUN.values())


@pytest.mark.parametrize(("name", "test"), sorted(ELSEWHERE.items()), ids=ids(set(ELSEWHERE)))
def test_transcripts_that_others_run_are_run(name: tuple[str, str], test: str) -> None:
    file, _, function = test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {function}(" in text
    assert Path(name[0]).name in text


def test_differences_would_be_seen() -> None:
    assert len(PLANS) > 8
    assert not_printed("a\n...\nc\n", "a\nb\nc\n") is None
    assert not_printed("a\nc\n", "a\nb\nc\n") == "a\nc"
    assert not_printed("c\n...\na\n", "a\nb\nc\n") == "a"
    assert_close("loss 1.000 of 2,000\nperplexity 16.40", "loss 1.07 of  2,001\nperplexity 16.45")
    for other in ("loss 1.09 of 2,000", "lost 1.00 of 2,000", "loss 1.000", "loss 1.000 of 2,000\nand more"):
        with pytest.raises((AssertionError, ValueError)):
            assert_close("loss 1.000 of 2,000", other)
    with pytest.raises(AssertionError):
        assert_close("perplexity 16.40", "perplexity 16.50")


def test_all_layouts_that_were_asked_for_are_shown() -> None:
    """Both models on 2, 4, 8 and 16 GPUs in five formats, over both links."""
    for page, command in LONG:
        shown = ALL[page, command].shown
        for gpus in (2, 4, 8, 16):
            assert re.search(rf"│ {gpus} +│ tensor {gpus} ", shown), (command, gpus)
        for word in ("bf16", "gptq-w4g128", "nf4", "llm-int8", "fp8", "bytes reduced", "nvlink 1 ", "pcie 256"):
            assert word in shown, (command, word)
    assert {shlex.split(command)[2] for _, command in LONG} == {"llama-3.1-70b", "llama-3.1-405b"}
    assert PAGES["docs/explanations/scaling.md"].count("All tensor or all pipeline on the same GPUs (pcie)") == 2
