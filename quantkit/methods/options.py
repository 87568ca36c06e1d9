"""What a recipe may say about a method beyond its name. One frozen value a method; `METHODS` finds them by name."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import InputError


@dataclass(frozen=True)
class MethodOptions:
    """What all methods' options share: whether the method looks at calibration data."""

    @property
    def calibrated(self) -> bool:
        return True


@dataclass(frozen=True)
class RtnOptions(MethodOptions):
    """Plain rounding has no options."""

    @property
    def calibrated(self) -> bool:
        return False


@dataclass(frozen=True)
class GptqOptions(MethodOptions):
    """`order` of the columns: `static` (groups fixed before), `desc_act` (groups follow the order) or `none`.

    `grid`: each group's scale from its extremes (`minmax`), or searched for the least weighted error (`search`).
    `scaling`: `awq` first moves difficulty out of the salient input columns, as method awq does.
    """

    damping: float = 0.01
    order: str = "static"
    grid: str = "search"
    scaling: str = "none"

    def __post_init__(self) -> None:
        _one_of("order", self.order, ("static", "desc_act", "none"))
        _one_of("grid", self.grid, ("minmax", "search"))
        _one_of("scaling", self.scaling, ("none", "awq"))
        if not 0 < self.damping <= 1:
            raise InputError(f"damping is {self.damping}, but must be above 0 and at most 1")


@dataclass(frozen=True)
class AwqOptions(MethodOptions):
    """`points` of the scale search between identity and full strength; `clip`: search each group's range too."""

    points: int = 20
    clip: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.points <= 1000:
            raise InputError(f"points is {self.points}, but must be 1 to 1000")


@dataclass(frozen=True)
class SmoothQuantOptions(MethodOptions):
    """`points` of the search for the migration strength between 0 and 1."""

    points: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.points <= 1000:
            raise InputError(f"points is {self.points}, but must be 1 to 1000")


METHODS: dict[str, type[MethodOptions]] = {
    "rtn": RtnOptions,
    "gptq": GptqOptions,
    "awq": AwqOptions,
    "smoothquant": SmoothQuantOptions,
}


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{option} is {value!r}, but must be one of {', '.join(allowed)}")
