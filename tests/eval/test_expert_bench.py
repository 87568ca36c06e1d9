"""The bench of experts measures what `choices.py` takes and tries; its clock is left out, which needs a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.eval.engine import shapes
from quantkit.eval.kernels import experts
from quantkit.eval.kernels.experts import Timed, describe, layer_of
from quantkit.kernels.linear.grouped.tile import TileConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(calls: list[Callable[[], Any]]) -> float:
        calls[0]()
        return 1.5

    def few(*_: object) -> Iterator[tuple[int, TileConfig]]:
        yield 8, TileConfig(128, 4, 3)
        yield 8, TileConfig(96, 4, 3)  # no power of 2

    monkeypatch.setattr(shapes, "has_routed_kernels", lambda device: True)
    monkeypatch.setattr(experts, "microseconds", run_once)
    monkeypatch.setattr(experts, "candidates", few)
    monkeypatch.setattr(experts, "_CALLS", 1)


def test_launches_and_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    timed = Timed(layer_of("tiny-experts", "bf16", CPU), 1)
    assert "tiles of 16" in describe(timed.way)
    assert [what for what, _ in timed.launches()] == ["router and routing", "gate and up", "down", "sum", "whole layer"]
    listed = [what for what, *_ in timed.tried()]
    assert listed == ["gate and up, as stored", "down, as stored"]
    assert capsys.readouterr().out.count("does not run here") == 2


def test_eight_bits_are_not_decoded() -> None:
    timed = Timed(layer_of("tiny-experts", "fp8", CPU), 1)
    assert [what for what, _ in timed.launches()] == ["router and routing", "gate and up", "down", "sum", "whole layer"]
    assert [what for what, *_ in timed.tried()] == ["gate and up, as stored", "down, as stored"]


def test_a_device_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "has_routed_kernels", lambda device: False)
    with pytest.raises(InputError, match="experts in 'llm-int8' have no routed kernel on cpu"):
        layer_of("tiny-experts", "llm-int8", CPU)
