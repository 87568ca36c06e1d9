"""A quantized model that can learn: the original, with learned parts in the place of what was quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, IntegerWeight
from quantkit.touch_up.learned import LIMIT, LearnedScales, Shifted

Inside = Callable[[str], str]  # what transformers calls something that files call so


def check_touch_up(fmt: Format) -> None:
    """Refuses formats whose scales cannot be learned here."""
    if not isinstance(fmt, IntegerFormat) or fmt.input_rounding is not None:
        what = "rounds inputs too" if isinstance(fmt, IntegerFormat) else "has no integer grid"
        raise InputError(f"touch_up learns scales of integers for inputs in 16 bits, but '{fmt.name}' {what}")


class Student:
    """`teacher` is the original, whose tensors are shared where nothing changed them.

    weights  the quantized linears, by their names in files
    plain    other tensors that quantization changed, by theirs: folds of scales
    blocks   what transformers calls the list of decoder blocks; each is computed again for its gradients
    stored   the dtype of norms in files
    """

    def __init__(
        self,
        teacher: nn.Module,
        weights: Mapping[str, IntegerWeight],
        plain: Mapping[str, Tensor],
        blocks: str,
        stored: torch.dtype,
        inside: Inside = str,
    ) -> None:
        self._stored = stored
        shared: dict[int, Any] = {id(each): each for each in chain(teacher.parameters(), teacher.buffers())}
        self.model = copy.deepcopy(teacher, shared).requires_grad_(False)
        for name, tensor in plain.items():
            self._put(inside(name), tensor)
        self._scales = {name: self._learn_linear(inside(name), weight) for name, weight in weights.items()}
        self._norms = {name: self._learn_norm(module) for name, module in _norms(self.model)}
        for block in self.model.get_submodule(blocks).children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        scales = [learned.offsets for learned in self._scales.values()]
        return scales + [shifted.offsets for shifted in self._norms.values()]

    @torch.no_grad()
    def limit(self) -> None:
        for parameter in self.parameters:
            parameter.clamp_(-LIMIT, LIMIT)

    def logits(self, tokens: Tensor) -> Tensor:
        """[length, vocabulary] of one sequence [length]."""
        result: Tensor = self.model(tokens.unsqueeze(0), use_cache=False).logits[0]
        return result

    def weights(self) -> dict[str, IntegerWeight]:
        """The linears by their names in files, with the scales learned so far."""
        return {name: learned.result() for name, learned in self._scales.items()}

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """The weights of norms so far, by transformers' names."""
        names = [f"{name}.weight" for name in self._norms]
        return {name: _tensor(self.model, name).to(self._stored) for name in names}

    def _learn_linear(self, name: str, weight: IntegerWeight) -> LearnedScales:
        linear = self.model.get_submodule(name)
        bias = _tensor(linear, "bias") if linear.bias is not None else None
        learned = LearnedScales(weight, bias, _tensor(linear, "weight").dtype)
        self.model.set_submodule(name, learned)
        return learned

    def _learn_norm(self, module: nn.Module) -> Shifted:
        shifted = Shifted(module.get_parameter("weight"), self._stored)
        parametrize.register_parametrization(module, "weight", shifted, unsafe=True)
        return shifted

    def _put(self, name: str, tensor: Tensor) -> None:
        module, _, own = name.rpartition(".")
        before = self.model.get_parameter(name)
        parameter = nn.Parameter(tensor.to(before.device, before.dtype), requires_grad=False)
        setattr(self.model.get_submodule(module), own, parameter)


def _tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter, or what a parametrization makes of one."""
    found = attrgetter(name)(module)
    assert isinstance(found, Tensor)
    return found


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("Norm") and isinstance(getattr(module, "weight", None), nn.Parameter):
            yield name, module
