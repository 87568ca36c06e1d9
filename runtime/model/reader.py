"""One linear layer from a checkpoint into final device memory; a quantized one is tried before it is trusted.

Plain layers that read the same input (queries, keys, values) are allocated as one matrix and filled from the files. A
quantized layer is read, laid out for its kernel and tried on a random vector against the meaning of its format: a
checkpoint or kernel that would serve garbage is refused by the layer's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.errors import QuantkitError, StorageError
from quantkit.formats import Format, Gguf, Index, QuantizedWeight, Shape
from quantkit.kernels.card import card_of, runs_kernels
from quantkit.kernels.linear.arithmetic import meaning_of_few, meaning_of_many, with_exact_inputs
from quantkit.kernels.linear.decoded import DecodedWeight, why_card_decodes
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.grouped.stacks import lay_out
from quantkit.kernels.linear.op import LinearWeight, linear, prepare
from quantkit.kernels.linear.weight_only.float8 import Float8Steps
from quantkit.kernels.linear.weight_only.weight import PackedWeight
from quantkit.kernels.reference import linear as reference
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.embedding import EMBEDDING, BlockEmbedding
from quantkit.runtime.model.layers import Linear
from quantkit.runtime.model.shards import GroupShare, Share, length, pieces
from quantkit.runtime.model.weight_sizes import held_dtype

# Largest relative difference between kernel and reference. Both round in the dtype of the activations.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Reader:
    """Tensors of one checkpoint on their way to a device."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    tried_rows: int | None = None  # of each quantized layer; None: all
    keeps_halves: bool = True  # matrices stay in 16 bits beside activations of float32, where kernels multiply both
    arithmetic: str | None = None  # of packed weights (`kernels/linear/arithmetic.py`); None: as their format says

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        place = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(place, name, shape)
        return place

    def fill(
        self,
        place: Tensor,
        name: str,
        shape: tuple[int, ...],
        outputs: Index | None = None,
        inputs: Index | None = None,
    ) -> None:
        """Reads a tensor of this shape, or a part of it, straight into its place. Files are mapped: parts are all that
        is read."""
        stored = self.checkpoint.tensor(name)
        if stored.shape != shape:
            raise StorageError(
                f"tensor {name} in {self.checkpoint.folder} has shape {list(stored.shape)}, "
                f"but config.json asks for {list(shape)}"
            )
        if stored.dtype not in _TOLERANCE:
            raise StorageError(
                f"tensor {name} in {self.checkpoint.folder} holds {str(stored.dtype)[6:]} codes without their scales; "
                "the checkpoint is incomplete, quantize or download it again"
            )
        part = stored if outputs is None else stored[outputs]
        place.copy_(part if inputs is None else part[:, inputs])
        require_finite(name, place)

    def matrix_dtype(self, name: str) -> torch.dtype:
        """In which a plain matrix is held."""
        stored = self.checkpoint.tensors.get(name)
        if stored is None or not self.keeps_halves or runs_kernels(self.device):
            return self.dtype
        return held_dtype(stored.info, self.dtype)

    def embedding(self, rows: slice) -> Tensor | BlockEmbedding:
        """Some rows of it; those that the checkpoint has in GGUF blocks stay there, on a CPU in the mapped file."""
        name, shape = f"{EMBEDDING}.weight", (self.config.vocab, self.config.hidden)
        fmt = self.checkpoint.formats.get(EMBEDDING)
        if isinstance(fmt, Gguf):
            self._check_shape(EMBEDDING, self.checkpoint.layer_shape(EMBEDDING), shape)
            return BlockEmbedding(self.dtype, fmt, self.checkpoint.rows(name, rows).to(self.device))
        embedding = torch.empty(rows.stop - rows.start, shape[1], dtype=self.matrix_dtype(name), device=self.device)
        if len(embedding):
            self.fill(embedding, name, shape, rows)
        return embedding

    def linear(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        share: GroupShare | None = None,
        *,
        biased: Collection[str] = (),
    ) -> Linear:
        """Layers that read one input, by full module names and whole sizes; a share of them where one is given.

        Those that are `biased` have a bias; others beside them add zeros.
        """
        if share is None:
            shares = [Share((slice(0, size),), slice(0, inputs)) for size in outputs]
        else:
            shares = list(share.modules)
        modules = list(zip(names, outputs, shares, strict=True))
        if not any(name in self.checkpoint.formats for name in names):
            weights: tuple[Tensor | LinearWeight, ...] = (self._plain(modules, inputs),)
        else:
            loaded = [weight for module in modules for weight in self._weights(*module, inputs, whole=share is None)]
            joined = None if any(isinstance(weight, Tensor) for weight in loaded) else join(loaded)  # type: ignore[arg-type]
            weights = tuple(loaded) if joined is None else (joined,)
        bias = self._bias(modules, biased) if biased and (share is None or share.adds_bias) else None
        return Linear(weights, bias, gathered=share is not None and share.gathered)

    def _plain(self, modules: Sequence[tuple[str, int, Share]], inputs: int) -> Tensor:
        sections = [
            (name, outputs, section, share.inputs) for name, outputs, share in modules for section in share.outputs
        ]
        sizes = [length(section) for _, _, section, _ in sections]
        dtypes = {self.matrix_dtype(f"{name}.weight") for name, *_ in modules}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype
        whole = torch.empty(sum(sizes), length(modules[0][2].inputs), dtype=dtype, device=self.device)
        for (name, outputs, section, columns), part in zip(sections, whole.split(sizes), strict=True):
            self.fill(part, f"{name}.weight", (outputs, inputs), section, columns)
        return whole

    def _weights(
        self, name: str, outputs: int, share: Share, inputs: int, *, whole: bool
    ) -> Iterator[Tensor | LinearWeight]:
        """A module's weight, or the pieces of a rank's share of it."""
        if name not in self.checkpoint.formats:
            yield self._plain([(name, outputs, share)], inputs)
            return
        fmt = self.checkpoint.formats[name]
        if whole:
            quantized = self.quantized(name)
            self._check_shape(name, quantized.shape, (outputs, inputs))
            yield self.prepared(name, fmt, quantized)
            return
        self._check_shape(name, self.checkpoint.layer_shape(name), (outputs, inputs))
        for section in share.outputs:
            for piece in pieces(section, fmt.output_unit):
                part = self.checkpoint.quantized_part(name, piece, share.inputs, self.device)
                yield self.prepared(name, fmt, part)

    def _check_shape(self, name: str, found: Shape, wanted: Shape) -> None:
        if found != wanted:
            raise StorageError(
                f"{name} in {self.checkpoint.folder} is a layer of {list(found)}, "
                f"but config.json asks for {list(wanted)}"
            )

    def quantized(self, name: str) -> QuantizedWeight:
        """A whole layer as its format has it."""
        return self.checkpoint.quantized(name, self.device)

    def prepared(self, name: str, fmt: Format, quantized: QuantizedWeight) -> LinearWeight:
        with self.checkpoint.naming(name):
            few = meaning_of_few(fmt, quantized, self.arithmetic)
            if few.weight is quantized:
                weight = prepare(fmt, quantized, self.dtype, self.arithmetic)
            else:  # rounded once more, which takes its time
                weight = prepare(*few, self.dtype)
            try_layer(name, *few, weight, self.dtype, self.device, self.tried_rows)
            if isinstance(weight, Float8Steps):
                many = weight.fewest_tokens(card_of(self.device))
                wanted = meaning_of_many(weight, quantized, many, self.dtype)
                try_layer(name, *wanted, weight, self.dtype, self.device, self.tried_rows, tokens=many)
        return weight

    def plane(self, name: str, outputs: int, inputs: int) -> PackedWeight | EightBitWeight:
        """A whole quantized layer as stacks of experts take it, tried alone."""
        fmt, quantized = with_exact_inputs(self.checkpoint.formats[name]), self.quantized(name)
        self._check_shape(name, quantized.shape, (outputs, inputs))
        weight = lay_out(fmt, quantized)
        why_not = why_card_decodes(fmt, card_of(self.device)) if runs_kernels(self.device) else None
        tried = weight if why_not is None else DecodedWeight(fmt, quantized, why_not)
        try_layer(name, fmt, quantized, tried, self.dtype, self.device, self.tried_rows)
        return weight

    def decoded(self, name: str, outputs: int, inputs: int) -> Tensor:
        """The weight of a layer that is not run as such."""
        if name not in self.checkpoint.formats:
            return self.tensor(f"{name}.weight", (outputs, inputs))
        quantized = self.quantized(name)
        self._check_shape(name, quantized.shape, (outputs, inputs))
        weight = quantized.dequantize(self.dtype)
        require_finite(name, weight)
        return weight

    def _bias(self, modules: Sequence[tuple[str, int, Share]], biased: Collection[str]) -> Tensor:
        whole = [(self._own_bias(name, size, name in biased), share) for name, size, share in modules]
        return torch.cat([bias[section] for bias, share in whole for section in share.outputs])

    def _own_bias(self, name: str, size: int, stored: bool) -> Tensor:
        if stored:
            return self.tensor(f"{name}.bias", (size,))
        return torch.zeros(size, dtype=self.dtype, device=self.device)


def try_layer(
    name: str,
    fmt: Format,
    quantized: QuantizedWeight,
    weight: LinearWeight,
    dtype: torch.dtype,
    device: torch.device,
    rows: int | None = None,
    tokens: int = 1,
) -> None:
    """Refuses a layer whose kernel for so many tokens does not compute what its format means, or that gives NaN.

    With `rows` only the first outputs are compared: decoding all of them takes longer than the kernel.
    """
    outputs, inputs = quantized.shape
    compared = outputs if rows is None else min(rows, outputs)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator, device=device).to(dtype)
    found = linear(x, weight).float()
    decoded = quantized if compared == outputs else quantized.cut(slice(0, compared), slice(0, inputs))
    wanted = reference.linear(x.float(), fmt, decoded)
    error = float((found[:, :compared] - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if error < _TOLERANCE[dtype] and bool(torch.isfinite(found).all()):
        return
    if compared < outputs:  # what is wrong, all rows say
        try_layer(name, fmt, quantized, weight, dtype, device, tokens=tokens)
    broken = not bool(torch.isfinite(wanted).all())
    reason = "its weights decode to NaN or Inf" if broken else f"its kernel is off by {error:.1e} (relative)"
    raise QuantkitError(f"layer {name} would give garbage: {reason}; quantize or download the checkpoint again")
