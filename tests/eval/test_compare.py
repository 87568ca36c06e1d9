"""`quantkit compare`: every format in its own process, results kept, one that fails beside those that do not."""

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from quantkit.bundled import HELDOUT_TEXT
from quantkit.eval.compare import run as compare_run
from quantkit.eval.compare.asked import Asked
from quantkit.eval.compare.forecast import steps_of
from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.compare.run import check, compare, entries_of
from quantkit.eval.compare.worker import Job, work
from quantkit.eval.quality.measure import QualityResult
from quantkit.eval.quality.predictors import Arithmetic, RememberedPredictor
from quantkit.eval.report.sources import source_lines
from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]
SMALL = ("--windows", 2, "--window", 64, "--batch", "1,2", "--new-tokens", 3, "--device", "cpu")
pytestmark = pytest.mark.xdist_group("compare")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def asked_for(**changes: Any) -> Asked:
    given: dict[str, Any] = {
        "model": "demo-draft", "text": str(HELDOUT_TEXT), "windows": 2, "window": 64, "calibration_text": None,
        "samples": None, "seq_len": None, "batches": (1,), "prompt": 8, "new": 3, "device": "cpu", "reference": False,
    }  # fmt: skip
    return Asked(**(given | changes))


def run(asked: Asked, output: Path, *recipes: str, checkpoints: tuple[str, ...] = (), **watch: Any) -> Comparison:
    entries = entries_of(asked, recipes, checkpoints)
    check(asked, entries)
    return compare(asked, entries, output, "quantkit compare", **watch)


def kl_of(quality: QualityResult | None) -> float:
    assert quality is not None
    assert quality.kl is not None
    return quality.kl.value


def measure_here(job: Job, on_part: object) -> str:
    """A format measured in this process: one of its own imports for seconds. A shape has real ones, and long tests."""
    with redirect_stdout(io.StringIO()):
        work(job)
    return ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """The small bundled model in two formats, the reference measured too."""
    folder = tmp_path_factory.mktemp("compare") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_run, "_run_process", measure_here)
        return folder, run(asked_for(reference=True, batches=(1, 2)), folder, "nf4", "rtn-w3g128")


def test_everything_is_measured(whole: tuple[Path, Comparison]) -> None:
    folder, found = whole
    assert [one.name for one in found.formats] == ["bfloat16", "nf4", "rtn-w3g128"]
    assert [one.error for one in found.formats] == [None] * 3
    base, nf4, w3 = found.formats
    assert base.baseline
    assert base.quality is not None
    assert (kl_of(base.quality), base.making, base.damage) == (0.0, None, None)
    for one in (nf4, w3):
        assert kl_of(one.quality) == pytest.approx(kl_of(one.reference_quality), rel=0.05)
        assert one.damage is not None
        assert len(one.damage.blocks) == len(one.damage.linears["down_proj"]) > 1
        assert one.making is not None
        assert one.running is not None
        assert [speed.batch for speed in one.running.speeds] == [1, 2]
        assert all(speed.tokens_per_second > 0 for speed in one.running.speeds)
        assert [sample.prompt for sample in one.samples] == [sample.prompt for sample in base.samples]
        assert (folder / one.name / "config.json").exists()
    assert kl_of(nf4.quality) < kl_of(w3.quality)
    assert nf4.size.bytes > w3.size.bytes  # type: ignore[union-attr]
    assert not found.machine.gpu
    assert any("CPU" in note for note in found.notes)
    assert source_lines(found) == [
        ("base model", "demo-draft, trained for quantkit, without rounding noise"),
        ("calibration", "nf4, rtn-w3g128: none, the method looks at weights alone"),
        ("protocol", base.quality.protocol),
    ]
    assert "window 64 tokens, stride 64, no BOS" in base.quality.protocol
    assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_what_is_measured_is_not_measured_again(
    whole: tuple[Path, Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = whole

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(compare_run.subprocess, "Popen", refuse)
    again = run(asked_for(reference=True, batches=(1, 2)), folder, "nf4", "rtn-w3g128")
    assert again.formats == found.formats
    with pytest.raises(AssertionError, match="started"):
        run(asked_for(reference=True, batches=(1, 2), seed=1), folder, "nf4")


def test_the_commands_repeat_the_numbers(whole: tuple[Path, Comparison], run_cli: Cli) -> None:
    found = whole[1]
    line = next(line for line in found.formats[2].commands if line.startswith("quantkit eval"))
    measured = json.loads(run_cli(*line.split()[1:], "--json")[1])
    quality = found.formats[2].quality
    assert quality is not None
    assert measured["perplexity"]["value"] == pytest.approx(quality.perplexity.value)
    assert measured["kl"] == pytest.approx(quality.to_dict()["kl"])


def test_one_process_measures_the_same(whole: tuple[Path, Comparison], tmp_path: Path) -> None:
    """All formats in this process, the unquantized model computed once; parts are told as they begin."""
    told: list[tuple[str, str]] = []
    asked = asked_for(card_windows=0, layers=False)
    watch = {"on_part": lambda name, part: told.append((name, part)), "in_one_process": True}
    found = run(asked, tmp_path / "out", "nf4", "rtn-w3g128", **watch)
    assert [one.error for one in found.formats] == [None] * 3
    for one, other in zip(found.formats, whole[1].formats, strict=True):
        assert one.quality == other.quality
        assert one.samples == other.samples
        assert (one.damage, one.reference_quality) == (None, None)
    begun = [one for one in told if ": " not in one[1]]
    assert begun == steps_of(asked, entries_of(asked, ("nf4", "rtn-w3g128"), ()))
    assert "--quality-windows 0" in found.formats[1].commands[0]
    assert not any("--layers" in line for line in found.formats[1].commands)


def test_a_remembered_predictor_computes_a_window_once() -> None:
    class Counting:
        folder, vocab_size, asked = Path("model"), 7, 0

        def logits(self, ids: Tensor) -> Tensor:
            self.asked += 1
            return ids[:-1, None].float().repeat(1, 7)

        def describe(self) -> Arithmetic:
            return Arithmetic("runtime", "float32", "cpu", "counted")

    counting = Counting()
    remembered = RememberedPredictor(counting)
    first, second = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    for ids in (first, second, first.clone(), second):
        assert torch.equal(remembered.logits(ids), ids[:-1, None].float().repeat(1, 7))
    assert counting.asked == 2
    assert (remembered.folder, remembered.vocab_size) == (Path("model"), 7)
    assert str(remembered.describe()) == "runtime: counted, float32 on cpu"


@pytest.mark.long
def test_a_format_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """One that the recipe's own checks refuse, one whose process is killed, one that is well."""
    recipe = "summary: odd groups\nmethod: rtn\nformat: {name: gptq, bits: 4, group_size: 96}\n"
    (tmp_path / "odd.yaml").write_text(recipe)
    killed: list[str] = []

    def kill(name: str, part: str) -> None:
        if name == "rtn-w4g128" and part == "quality":
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            killed.append(name)

    recipes = (str(tmp_path / "odd.yaml"), "rtn-w4g128", "nf4")
    found = run(asked_for(), tmp_path / "out", *recipes, on_part=kill)
    base, odd, dead, well = found.formats
    assert base.error is None
    assert "96" in (odd.error or "")
    assert (odd.size, odd.quality) == (None, None)
    assert killed == ["rtn-w4g128"]
    assert "SIGKILL" in (dead.error or "")
    assert dead.size is not None  # measured before
    assert dead.quality is None
    assert well.error is None
    assert well.running is not None
    again = run(asked_for(), tmp_path / "out", *recipes)  # a failed one is tried again, from where it was
    assert again.formats[2].error is None
    assert again.formats[2].making == dead.making
    assert again.formats[3] == well


@pytest.mark.long
def test_a_shape_has_speed_and_memory_only(tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantized format is measured in a process of its own, which tells how far it is."""
    begin_process = compare_run._run_process
    told: list[tuple[str, str]] = []

    def measure(job: Job, on_part: compare_run.OnPart) -> str:
        if job.entry.kind == "baseline":
            return measure_here(job, on_part)
        return begin_process(job, lambda name, part: told.append((name, part)))

    monkeypatch.setattr(compare_run, "_run_process", measure)
    code, out, err = run_cli("compare", "tiny", "-r", "nf4", "-o", tmp_path / "shape", *SMALL, "--json")
    assert (code, err) == (0, "")
    assert told[0] == ("nf4", "speed")
    found = Comparison.from_dict(json.loads(out))
    assert found.model == "tiny"
    assert any("random" in note for note in found.notes)
    base, nf4 = found.formats
    assert base.size is not None
    assert nf4.size is not None
    assert nf4.running is not None
    assert nf4.size.bits_per_weight < 4.6 < base.size.bits_per_weight == 16
    assert (nf4.quality, nf4.samples) == (None, ())
    assert json.loads((tmp_path / "shape" / "report.json").read_text()) == json.loads(out)
    assert "not measured" in " ".join(json.loads(out)["verdict"]["sentences"])


@pytest.mark.long
def test_a_checkpoint_from_elsewhere_and_the_page(
    tmp_path: Path, run_cli: Cli, quantized_draft: Callable[..., Path]
) -> None:
    shutil.copytree(quantized_draft("llm-int8"), tmp_path / "theirs")
    args = (
        "compare",
        "demo-draft",
        "-r",
        "rtn-w4g128",
        "-c",
        tmp_path / "theirs",
        "-o",
        tmp_path / "out",
        "--no-reference",
    )
    code, out, err = run_cli(*args, *SMALL)
    assert (code, err) == (0, "")
    assert "theirs" in out
    assert "CPU" in out
    page = tmp_path / "out" / "report.html"
    assert str(page) in out
    assert "theirs" in page.read_text(encoding="utf-8")
    assert (tmp_path / "out" / "report.md").exists()


def other_tokenizer(folder: Path) -> Path:
    """The small bundled model with two tokens exchanged."""
    shutil.copytree(model_folder("demo-draft"), folder)
    file = folder / "tokenizer.json"
    contents = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = contents["model"]["vocab"]
    first, second = "\u0120the", "\u0120of"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(contents), encoding="utf-8")
    assert AutoTokenizer.from_pretrained(folder)("of the")["input_ids"] != []
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, quantized_draft: Callable[..., Path]) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("wrong")
    (top / "short.txt").write_text("Too short.\n")
    return {"short": top / "short.txt", "quantized": quantized_draft("nf4"), "mixed": other_tokenizer(top / "mixed")}


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        ("{quantized}", (), ("quantized already", "baseline")),
        ("nowhere", (), ("nowhere",)),
        ("demo-draft", ("-r", "gptq-w5g128"), ("gptq-w5g128", "did you mean")),
        ("demo-draft", ("-r", "nf4", "-r", "nf4"), ("nf4", "two formats")),
        ("demo-draft", ("--text", "{short}"), ("short.txt", "64")),
        ("demo-draft", ("--text", "missing.txt"), ("missing.txt",)),
        ("demo-draft", ("-c", "{mixed}"), ("mixed", "tokenizer")),
        ("demo-draft", ("-c", "missing-folder"), ("missing-folder",)),
        ("demo-draft", ("--batch", "one"), ("one", "1,8,32")),
        ("demo-draft", ("--batch", "0"), ("1 or more",)),
        ("demo-draft", ("--device", "cuda"), ("cuda",)),
        ("tiny", ("-c", "{quantized}"), ("shape",)),
        ("deepseek-v3", (), ("deepseek-v3", "plan")),
    ],
)
def test_wrong_input(
    folders: dict[str, Path], tmp_path: Path, run_cli: Cli, model: str, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    given = (model, "-r", "rtn-w4g128", "-o", str(tmp_path / "out"), *SMALL, *args)
    code, out, err = run_cli("compare", *(str(part).format(**folders) for part in given))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()


def test_results_survive_json(whole: tuple[Path, Comparison]) -> None:
    for one in whole[1].formats:
        assert FormatResult.from_dict(json.loads(json.dumps(one.to_dict()))) == one
