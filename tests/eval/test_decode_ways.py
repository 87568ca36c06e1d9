"""The bench of ways to decode over caches of integers."""

import dataclasses

import pytest
import torch

from quantkit.eval.kernels import decode_ways
from quantkit.eval.kernels.decode_ways import Heads, lines_of
from quantkit.eval.kernels.timing import clock_for
from quantkit.kernels.attention.decode_plan import INTEGERS_TRIED

pytestmark = pytest.mark.kernel

FEW = Heads(kv_heads=1, group=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_way_is_right_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ways, "INTEGERS_TRIED", INTEGERS_TRIED[:2])
    lines = list(lines_of("int8", 2, 40, clock_for(DEVICE, repeat=1), FEW))
    assert [line.way.split("(")[0] for line in lines] == ["query heads as rows", *["IntegerDecodeConfig"] * 2]
    assert all(line.microseconds is not None and line.error < 1e-3 for line in lines)
    assert [line.way for line in lines_of("16-bit", 1, 20, clock_for(DEVICE, repeat=1), FEW)] == ["query heads as rows"]


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ways, "INTEGERS_TRIED", INTEGERS_TRIED[:1])
    real = decode_ways.attend

    def broken(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return real(*tensors, **options) * (2.0 if options["decode"] in INTEGERS_TRIED else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_ways, "attend", broken)
    first, tried = lines_of("int4", 1, 20, clock_for(DEVICE, repeat=1), dataclasses.replace(FEW, group=1))
    assert first.microseconds is not None
    assert tried.microseconds is None


def test_a_batch_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["decode_ways", "int8", "--batch", "32"])
    with pytest.raises(SystemExit):
        decode_ways.main()
    assert "argument --batch: '32' is not sequences x tokens of each" in capsys.readouterr().err
