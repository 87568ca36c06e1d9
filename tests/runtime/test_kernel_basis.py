"""`serve` says whether kernels were measured on its GPU or are estimated."""

from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.kernels.card import KNOWN, pretend
from quantkit.kernels.linear import dispatch
from quantkit.runtime.device import kernel_basis
from quantkit.runtime.device.kernel_basis import describe_layers
from quantkit.runtime.llm import LLM


def layer(kind: str, outputs: int, inputs: int, *relatives: str) -> Any:
    return SimpleNamespace(kind=kind, relatives=relatives, outputs=outputs, inputs=inputs, device=None)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dispatch, "device_name", lambda device: "nvidia-h200")
    with pretend(KNOWN["sm_90"]):
        yield


@pytest.mark.usefixtures("on_an_h200")
def test_what_is_said() -> None:
    measured = [layer("int4-g128", 28672, 4096), layer("int4-g128", 4096, 4096)]
    borrowed = layer("int4-g256", 4096, 4096, "int4-g128")
    assert describe_layers([*measured, borrowed]) == "kernels as measured on H100"
    other = [layer("int4-g128", 5000, 4096), layer("int4-g128", 5000, 4096), layer("nf4-g64", 5000, 4096)]
    assert describe_layers([*measured, *other]) == (
        "kernels of 2 of 4 kinds of layers are estimated for H100, not measured; "
        "`quantkit bench kernels --tune --shape 5000x4096` with their --format measures them"
    )


@pytest.mark.usefixtures("on_an_h200")
def test_hidden_tables_are_as_none_at_all() -> None:
    layers = [layer("int4-g128", 4096, 4096)]
    with dispatch.hidden_tables():
        assert "1 of 1 kinds of layers are estimated" in str(describe_layers(layers))
    assert describe_layers(layers) == "kernels as measured on H100"


def test_no_table_is_asked_on_a_cpu() -> None:
    llm = LLM("demo-draft", device="cpu", max_context=64)
    assert kernel_basis.kernel_basis(llm.engine.runner.decoder.weights) is None
