"""What a method is. Whoever quantizes or plans asks the method; nobody tests its type or compares its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, QuantizedWeight
from quantkit.methods.costing import COPIES, GroupWork, Speed
from quantkit.methods.statistics import InputStatistics

LARGEST_SCALE = 1e4  # scales beyond this or its inverse would leave the range of 16-bit norms
UNREACHED = "calibration never reached this layer: plainly rounded"

Tie = Callable[[Tensor], Tensor]  # makes of input scales [in] those that can be stored


@dataclass(frozen=True)
class ScaleChoice:
    """The scales [in] to multiply the columns by, and what they gain."""

    scales: Tensor
    loss: float  # squared error of the outputs, relative to their square
    identity_loss: float  # the same without scales


@dataclass(frozen=True)
class Rounded:
    """A rounded weight; its loss and plain rounding's row by row where H is known; what else the log should say."""

    quantized: QuantizedWeight
    loss: Tensor | None = None  # [out]
    rounding_loss: Tensor | None = None  # [out]
    notes: Mapping[str, float | str] | None = None


class Batches(Protocol):
    """Hidden states [sequences, length, hidden] of all calibration data, a batch at a time on the device."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Tensor: ...
    def __iter__(self) -> Iterator[Tensor]: ...


@dataclass(frozen=True)
class TunedBlock:
    """A decoder block whose linears were scaled and rounded, before what they were rounded to is put into it."""

    module: nn.Module  # with input scales where they belong, and weights that are not rounded yet
    weights: Mapping[str, Tensor]  # the same weights [out, in] in float32, which the module's dtype may not hold
    formats: Mapping[str, Format]  # of the linears to quantize, by their name within the block
    start: Mapping[str, QuantizedWeight]  # what `round` made of them
    forward: Callable[[Tensor], Tensor]  # hidden states before the block -> after it, with gradients where enabled

    def weight(self, name: str) -> Tensor:
        """The weight [out, in] that a linear is rounded from, float32."""
        return self.weights[name]


@dataclass(frozen=True)
class Method(ABC):
    """A frozen value whose fields are the options that a recipe may give; all work is done by what it answers.

    A subclass stands in a file of its own in this folder, or in another package that names it in the entry-point
    group `quantkit.methods`. What it has to bring is `name` and `round`; the rest has answers that suit plain rounding.
    """

    name: ClassVar[str]  # in recipes

    @property
    def calibrated(self) -> bool:
        """Whether it looks at calibration data."""
        return True

    @property
    def wants_hessian(self) -> bool:
        """Whether the statistics of a group's input must have H = sum of x x^T; magnitudes and a sample they all do."""
        return False

    @property
    def wants_drift(self) -> bool:
        """Whether the statistics of a group's input must know how far it is from that of the model that is not
        quantized; only experts never do."""
        return False

    @property
    def scales_inputs(self) -> bool:
        """Whether `choose_scales` is to be called, for which the model family must have folds."""
        return False

    @property
    def searches_grid(self) -> bool:
        """Whether schemes that were not measured are best predicted on searched grids rather than on the extremes."""
        return False

    @property
    def tunes_blocks(self) -> bool:
        """Whether `tune_block` is to be called."""
        return False

    @property
    def candidates(self) -> Mapping[str, Method]:
        """Methods, by what the log calls them. Each block is quantized by the one that leaves its outputs nearest to
        the original's on sequences held back, in the place of this method. None: this method does it itself."""
        return {}

    def check(self, fmt: Format) -> None:
        """Refuses a format that cannot hold what the method produces."""
        if self.scales_inputs:
            require_integer(self.name, fmt)  # only these can be divided once they are rounded

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        """The input scales that suit the stacked weights [out, in] of layers that share an input best.

        `tie` makes of scales those that can be stored: equal where one row of the value layer feeds several columns of
        the output layer (grouped-query attention), and within what 16 bits hold.
        """
        return ScaleChoice(torch.ones_like(inputs.absmax), 0.0, 0.0)

    @abstractmethod
    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        """A weight [out, in] as codes of the format; on integer grids that of all layers that share the input."""

    def round_together(
        self, weights: Sequence[Tensor], fmt: Format, inputs: Sequence[InputStatistics]
    ) -> list[Rounded]:
        """Weights of one shape that each read inputs of their own, as experts do: by default one after the other.

        A method that can work on all of them at once spares a GPU the wait for its host.
        """
        return [self.round(weight, fmt, each) for weight, each in zip(weights, inputs, strict=True)]

    def round_without_data(self, weight: Tensor, fmt: Format) -> Rounded:
        """For methods that are not calibrated: `round`, with statistics of no inputs at all."""
        return self.round(weight, fmt, InputStatistics(weight.shape[1], weight.device, hessian=False))

    def tune_block(self, block: TunedBlock, inputs: Batches, targets: Batches) -> Mapping[str, Rounded]:
        """Linears of a block, rounded together: so that the block makes `targets` of `inputs` as nearly as it can.

        Called once a block, after all of its linears were scaled and rounded as usual. `inputs` come from the quantized
        blocks before; `targets` are what this block makes in the model that is not quantized, so that it may also make
        up for errors of the blocks before. Gradients are enabled here and nowhere else. The block must be left with the
        weights that it came with. The answer is by name within the block, and has all linears that share an input or
        none of them; those that it leaves out stay as they were rounded.
        """
        return {}

    def tuned_sequences(self, samples: int) -> int:
        """Of `samples` calibration sequences: how many times `tune_block` runs one through its block, gradients
        included; the planner counts their seconds."""
        return 0

    def tuning_bytes(self, weights: int) -> int:
        """What `tune_block` holds at once for a block with so many weights to quantize, beyond the block itself."""
        return 0

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        """About how long the method works on a group; forward passes and statistics are counted by the planner."""
        return group.weights * speed.rounding_seconds

    def cost_bytes(self, group: GroupWork) -> int:
        """What the method holds at once for a group beyond statistics and the block itself."""
        return 4 * COPIES * group.weights

    def warnings(self, formats: Collection[Format], widest: int, samples: int, seq_len: int) -> Iterator[str]:
        """What is certain to disappoint with these formats and this much data; `widest`: inputs of the widest layer."""
        return iter(())


def needs_data(method: Method, formats: Iterable[Format | None], target_bits: float | None) -> bool:
    """Whether a run cannot do without calibration: for its method, a format's input scales, or the choice of bits."""
    if method.calibrated or target_bits is not None:
        return True
    rounding = (None if fmt is None else fmt.input_rounding for fmt in formats)
    return any(one is not None and one.calibrated for one in rounding)


def require_integer(method: str, fmt: Format) -> IntegerFormat:
    if not isinstance(fmt, IntegerFormat):
        raise InputError(f"method '{method}' needs a format with an integer grid, not '{fmt.name}'; use method 'rtn'")
    return fmt


def require_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{option} is {value!r}, but must be one of {', '.join(allowed)}")


def require_points(points: int) -> None:
    """Of a search between two ends."""
    if not 1 <= points <= 1000:
        raise InputError(f"points is {points}, but must be 1 to 1000")
