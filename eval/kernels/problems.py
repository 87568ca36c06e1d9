"""A case with its data: random weights and inputs, and the exact result of a part of the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantkit.eval.kernels.cases import AttentionCase, Case, LinearCase
from quantkit.formats import Format, LlmInt8, QuantizedWeight, Shape
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.reference import attention as attention_reference
from quantkit.kernels.reference import linear as linear_reference

COMPARED_OUTPUTS = 256  # at most; float64 takes room and time
COMPARED_SEQUENCES = 4
COMPARED_QUERIES = 64  # of a sequence, at its middle and at its end
OUTLIER_EVERY = 512  # inputs; LLM.int8 is made for activations that have outliers
OUTLIER_FACTOR = 20.0


@dataclass(frozen=True)
class LayerWeight:
    """A random weight in its format (None: not quantized), and decoded, which is what peers start from."""

    fmt: Format | None
    quantized: QuantizedWeight | None
    dense: Tensor  # [outputs, inputs] in the case's dtype


@dataclass(frozen=True)
class LinearProblem:
    case: LinearCase
    weight: LayerWeight
    x: Tensor  # [tokens, inputs]

    @property
    def size(self) -> int:
        """Elements of the whole result."""
        return self.case.tokens * self.case.outputs

    @cached_property
    def _rows(self) -> Tensor:
        """Outputs that are compared: spread over all, the last one among them."""
        count = min(COMPARED_OUTPUTS, self.case.outputs)
        return torch.linspace(0, self.case.outputs - 1, count, dtype=torch.float64).round().long().to(self.x.device)

    def pick(self, result: Tensor) -> Tensor:
        return result[:, self._rows]

    @cached_property
    def exact(self) -> Tensor:
        """What `pick` should give, in float64."""
        weight = self.weight
        if weight.fmt is None or weight.quantized is None:
            return self.x.double() @ weight.dense[self._rows].double().mT
        return linear_reference.exact(self.x, weight.fmt, _SomeRows(weight.quantized, self._rows))


@dataclass(frozen=True)
class _SomeRows(QuantizedWeight):
    """A few outputs of a weight."""

    whole: QuantizedWeight
    rows: Tensor

    @property
    def shape(self) -> Shape:
        return len(self.rows), self.whole.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.whole.dequantize(dtype)[self.rows]


@dataclass(frozen=True)
class AttentionProblem:
    case: AttentionCase
    batch: Batch

    @property
    def size(self) -> int:
        return self.batch.tensors[0].numel()

    @cached_property
    def scratch(self) -> Any:
        """Shared by all calls, as a runtime shares it between its layers. For GPUs."""
        from quantkit.kernels.attention.attend import make_scratch

        case = self.case
        return make_scratch(
            self.batch.tensors[0].device,
            sequences=case.batch,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            max_queries=case.new,
        )

    @cached_property
    def _parts(self) -> list[tuple[int, int, int]]:
        """(sequence, first, last + 1) of the new tokens that are compared."""
        new, size = self.case.new, min(self.case.new, COMPARED_QUERIES)
        sequences = {round(i * (self.case.batch - 1) / (COMPARED_SEQUENCES - 1)) for i in range(COMPARED_SEQUENCES)}
        ends = sorted({new, max(size, new // 2)})
        return [(sequence, end - size, end) for sequence in sorted(sequences) for end in ends]

    def pick(self, result: Tensor) -> Tensor:
        rows = result.reshape(self.batch.tensors[0].shape)
        new = self.case.new
        return torch.cat([rows[sequence * new + begin : sequence * new + end] for sequence, begin, end in self._parts])

    @cached_property
    def exact(self) -> Tensor:
        q, keys, values, table, contexts, _ = self.batch.tensors
        new = self.case.new
        found = []
        for sequence, begin, end in self._parts:
            some = q[sequence * new + begin : sequence * new + end]
            context = contexts[sequence : sequence + 1] - (new - end)
            starts = torch.tensor([0, end - begin], dtype=torch.int32, device=q.device)
            part = (some, keys, values, table[sequence : sequence + 1], context, starts)
            found.append(attention_reference.attend(*part, **self.batch.options, dtype=torch.float64))
        return torch.cat(found)


Problem = LinearProblem | AttentionProblem


def make_problems(cases: Sequence[Case], device: torch.device) -> Iterator[Problem]:
    """Data for one case after the other; neighbours with the same weight share it."""
    made: tuple[tuple[str, str, str], LayerWeight] | None = None
    for seed, case in enumerate(cases):
        if isinstance(case, AttentionCase):
            yield AttentionProblem(case, _batch(case, device, seed))
            continue
        key = (case.format, case.layer, case.shape)
        if made is None or made[0] != key:
            made = None  # frees the last one first
            made = (key, _weight(case, device, seed))
        yield LinearProblem(case, made[1], _inputs(case, device, seed))


def _weight(case: LinearCase, device: torch.device, seed: int) -> LayerWeight:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    values = torch.randn(case.outputs, case.inputs, generator=generator, device=device).mul_(0.02)
    if case.fmt is None:
        return LayerWeight(None, None, values.to(dtype))
    quantized = case.fmt.quantize(values.to(dtype))
    return LayerWeight(case.fmt, quantized, quantized.dequantize(dtype))


def _inputs(case: LinearCase, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1_000_000 + seed)
    x = torch.randn(case.tokens, case.inputs, generator=generator, device=device)
    if isinstance(case.fmt, LlmInt8):
        x[:, OUTLIER_EVERY // 8 :: OUTLIER_EVERY] *= OUTLIER_FACTOR
    return x.to(getattr(torch, case.dtype))


def _batch(case: AttentionCase, device: torch.device, seed: int) -> Batch:
    return random_batch(
        [case.length] * case.batch,
        [case.new] * case.batch,
        kv_heads=case.kv_heads,
        group=case.heads // case.kv_heads,
        head_dim=case.head_dim,
        dtype=getattr(torch, case.dtype),
        cache_dtype=case.cache.dtype if case.cache.codes is None else case.cache.codes.dtype,
        device=device,
        seed=seed,
    )
