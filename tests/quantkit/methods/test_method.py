"""Methods as values: options are checked, formats that cannot hold the result refused, and each says what it needs."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import CtFloat8, CtInt8, CtPacked, Format, Gptq, LlmInt8, Nf4
from quantkit.methods import METHODS, Method, needs_data
from quantkit.methods.awq import AwqMethod
from quantkit.methods.best import BestMethod
from quantkit.methods.block_search import BlockSearchMethod
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.rtn import RtnMethod
from quantkit.methods.smoothquant import SmoothQuantMethod
from quantkit.methods.statistics import SAMPLE
from quantkit.methods.tuned import TunedMethod
from quantkit.recipe import load_recipe


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GptqMethod(order="desc"), "order is 'desc', but must be one of static, desc_act, none"),
        (lambda: GptqMethod(grid="mse"), "grid is 'mse', but must be one of minmax, search"),
        (lambda: GptqMethod(scaling="smooth"), "scaling is 'smooth', but must be one of none, awq"),
        (lambda: GptqMethod(damping=0), "damping is 0, but must be above 0 and at most 1"),
        (lambda: GptqMethod(damping=1.5), "damping is 1.5"),
        (lambda: GptqMethod(damping=float("nan")), "damping is nan"),
        (lambda: AwqMethod(points=0), "points is 0, but must be 1 to 1000"),
        (lambda: AwqMethod(points=1001), "points is 1001"),
        (lambda: BestMethod(damping=2.0), "damping is 2.0, but must be above 0 and at most 1"),
        (lambda: SmoothQuantMethod(points=0), "points is 0, but must be 1 to 1000"),
    ],
)
def test_wrong_values(build: Callable[[], Method], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build()


def test_options_are_frozen_values() -> None:
    assert GptqMethod() == GptqMethod(damping=0.01, order="static", grid="search", scaling="none")
    with pytest.raises(FrozenInstanceError):
        GptqMethod().order = "none"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "calibrated", "hessian", "scales"),
    [
        (RtnMethod(), False, False, False),
        (GptqMethod(), True, True, False),
        (GptqMethod(scaling="awq"), True, True, True),
        (AwqMethod(), True, True, True),
        (BestMethod(), True, True, True),
        (SmoothQuantMethod(), True, False, True),
    ],
)
def test_what_a_method_needs(method: Method, calibrated: bool, hessian: bool, scales: bool) -> None:
    assert (method.calibrated, method.wants_hessian, method.scales_inputs) == (calibrated, hessian, scales)


@pytest.mark.parametrize(
    ("method", "fmt", "words"),
    [
        (GptqMethod(), Nf4(), "'gptq' needs a format with an integer grid, not 'nf4'"),
        (GptqMethod(order="desc_act"), Gptq(), "desc_act scatters the groups, which 'gptq' cannot store"),
        (GptqMethod(order="desc_act"), CtPacked(), "desc_act scatters the groups, which 'ct-packed' cannot store"),
        (BestMethod(), Nf4(), "'best' needs a format with an integer grid, not 'nf4'"),
        (AwqMethod(), LlmInt8(), "'awq' needs a format with an integer grid, not 'llm-int8'"),
        (SmoothQuantMethod(), LlmInt8(), "'smoothquant' is for 8-bit weights and activations"),
        (SmoothQuantMethod(), CtPacked(bits=8), "'smoothquant' is for 8-bit weights and activations"),
    ],
)
def test_formats_that_do_not_suit_a_method(method: Method, fmt: Format, words: str) -> None:
    with pytest.raises(InputError, match=words):
        method.check(fmt)


@pytest.mark.parametrize(
    ("method", "fmt"),
    [
        (RtnMethod(), Nf4()),
        (GptqMethod(order="desc_act"), Gptq(act_order=True)),
        (GptqMethod(order="desc_act"), CtPacked(group_size=-1)),  # one group a row has nothing to scatter
        (AwqMethod(), CtPacked(bits=3)),
        (SmoothQuantMethod(), CtInt8()),
    ],
)
def test_formats_that_suit_a_method(method: Method, fmt: Format) -> None:
    method.check(fmt)


def test_recipes_give_options() -> None:
    changes = ("method.order=desc_act", "method.damping=0.05", "method.grid=minmax")
    built = load_recipe("gptq-w4g128", changes).method.build()
    assert built == GptqMethod(damping=0.05, order="desc_act", grid="minmax")
    assert load_recipe("awq-w4g128", ("method.points=5",)).method.build() == AwqMethod(points=5)
    with pytest.raises(InputError, match=r"'method.order' is 'up', but must be one of static"):
        load_recipe("gptq-w4g128", ("method.order=up",))
    with pytest.raises(InputError, match=r"unknown key 'method.clipp'.*did you mean 'clip'"):
        load_recipe("awq-w4g128", ("method.clipp=false",))


def test_every_method_is_listed() -> None:
    assert list(METHODS) == ["awq", "best", "block-search", "gptq", "rtn", "smoothquant", "tuned"]
    assert all(issubclass(kind, Method) for kind in METHODS.values())


GROUP = GroupWork(64, (32, 16), CtPacked())  # 3,072 weights
ROUNDING = 3072 * 1e-3
BY_HESSIAN = 2 * 48 * 64**2 / 1e6


@pytest.mark.parametrize(
    ("method", "seconds"),
    [
        (RtnMethod(), ROUNDING),
        (AwqMethod(points=5, clip=False), ROUNDING + 2 * BY_HESSIAN + 10 * (ROUNDING + BY_HESSIAN)),
        (AwqMethod(points=5), ROUNDING + 2 * BY_HESSIAN + 10 * (6 * ROUNDING + BY_HESSIAN) + 42 * ROUNDING),
        (SmoothQuantMethod(points=4), ROUNDING + 5 * (ROUNDING + 2 * SAMPLE * 3072 / 1e6)),
        (GptqMethod(grid="minmax", target="layer"), ROUNDING + 3 * BY_HESSIAN + 4 * 64**3 / 1e6 + 64 * 2.0),
        (BlockSearchMethod(rounding="nearest"), ROUNDING + BY_HESSIAN),
        (BlockSearchMethod(), ROUNDING + 3 * BY_HESSIAN + 4 * 64**3 / 1e6 + 64 * 2.0),
        (GptqMethod(), ROUNDING + 5 * BY_HESSIAN + 4 * 64**3 / 1e6 + 64 * 2.0 + 42 * ROUNDING),
        (
            GptqMethod(grid="minmax", scaling="awq", target="layer"),
            ROUNDING + 3 * BY_HESSIAN + 4 * 64**3 / 1e6 + 64 * 2.0 + 40 * (ROUNDING + BY_HESSIAN),
        ),
        (
            BestMethod(),  # awq+gptq twice, awq and gptq once: searches of scales cost most
            4 * ROUNDING
            + 3 * (5 * BY_HESSIAN + 4 * 64**3 / 1e6 + 64 * 2.0)
            + 2 * BY_HESSIAN
            + 3 * 40 * (6 * ROUNDING + BY_HESSIAN)
            + 4 * 42 * ROUNDING,
        ),
        (
            TunedMethod(steps=5, start="gptq"),
            ROUNDING + 5 * BY_HESSIAN + 4 * 64**3 / 1e6 + 64 * 2.0 + 42 * ROUNDING + 15 * ROUNDING,
        ),
    ],
)
def test_seconds_on_a_device_of_known_speed(method: Method, seconds: float) -> None:
    """128 columns take 256 seconds here, however many outputs they have."""
    speed = Speed(torch.device("cpu"), 1e6, 1e6, 1e-3, lambda name, work: 256.0)
    assert method.cost_seconds(GROUP, 1000, speed) == pytest.approx(seconds)
    assert method.cost_bytes(GROUP) == 4 * 4 * 3072


@pytest.mark.parametrize(
    ("method", "formats", "target_bits", "needed"),
    [
        (RtnMethod(), [CtPacked(), None], None, False),
        (RtnMethod(), [CtPacked(), CtFloat8(activations="static")], None, True),
        (RtnMethod(), [CtPacked()], 3.5, True),  # bits are chosen by what they cost on data
        (SmoothQuantMethod(), [None], None, True),
    ],
)
def test_what_makes_a_run_need_data(
    method: Method, formats: list[Format | None], target_bits: float | None, needed: bool
) -> None:
    assert needs_data(method, formats, target_bits) == needed
