"""The layers of one block, stage by stage: scale the inputs, round, leave the decoded weight for what comes after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.arch import Family
from quantkit.blocks import weight_of
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError, QuantkitError
from quantkit.formats import Format, GgufWeight, IntegerWeight, QuantizedWeight
from quantkit.formats.base import DTYPES
from quantkit.methods import Method
from quantkit.methods.method import UNREACHED, Rounded
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.folding import (
    column_scales,
    divide_bias,
    divide_norm,
    divide_outputs,
    fold_shape,
    producer_scales,
    row_ratios,
    sampled_weights,
    tied_heads,
)
from quantkit.passes.result import QuantizedBlock, QuantizedLayer, relative_error
from quantkit.passes.scale_limits import Limits, column_limits, norm_limits, row_limits
from quantkit.passes.stage_rounding import RoundedLinear, Unrounded, round_stages
from quantkit.stages import Fold, Stage

OfExpert = tuple[Stage, InputStatistics, Mapping[str, Any]]  # what its linears read, and notes for their log


class Start(NamedTuple):
    """What a linear was rounded from, and reads."""

    weight: Tensor  # with input scales, float32
    absmax: Tensor  # the largest magnitude that it reads


class BlockQuantizer:
    """Collects what becomes of one block."""

    def __init__(
        self,
        source: Checkpoint,
        family: Family,
        chosen: Mapping[str, Format],
        method: Method,
        layer: int,
        on_layer: Callable[[QuantizedLayer], None],
    ) -> None:
        self._source, self._family, self.method, self._on_layer = source, family, method, on_layer
        self._stages = family.stages(layer, source.config)
        self._prefix = f"{family.blocks}.{layer}."
        self.formats = {  # of the linears to quantize, by their name within the block
            module.removeprefix(self._prefix): fmt for module, fmt in chosen.items() if module.startswith(self._prefix)
        }
        self._stored = DTYPES[source.dtype]  # of the plain tensors
        self._unrounded: dict[str, Start] = {}  # where the method goes on from there: `tune_block`
        self._layers: dict[str, QuantizedLayer] = {}
        self._changed: set[str] = set()  # plain tensors that took scales
        self._plain: dict[str, Tensor] = {}  # these, as they were when the block was kept
        self._column_scales: dict[str, Tensor] = {}  # of linears whose norm took them, until they are rounded
        self._norms_of_many = {fold.producer for fold in _norm_folds(self._stages) if fold.also}

    def wants(self, stage: Stage) -> bool:
        return stage.linears[0] in self.formats  # a stage has one scheme

    @contextmanager
    def unrounded(self, block: nn.Module) -> Iterator[tuple[dict[str, Tensor], dict[str, QuantizedWeight]]]:
        """For a while, a block with the weights that its linears were rounded from; gives both, rounded ones last."""
        weights = {name: each.weight for name, each in self._unrounded.items()}
        self._fill(block, weights)
        yield weights, {name: self._layers[name].quantized for name in weights}
        self._fill(block, {name: self._layers[name].quantized.dequantize() for name in self._unrounded})

    def take(self, block: nn.Module, tuned: Mapping[str, Rounded]) -> None:
        """Puts what tuning a block made of its linears in the place of what they were rounded to."""
        self._check_tuned(tuned)
        for name, rounded in tuned.items():
            done, (weight, absmax) = self._layers[name], self._unrounded[name]
            quantized = done.fmt.with_input_scale(rounded.quantized, absmax)
            decoded = quantized.dequantize()
            error = relative_error(decoded, weight)
            log = {key: value for key, value in done.log.items() if key not in ("loss", "rounding_loss")}
            log |= {"start_loss": done.log["loss"]} if "loss" in done.log else {}
            self._layers[name] = QuantizedLayer(
                done.module, done.fmt, quantized, error, log | dict(rounded.notes or {})
            )
            self._fill(block, {name: decoded})
        self._unrounded.clear()
        for layer in self._layers.values():
            self._on_layer(layer)

    def keep(self, block: nn.Module) -> None:
        """Remembers the plain tensors that took scales, for `restore`."""
        self._plain = {name: block.get_parameter(name).detach().clone() for name in self._changed}

    @torch.no_grad()
    def restore(self, block: nn.Module) -> None:
        """Makes a block that has its own weights again what it was when it was kept."""
        for name, values in self._plain.items():
            block.get_parameter(name).copy_(values)
        self._fill(block, {name: layer.quantized.dequantize() for name, layer in self._layers.items()})

    def note(self, notes: Mapping[str, Any]) -> None:
        """Says something of the whole block in the log of each layer."""
        self._layers = {name: replace(layer, log={**layer.log, **notes}) for name, layer in self._layers.items()}

    def quantize(self, block: nn.Module, stage: Stage, inputs: InputStatistics) -> Tensor | None:
        """Quantizes the linears of a stage in place; returns what these inputs are divided by from now on."""
        (divisor,) = self.quantize_together(block, [(stage, inputs, {})])
        return divisor

    def quantize_together(self, block: nn.Module, experts: Sequence[OfExpert]) -> list[Tensor | None]:
        """The same for one stage of several experts (`Stage.by_expert`), with notes for the log of each one's linears.

        The method sees them together.
        """
        ready = [self._scaled(block, *each) for each in experts]
        formats = [self.formats[name] for name in ready[0].stage.names]  # experts of a stage share them
        for one, rounded in zip(ready, round_stages(self.method, ready, formats, self._prefix), strict=True):
            for name, weight, fmt, linear in zip(one.stage.names, one.weights, formats, rounded, strict=True):
                self._keep(block, name, weight, fmt, linear, one.inputs)
        return [one.divisor for one in ready]

    def scale_norm(self, block: nn.Module, norm: str, inputs: InputStatistics) -> tuple[Tensor | None, dict[str, Any]]:
        """Chooses input scales for all that reads a norm, and puts them there: experts, what chooses among them, and
        what stands beside them.

        Returns what is read from now on divided by, and what the log should say. `inputs` are of all tokens.
        """
        if norm not in self._norms_of_many or not self.method.scales_inputs:
            return None, {}
        stages = [stage for stage in self._stages if stage.fold and stage.fold.producer == norm]
        quantized = [name for stage in stages for name in stage.linears if name in self.formats]
        weights, fmt = [weight_of(block.get_submodule(name)) for name in quantized], self.formats[quantized[0]]
        limits = column_limits(weights, fmt).within(self._fold_limits(block, Fold("norm", norm)))
        tie = partial(limits.clamp, head=1)
        choice = self.method.choose_scales(sampled_weights(weights), fmt, inputs, tie)
        notes = {"scaled_loss": choice.loss, "identity_loss": choice.identity_loss}
        if choice.loss >= choice.identity_loss:
            return None, notes
        scales = self._fold(block, Fold("norm", norm), choice.scales, len(choice.scales), 1)
        plain = [name for fold in _norm_folds(stages) for name in fold.also]
        plain += [name for stage in stages for name in stage.linears if name not in self.formats]
        self._column_scales = dict.fromkeys(quantized, scales)
        for name in plain:
            self._changed.add(f"{name}.weight")
            linear = block.get_submodule(name)
            _set_weight(linear, (weight_of(linear).float() * scales).to(self._stored))
        return scales, notes

    def result(self, block: nn.Module) -> QuantizedBlock:
        """Everything that changed, as it will be stored."""
        changed = {}
        for name in sorted(self._changed):
            changed[self._prefix + name] = block.get_parameter(name).detach().to("cpu", self._stored)
        order = [name for stage in self._stages for name in stage.linears if name in self._layers]
        return QuantizedBlock(tuple(self._layers[name] for name in order), changed)

    def _check_tuned(self, tuned: Mapping[str, Rounded]) -> None:
        """Refuses linears that nobody asked for, and some of those that share an input without the others."""
        unknown = sorted(tuned.keys() - self.formats.keys())
        if unknown:
            raise QuantkitError(f"method '{self.method.name}' tuned {', '.join(unknown)}, which it was not asked for")
        for stage in (one for stages in self._stages for one in stages.by_expert):
            if sum(name in tuned for name in stage.names) not in (0, len(stage.names)):
                names = ", ".join(stage.names)
                raise QuantkitError(
                    f"method '{self.method.name}' tuned some of {names}; they share an input: all or none"
                )

    @staticmethod
    @torch.no_grad()
    def _fill(block: nn.Module, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            _set_weight(block.get_submodule(name), weight)

    def _weight(self, block: nn.Module, name: str) -> Tensor:
        """What a linear is rounded from, float32 [out, in]."""
        weight, scales = weight_of(block.get_submodule(name)).float(), self._column_scales.pop(name, None)
        return weight if scales is None else weight * scales

    def _scaled(self, block: nn.Module, stage: Stage, inputs: InputStatistics, notes: Mapping[str, Any]) -> Unrounded:
        weights = [self._weight(block, name) for name in stage.names]
        try:
            divisor, scaling = self._scale(block, stage, weights, self.formats[stage.names[0]], inputs)
        except InputError as error:
            raise InputError(f"{self._prefix}{stage.names[0]}: {error}") from error
        if divisor is not None:  # in float32: the block's own dtype may hold less
            weights = [weight * divisor for weight in weights]
        return Unrounded(stage, weights, inputs, divisor, {**notes, **scaling})

    def _scale(
        self, block: nn.Module, stage: Stage, weights: list[Tensor], fmt: Format, inputs: InputStatistics
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Chooses input scales and puts them into the module before; the columns are then to be multiplied."""
        if not inputs.tokens:
            return None, {"warning": UNREACHED}
        fold, columns, config = stage.fold, inputs.absmax.numel(), self._source.config
        if fold is None or not self.method.scales_inputs or fold.producer in self._norms_of_many:
            return None, {}
        folded, head = fold_shape(self._family, config, fold, columns)
        tie = tied_heads(folded, columns, head)
        limits = column_limits(weights, fmt).of_rows(folded, head).within(self._fold_limits(block, fold, folded))
        choice = self.method.choose_scales(
            torch.cat(weights), fmt, inputs, lambda scales: limits.clamp(tie(scales), head)
        )
        notes = {"scaled_loss": choice.loss, "identity_loss": choice.identity_loss}
        if choice.loss >= choice.identity_loss:
            return None, notes
        scales = self._fold(block, fold, choice.scales, folded, head)
        inputs.divide(scales)
        return scales, notes

    def _fold_limits(self, block: nn.Module, fold: Fold, folded: int = 0) -> Limits:
        """Which scales the module before can hold, of its last outputs."""
        producer, done = block.get_submodule(fold.producer), self._layers.get(fold.producer)
        if fold.kind == "norm":
            return norm_limits(producer, self._family.norm_offset, self._stored)
        if done is None:
            limits = row_limits(producer, self._stored)
        else:
            assert isinstance(done.quantized, IntegerWeight | GgufWeight)  # methods that scale work on these
            limits = Limits(*done.quantized.divisor_limits())
        return Limits(*(each[-folded:] for each in limits))

    def _fold(self, block: nn.Module, fold: Fold, scales: Tensor, folded: int, head: int) -> Tensor:
        """Divides what the module before produces; returns the scales that came out once it is stored."""
        producer = block.get_submodule(fold.producer)
        if fold.kind == "norm":
            self._changed.add(f"{fold.producer}.weight")
            return divide_norm(producer, scales, self._family.norm_offset, self._stored)
        rows = producer_scales(scales, folded, head)
        if fold.producer in self._layers:
            rows = self._divide_rounded(producer, fold.producer, rows)
        else:
            self._changed.add(f"{fold.producer}.weight")
            rows = divide_outputs(producer, rows, self._stored)
        if divide_bias(producer, rows, self._stored):
            self._changed.add(f"{fold.producer}.bias")
        return column_scales(rows, len(scales), head)

    def _divide_rounded(self, producer: nn.Module, name: str, rows: Tensor) -> Tensor:
        """Divides the last rows of a layer that is rounded already; returns what they were really divided by."""
        done = self._layers[name]
        assert isinstance(done.quantized, IntegerWeight | GgufWeight)  # methods that scale work on these
        divisors = torch.ones(done.quantized.shape[0], device=rows.device)
        divisors[-len(rows) :] = rows
        quantized = done.quantized.divide_rows(divisors)
        decoded = quantized.dequantize()
        taken = row_ratios(done.quantized.dequantize(), decoded, divisors)
        self._layers[name] = QuantizedLayer(done.module, done.fmt, quantized, done.relative_error, done.log)
        _set_weight(producer, decoded)
        if name in self._unrounded:
            self._unrounded[name].weight.div_(taken[:, None])
        return taken[-len(rows) :]

    def _keep(
        self, block: nn.Module, name: str, weight: Tensor, fmt: Format, linear: RoundedLinear, inputs: InputStatistics
    ) -> None:
        """Remembers a linear, rounded from `weight`, and leaves its decoded weight in the block."""
        module, quantized = self._prefix + name, linear.quantized
        self._layers[name] = QuantizedLayer(module, fmt, quantized, linear.relative_error, linear.log)
        if self.method.tunes_blocks:  # it is not finished yet
            self._unrounded[name] = Start(weight.clone(), inputs.absmax.amax())
        else:
            self._on_layer(self._layers[name])
        _set_weight(block.get_submodule(name), linear.decoded)


def _norm_folds(stages: Iterable[Stage]) -> list[Fold]:
    return [stage.fold for stage in stages if stage.fold is not None and stage.fold.kind == "norm"]


def _set_weight(linear: nn.Module, weight: Tensor) -> None:
    weight_of(linear).copy_(weight)
