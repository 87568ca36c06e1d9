"""A small engine and a text of a few windows, shared by the tests of heads."""

from pathlib import Path

import pytest
import torch

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.medusa.loss import LmHead
from quantkit.medusa.states import Trace, trace
from quantkit.reference import load_tokenizer
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder


@pytest.fixture(scope="session")
def draft_llm() -> LLM:
    """The smaller bundled model on the CPU."""
    return LLM("demo-draft", device="cpu", max_context=256, max_sequences=8)


@pytest.fixture(scope="session")
def draft_head(draft_llm: LLM) -> LmHead:
    return LmHead.of(draft_llm.engine, Checkpoint(model_folder("demo-draft")))


@pytest.fixture(scope="session")
def traces(draft_llm: LLM) -> list[Trace]:
    """Three windows of 128 tokens of the calibration text."""
    ids = load_tokenizer("demo-draft")(CALIBRATION_TEXT.read_text(encoding="utf-8")[:8000])["input_ids"]
    return trace(draft_llm.engine, list(torch.tensor(ids[: 3 * 128]).view(3, 128)))


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four windows of 512 tokens for the bundled tokenizer: three to train on, one to measure."""
    file = tmp_path_factory.mktemp("texts") / "small.txt"
    file.write_text(CALIBRATION_TEXT.read_text(encoding="utf-8")[:8600], encoding="utf-8")
    return file
