"""Shared fixtures: tiny random models saved as real checkpoints. Nothing here needs a network or a GPU."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton asks for it once, when transformers imports it

import quick_interpreter
from few_scales import few_scales
from tiny_models import SETTINGS, save_model  # imports transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quantkit.pipeline.report import QuantizeReport

with suppress(ImportError):  # which a GPU machine may lack
    from hypothesis import settings

    settings.register_profile("quantkit", deadline=None)  # a test never asserts a time: machines are busy
    settings.load_profile("quantkit")

pytest_plugins = ["long_parts"]  # tests/support: which part of the long tests to run
quick_interpreter.speed_up()
torch.set_num_threads(1)  # tests run in parallel processes; more threads than cores wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so do those of the processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file run in one process, so that what they share is made once, unless their marks say otherwise.

    Tests that need a GPU skip themselves where there is none.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What the imports and the collected tests hold stays: each of hundreds of collections would visit all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def tokenized_once() -> Iterator[None]:
    """Long texts are tokenized once in a process: every run that calibrates would take half a second for it."""
    from quantkit import calibration

    tokenize = calibration._text_ids
    known: dict[tuple[str, str], torch.Tensor] = {}

    def tokenize_once(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
        if len(text) < 100_000:
            return tokenize(tokenizer, text)
        key = tokenizer.backend_tokenizer.to_str(), text
        if key not in known:
            known[key] = tokenize(tokenizer, text)
        return known[key].clone()

    calibration._text_ids = tokenize_once
    yield
    calibration._text_ids = tokenize


@pytest.fixture(scope="module", name="few_scales")
def _few_scales() -> Iterator[None]:
    """For a whole file: `pytestmark = pytest.mark.usefixtures("few_scales")`; see `tests/support/few_scales.py`."""
    with few_scales():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped-query attention, 2 layers, hidden size 256, saved in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 512}
    save_model("llama", folder, "bfloat16", **sizes, initializer_range=0.02, tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family_model(name)`: the folder of a tiny model of that family, saved when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("families") / family
            save_model(family, folders[family], **SETTINGS[family])
        return folders[family]

    return folder_of


def _quantized_once(
    tmp_path_factory: pytest.TempPathFactory, model: str | Path
) -> Callable[..., tuple[Path, QuantizeReport]]:
    """`make(recipe, *changes)`: the model in a folder that nobody may change, little calibrated, and the run's report.

    All processes that run tests share it: the first to ask makes it.
    """
    from quantkit import quantize
    from quantkit.calibration import Calibration
    from quantkit.pipeline.report import LayerReport, QuantizeReport
    from quantkit.recipe import load_recipe

    top = tmp_path_factory.getbasetemp()
    shared = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / f"quantized-{Path(model).name}"
    shared.mkdir(exist_ok=True)

    def make(recipe: str, *changes: str) -> tuple[Path, QuantizeReport]:
        loaded = load_recipe(recipe, changes)
        folder = shared / f"{'-'.join((recipe, *changes))}{'.gguf' if loaded.writes_gguf else ''}"
        report = folder.with_name(f"{folder.name}.report")
        with (shared / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not report.exists():
                few = Calibration(samples=2, seq_len=64)  # LLM.int8 looks at data too, for its log
                with few_scales():
                    made = quantize(model, loaded, folder, calibration=few, quality_windows=0)
                report.write_text(json.dumps(asdict(made)))
        kept = json.loads(report.read_text())
        return folder, QuantizeReport(**kept | {"layers": tuple(LayerReport(**layer) for layer in kept["layers"])})

    return make


@pytest.fixture(scope="session")
def quantized_demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantized_demo(recipe, *changes)`: the bundled model of 15 M parameters; see `_quantized_once`."""
    make = _quantized_once(tmp_path_factory, "demo")
    return lambda *recipe: make(*recipe)[0]


@pytest.fixture(scope="session")
def quantized_draft(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantized_draft(recipe, *changes)`: the bundled model of 1.8 M parameters, where any trained model will do."""
    make = _quantized_once(tmp_path_factory, "demo-draft")
    return lambda *recipe: make(*recipe)[0]


@pytest.fixture(scope="session")
def reported_tiny(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Callable[..., tuple[Path, QuantizeReport]]:
    """`reported_tiny(recipe, *changes)`: `tiny_model` by a recipe that needs no data, and the run's report."""
    return _quantized_once(tmp_path_factory, tiny_model)


@pytest.fixture(scope="session")
def quantized_tiny(reported_tiny: Callable[..., tuple[Path, QuantizeReport]]) -> Callable[..., Path]:
    """The same without the report."""
    return lambda *recipe: reported_tiny(*recipe)[0]


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Calls the command line in this process: (exit code, stdout, stderr). A server's logging ends with the test."""
    from quantkit.cli import main

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def run(*args: object) -> tuple[int, str, str]:
        try:
            main([str(arg) for arg in args])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """What a test makes of the root logger, as a server's start in this process does, is gone afterwards."""
    root = logging.getLogger()
    before, level = set(root.handlers), root.level
    yield
    for handler in set(root.handlers) - before:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def assert_refused(run_cli: Callable[..., tuple[int, str, str]]) -> Callable[..., None]:
    """`assert_refused(folder, *arguments, words=...)`: one line, exit code 2, and the folder is as it was."""

    def check(folder: Path, *args: object, words: tuple[str, ...]) -> None:
        before = sorted(folder.rglob("*"))
        code, out, err = run_cli(*args)
        assert code == 2, err
        assert out == ""
        assert err.startswith("quantkit: ")
        assert err.count("\n") == 1, err
        for word in words:
            assert word in err, err
        assert sorted(folder.rglob("*")) == before

    return check
