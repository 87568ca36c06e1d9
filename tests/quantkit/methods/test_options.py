"""What a recipe may say about a method: wrong values are refused with what is allowed."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from quantkit.errors import InputError
from quantkit.formats import CtInt8, CtPacked, Format, Gptq, LlmInt8, Nf4
from quantkit.methods import METHODS, MethodOptions
from quantkit.methods.options import AwqOptions, GptqOptions, RtnOptions, SmoothQuantOptions
from quantkit.methods.steps import check_format, needs_hessian, scales_inputs
from quantkit.recipe import load_recipe


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GptqOptions(order="desc"), "order is 'desc', but must be one of static, desc_act, none"),
        (lambda: GptqOptions(grid="mse"), "grid is 'mse', but must be one of minmax, search"),
        (lambda: GptqOptions(scaling="smooth"), "scaling is 'smooth', but must be one of none, awq"),
        (lambda: GptqOptions(damping=0), "damping is 0, but must be above 0 and at most 1"),
        (lambda: GptqOptions(damping=1.5), "damping is 1.5"),
        (lambda: GptqOptions(damping=float("nan")), "damping is nan"),
        (lambda: AwqOptions(points=0), "points is 0, but must be 1 to 1000"),
        (lambda: AwqOptions(points=1001), "points is 1001"),
        (lambda: SmoothQuantOptions(points=0), "points is 0, but must be 1 to 1000"),
    ],
)
def test_wrong_values(build: Callable[[], MethodOptions], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build()


def test_options_are_frozen_values() -> None:
    assert GptqOptions() == GptqOptions(damping=0.01, order="static", grid="search", scaling="none")
    with pytest.raises(FrozenInstanceError):
        GptqOptions().order = "none"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "calibrated", "hessian", "scales"),
    [
        (RtnOptions(), False, False, False),
        (GptqOptions(), True, True, False),
        (GptqOptions(scaling="awq"), True, True, True),
        (AwqOptions(), True, True, True),
        (SmoothQuantOptions(), True, False, True),
    ],
)
def test_what_a_method_needs(options: MethodOptions, calibrated: bool, hessian: bool, scales: bool) -> None:
    assert (options.calibrated, needs_hessian(options), scales_inputs(options)) == (calibrated, hessian, scales)


@pytest.mark.parametrize(
    ("options", "fmt", "words"),
    [
        (GptqOptions(), Nf4(), "'gptq' needs a format with an integer grid, not 'nf4'"),
        (GptqOptions(order="desc_act"), Gptq(), "desc_act scatters the groups, which 'gptq' cannot store"),
        (GptqOptions(order="desc_act"), CtPacked(), "desc_act scatters the groups, which 'ct-packed' cannot store"),
        (AwqOptions(), LlmInt8(), "'awq' needs a format with an integer grid, not 'llm-int8'"),
        (SmoothQuantOptions(), LlmInt8(), "'smoothquant' is for 8-bit weights and activations"),
        (SmoothQuantOptions(), CtPacked(bits=8), "'smoothquant' is for 8-bit weights and activations"),
    ],
)
def test_formats_that_do_not_suit_a_method(options: MethodOptions, fmt: Format, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_format(options, fmt)


@pytest.mark.parametrize(
    ("options", "fmt"),
    [
        (RtnOptions(), Nf4()),
        (GptqOptions(order="desc_act"), Gptq(act_order=True)),
        (GptqOptions(order="desc_act"), CtPacked(group_size=-1)),  # one group a row has nothing to scatter
        (AwqOptions(), CtPacked(bits=3)),
        (SmoothQuantOptions(), CtInt8()),
    ],
)
def test_formats_that_suit_a_method(options: MethodOptions, fmt: Format) -> None:
    check_format(options, fmt)


def test_recipes_give_options() -> None:
    changes = ("method.order=desc_act", "method.damping=0.05", "method.grid=minmax")
    built = load_recipe("gptq-w4g128", changes).method.build()
    assert built == GptqOptions(damping=0.05, order="desc_act", grid="minmax")
    assert load_recipe("awq-w4g128", ("method.points=5",)).method.build() == AwqOptions(points=5)
    with pytest.raises(InputError, match=r"'method.order' is 'up', but must be one of static"):
        load_recipe("gptq-w4g128", ("method.order=up",))
    with pytest.raises(InputError, match=r"unknown key 'method.clipp'.*did you mean 'clip'"):
        load_recipe("awq-w4g128", ("method.clipp=false",))


def test_every_method_is_listed() -> None:
    assert list(METHODS) == ["rtn", "gptq", "awq", "smoothquant"]
    assert all(issubclass(kind, MethodOptions) for kind in METHODS.values())
