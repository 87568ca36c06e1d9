"""The bench of ways to decode over caches of integers."""

import dataclasses

import pytest
import torch

from quantkit.eval.kernels import decode_ways
from quantkit.eval.kernels.decode_ways import Heads, lines_of
from quantkit.eval.kernels.timing import CpuClock
from quantkit.kernels.attention.decode_plan import INTEGERS_TRIED

pytestmark = pytest.mark.kernel

FEW = Heads(kv_heads=1, group=2)


def test_every_way_is_right_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ways, "INTEGERS_TRIED", INTEGERS_TRIED[:2])
    lines = list(lines_of("int8", 2, 40, CpuClock(repeat=1), FEW))
    assert [line.way.split(" ")[0].split("(")[0] for line in lines] == ["default", "rows", "rows"]
    assert all(line.microseconds is not None and line.error < 1e-3 for line in lines)
    assert [line.way for line in lines_of("16-bit", 1, 20, CpuClock(repeat=1), FEW)] == ["default"]


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ways, "INTEGERS_TRIED", INTEGERS_TRIED[:1])
    real = decode_ways.attend

    def broken(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return real(*tensors, **options) * (2.0 if options["decode"] is not None else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_ways, "attend", broken)
    default, tried = lines_of("int4", 1, 20, CpuClock(repeat=1), dataclasses.replace(FEW, group=1))
    assert default.microseconds is not None
    assert tried.microseconds is None


def test_a_batch_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["decode_ways", "int8", "--batch", "32"])
    with pytest.raises(SystemExit):
        decode_ways.main()
    assert "argument --batch: '32' is not sequences x tokens of each" in capsys.readouterr().err
