"""Where numbers come from: read from what quantize, import and the training of the bundled models wrote."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.calibration import Calibration
from quantkit.convert import convert
from quantkit.gguf_view import IMPORT_RECORD, import_record
from quantkit.pipeline import quantize
from quantkit.provenance import (
    QUANTIZATION_LOG,
    CalibrationData,
    Origin,
    Provenance,
    origin_of,
    provenance_of,
)
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder


def words(model: str | Path, base: str | None = None) -> tuple[str, str]:
    found = provenance_of(model, base)
    assert Provenance.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    return str(found.origin), str(found.calibration)


def test_the_bundled_models() -> None:
    origin, calibration = words("demo")
    assert origin.startswith("trained for quantkit, the last 3 of 4 stages under 4-bit rounding noise")
    assert calibration == "none, not quantized"
    for model in ("demo-draft", "demo-experts"):
        assert words(model)[0] == "trained for quantkit, without rounding noise"


def test_a_method_without_data(quantized_draft: Callable[..., Path]) -> None:
    assert words(quantized_draft("nf4"))[1] == "none, the method looks at weights alone"


def test_the_default_text(quantized_draft: Callable[..., Path]) -> None:
    folder = quantized_draft("llm-int8")
    assert words(folder) == (
        "trained for quantkit, without rounding noise",
        "the default text calibration.txt, 2 samples of 64 tokens, 128 in all",
    )
    assert provenance_of(folder, "demo").origin.noisy_stages == 3


def test_a_given_text_that_is_called_like_the_default(tmp_path: Path) -> None:
    text = tmp_path / "calibration.txt"
    shutil.copy(model_folder("demo").parent / "text" / "heldout.txt", text)
    shutil.copytree(model_folder("demo-draft"), tmp_path / "model")
    (tmp_path / "model" / "training.json").unlink()
    data = Calibration(text, samples=2, seq_len=16)
    quantize(tmp_path / "model", load_recipe("llm-int8"), tmp_path / "out", calibration=data, quality_windows=0)
    assert words(tmp_path / "out") == ("as given", "given text calibration.txt, 2 samples of 16 tokens, 32 in all")


def test_an_import_is_known_before_and_after_quantization(tmp_path: Path) -> None:
    shutil.copytree(model_folder("demo-draft"), tmp_path / "model")
    (tmp_path / "model" / "training.json").unlink()
    record = import_record("/somewhere/model.Q4_1.gguf", {"Q4_1": 14, "F32": 5})
    (tmp_path / "model" / IMPORT_RECORD).write_text(json.dumps(record))
    quantize(tmp_path / "model", load_recipe("nf4"), tmp_path / "out", quality_windows=0)
    for folder in ("model", "out"):
        said = words(tmp_path / folder)[0]
        assert said == "decoded from the GGUF file model.Q4_1.gguf (14 x Q4_1, 5 x F32), whose losses stay"


def test_what_others_wrote_is_unknown(tmp_path: Path, quantized_draft: Callable[..., Path]) -> None:
    shutil.copytree(quantized_draft("nf4"), tmp_path / "theirs")
    (tmp_path / "theirs" / QUANTIZATION_LOG).unlink()
    assert words(tmp_path / "theirs") == ("as given", "unknown, no record of quantkit's in the folder")


def test_conversion_keeps_what_is_known(tmp_path: Path, quantized_draft: Callable[..., Path]) -> None:
    folder = quantized_draft("nf4")
    convert(folder, "nf4-plain", tmp_path / "plain")
    assert provenance_of(tmp_path / "plain") == provenance_of(folder)
    (tmp_path / "plain" / QUANTIZATION_LOG).unlink()
    convert(tmp_path / "plain", "nf4-plain", tmp_path / "again")
    assert not (tmp_path / "again" / QUANTIZATION_LOG).exists()


def test_a_log_of_an_earlier_version(tmp_path: Path, quantized_draft: Callable[..., Path]) -> None:
    shutil.copytree(quantized_draft("llm-int8"), tmp_path / "old")
    file = tmp_path / "old" / QUANTIZATION_LOG
    first = json.loads(file.read_text().splitlines()[0])
    del first["origin"], first["calibration"]["default"]
    file.write_text(json.dumps(first) + "\n")
    origin, calibration = words(tmp_path / "old")
    assert origin == "as given"
    assert calibration.startswith("the default text calibration.txt")


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[1]",
        json.dumps({"calibration": 3, "origin": {"kind": "gguf", "file": 3}}),
        json.dumps({"calibration": {"samples": "many"}, "origin": {"kind": "trained", "stages": [], "odd": 1}}),
        json.dumps({"calibration": {"source": "\x1b[31m"}, "origin": {"file": "\x1b]0;", "tensor_types": {"\x07": 1}}}),
    ],
)
def test_records_that_are_not_ours_do_no_harm(line: str, tmp_path: Path, quantized_draft: Callable[..., Path]) -> None:
    shutil.copytree(quantized_draft("nf4"), tmp_path / "odd")
    (tmp_path / "odd" / QUANTIZATION_LOG).write_text(line)
    assert all(text.isprintable() for text in words(tmp_path / "odd"))


def test_values_are_the_facts(tmp_path: Path) -> None:
    assert origin_of(tmp_path) == Origin("as given")
    (tmp_path / IMPORT_RECORD).write_text('{"file": "a.gguf", "tensor_types": {"Q8_0": 3}}')
    assert origin_of(tmp_path) == Origin("gguf", file="a.gguf", tensor_types={"Q8_0": 3})
    assert str(CalibrationData("unknown")) != str(CalibrationData("no data"))
