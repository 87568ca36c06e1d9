"""Weights at random for a model of a known shape (`eval/shapes.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.arch.sizes import LatentSizes
from quantkit.errors import InputError
from quantkit.eval.engine.outliers import OutlierProfile
from quantkit.eval.shapes import EXPERT_SHAPES, LATENT_SHAPES, PLAIN_SHAPES
from quantkit.formats import Format, QuantizedWeight
from quantkit.formats.base import ANY_LENGTH
from quantkit.kernels.linear.arithmetic import takes_float8
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.grouped.stacks import lay_out, stack_of
from quantkit.kernels.linear.grouped.weight import GroupedWeight, lay_out_half, why_not
from quantkit.kernels.linear.op import LinearWeight, prepare
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.embedding import CodedEmbedding, embedding_of_head
from quantkit.runtime.model.experts import ExpertMlp, GroupedMlp, SharedExpert, rule_of
from quantkit.runtime.model.layers import Block, DenseMlp, LatentProjections, Linear, Mlp, Weights
from quantkit.runtime.model.lm_head import head_in_bits, more_bytes
from quantkit.runtime.model.loading import has_routed_kernels
from quantkit.stages import Experts, Stage

SHAPES = PLAIN_SHAPES | EXPERT_SHAPES | LATENT_SHAPES
# Activations of a random MLP have no few outlier columns, as trained ones have: with weights twice as large, thousands
# of tokens would put a value of 6 into every column, and LLM.int8 would compute everything in 16 bit.
_SPREAD = 0.01
# With a profile of outliers: weights of all norms, and how many times as large those of outlier columns are; how large
# values are, so that their mean over a context is an outlier still, and products of gate and up.
_ORDINARY_NORM, _LARGE_NORM, _LARGE_VALUE, _LARGE_PRODUCT = 0.5, 32.0, 1000.0, 20.0
# Experts of a layer whose quantized weights differ; others are copies of them. Memory that is read is each one's own.
_DISTINCT = 4


class RandomWeights:
    """Weights of a shape in a format, made on the device."""

    def __init__(
        self,
        config: ModelConfig,
        fmt: Format | None,
        dtype: torch.dtype,
        device: torch.device,
        head_bits: int | None = None,
        *,
        zeros: bool = False,
        experts_alone: bool = False,
        outliers: OutlierProfile | None = None,
        arithmetic: str | None = None,
    ) -> None:
        """Every linear in one format, or those of experts alone; None: as it is. `zeros`: of blocks, instead of weights
        at random. `outliers`: columns that linears read have some, as many as a profile says. `arithmetic`: of linears
        that are not experts (`kernels/linear/arithmetic.py`)."""
        if outliers is not None and any(config.latent or stage.routed for stages in config.stages for stage in stages):
            raise InputError("--outliers is for shapes without experts and latent attention; leave it out")
        self._outliers = outliers
        self._config = config
        self._of_experts = fmt
        self._format = None if experts_alone else fmt  # of all others
        self._dtype = dtype
        self._head_bits = head_bits
        self._zeros = zeros
        self._arithmetic = arithmetic
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def nbytes(self) -> int:
        """What they will take: as stored, which is what kernels read too."""
        config = self._config
        plain = config.vocab * config.hidden * (1 if config.tied else 2) * self._dtype.itemsize
        plain += more_bytes(config, self._dtype, self._head_bits)
        routers = (stage.experts for stages in config.stages for stage in stages if stage.role == "gate_up")
        plain += sum(one.count * config.hidden * self._router_dtype(one).itemsize for one in routers if one)
        return plain + sum(self._stored(*linear) for linear in self._linears()) + self._copied()

    def _copied(self) -> int:
        """Bytes of copies in float8, of which experts have none."""
        fmt = self._format
        if self._arithmetic != "fp8-copy" or fmt is None or not takes_float8(fmt):
            return 0
        stages = (stage for stages in self._config.stages for stage in stages if not stage.routed)
        return sum(
            sum(self._config.outputs(stage)) * self._config.inputs(stage) for stage in stages if stage.role != "kv_b"
        )

    def _linears(self) -> Iterator[tuple[int, int, Format | None]]:
        for stage in (stage for stages in self._config.stages for stage in stages):
            fmt = self._of_experts if stage.routed else self._format
            fmt = None if stage.role == "kv_b" else fmt  # which the engine decodes
            yield from ((rows, self._config.inputs(stage), fmt) for rows in self._config.outputs(stage))

    def _stored(self, rows: int, inputs: int, fmt: Format | None) -> int:
        if fmt is None:
            return rows * inputs * self._dtype.itemsize
        parts = [part for part in fmt.parts((rows, inputs)).values() if ANY_LENGTH not in part.shape]
        return sum(part.dtype.itemsize * torch.Size(part.shape).numel() for part in parts)

    def load(self) -> Weights:
        config = self._config
        table = self._random(config.vocab, config.hidden)
        embedding: Tensor | CodedEmbedding = table
        head = Linear((table if config.tied else self._random(config.vocab, config.hidden),))
        head = head_in_bits(head, self._head_bits, self._dtype, self._prepare)
        if config.tied:
            embedding = embedding_of_head(table, head.weights[0])
        del table
        blocks = tuple(self._block(stages) for stages in config.stages)
        return Weights(embedding, blocks, self._ones(config.hidden), head)

    def _prepare(self, name: str, fmt: Format, quantized: QuantizedWeight) -> LinearWeight:
        return prepare(fmt, quantized, self._dtype)

    def _block(self, stages: tuple[Stage, ...]) -> Block:
        config, by_role = self._config, {stage.role: stage for stage in stages}
        norm, of_head = self._ones(config.hidden), self._ones(config.head_dim) if config.family.qk_norm else None
        biased = config.family.qkv_bias  # as a silent config.json means it
        return Block(
            before_attention=self._norm(norm, "qkv"),
            qkv=self._of_stage(by_role["qkv"], self._format, biased=biased in ("always", "assumed")),
            q_norm=of_head,
            k_norm=of_head,
            output=self._of_stage(by_role["output"], self._format, biased=biased == "assumed"),
            after_attention=None,
            before_mlp=self._norm(norm, "gate_up"),
            mlp=self._mlp(by_role),
            after_mlp=None,
            latent=None if config.latent is None else self._latent(by_role, config.latent),
            sinks=self._random(config.heads) if config.family.sinks else None,
        )

    def _latent(self, by_role: dict[str, Stage], sizes: LatentSizes) -> LatentProjections:
        (rows,), q_b = self._config.outputs(by_role["kv_b"]), by_role.get("q_b")
        return LatentProjections(
            q_norm=None if sizes.query_rank is None else self._ones(sizes.query_rank),
            q_b=None if q_b is None else self._of_stage(q_b, self._format),
            kv_norm=self._ones(sizes.rank),
            up=self._weight(rows, sizes.rank).unflatten(0, (-1, sizes.expanded)),
            plain=sizes.plain,
        )

    def _mlp(self, by_role: dict[str, Stage]) -> Mlp:
        gate_up, down = by_role["gate_up"], by_role["down"]
        experts = gate_up.experts
        if experts is None:
            return self._dense(gate_up, down)
        bias = self._random(experts.count) if experts.router_biased else None
        router = Linear((self._random(experts.count, self._config.hidden).to(self._router_dtype(experts)),), bias)
        beside, routing = (self._shared_expert(by_role), self._correction(experts)), experts.routing
        if has_routed_kernels(self._device) and not any(map(self._why_not_stacked, (gate_up, down))):
            stacks, rule = (self._stack(gate_up), self._stack(down)), rule_of(experts.per_token, routing)
            activation, clip = self._config.activation, self._config.clip
            return GroupedMlp(router, *stacks, rule, activation, *beside, clip, routing.float32)
        each = zip(gate_up.by_expert, down.by_expert, strict=True)
        mlps = tuple(
            DenseMlp(*(self._of_stage(stage, self._of_experts, biased=self._has_mlp_bias) for stage in stages))
            for stages in each
        )
        return ExpertMlp(router, mlps, experts.per_token, routing, *beside)

    def _dense(self, gate_up: Stage, down: Stage) -> DenseMlp:
        return DenseMlp(self._of_stage(gate_up, self._format), self._of_stage(down, self._format))

    def _router_dtype(self, experts: Experts) -> torch.dtype:
        return torch.float32 if experts.routing.float32 else self._dtype

    def _shared_expert(self, by_role: dict[str, Stage]) -> SharedExpert | None:
        if "shared_gate_up" not in by_role:
            return None
        gate_up, down = by_role["shared_gate_up"], by_role["shared_down"]
        gate = None if gate_up.gate is None else Linear((self._random(1, self._config.hidden),))
        return SharedExpert(self._dense(gate_up, down), gate)

    def _correction(self, experts: Experts) -> Tensor | None:
        return None if experts.correction is None else torch.zeros(experts.count, device=self._device)

    @property
    def _has_mlp_bias(self) -> bool:
        return self._config.family.mlp_bias == "always"

    def _why_not_stacked(self, stage: Stage) -> str | None:
        return why_not([self._of_experts], self._config.inputs(stage))

    def _stack(self, stage: Stage) -> GroupedWeight:
        """Of all experts."""
        sizes, inputs = self._config.outputs(stage), self._config.inputs(stage)
        bias = self._random(len(sizes), sizes[0]) if self._has_mlp_bias else None
        fmt = self._of_experts
        if fmt is None:
            return lay_out_half(self._weight(len(sizes) * sizes[0], inputs).view(len(sizes), sizes[0], inputs), bias)
        stack = stack_of(fmt, len(sizes))
        distinct = [lay_out(fmt, fmt.quantize(self._weight(sizes[0], inputs))) for _ in range(_DISTINCT)]
        for plane in range(len(sizes)):
            stack.put(plane, distinct[plane % _DISTINCT])
        return stack.finish(bias)

    def _of_stage(self, stage: Stage, fmt: Format | None, *, biased: bool = False) -> Linear:
        outputs, inputs = self._config.outputs(stage), self._config.inputs(stage)
        bias = self._random(sum(outputs)) if biased else None
        if fmt is None:
            return Linear((self._with_large_rows(self._weight(sum(outputs), inputs), stage.role, outputs[-1]),), bias)
        arithmetic = "16-bit" if stage.routed else self._arithmetic
        weights: list[LinearWeight] = []
        for number, rows in enumerate(outputs, 1):
            weight = self._weight(rows, inputs)
            if number == len(outputs):
                weight = self._with_large_rows(weight, stage.role, rows)
            weights.append(prepare(fmt, fmt.quantize(weight), self._dtype, arithmetic))
        joined = join(weights)
        return Linear(tuple(weights) if joined is None else (joined,), bias)

    def _norm(self, ones: Tensor, role: str) -> Tensor:
        """The one before a stage."""
        if self._outliers is None:
            return ones
        norm = ones * _ORDINARY_NORM
        norm[: self._outliers.columns(role, len(norm))] *= _LARGE_NORM
        return norm

    def _with_large_rows(self, weight: Tensor, role: str, last: int) -> Tensor:
        """Outlier columns of the output and of down are outputs of values and of up, the `last` rows of their stage."""
        if self._outliers is not None and role in ("qkv", "gate_up"):
            norm = self._norm(self._ones(weight.shape[1]), role)
            usual = _SPREAD * float(norm.norm())  # an output's size; half of it comes through the gate
            follows, factor = ("output", _LARGE_VALUE / usual)
            if role == "gate_up":
                follows, factor = "down", 2 * _LARGE_PRODUCT / usual**2
            begin = len(weight) - last
            weight[begin : begin + self._outliers.columns(follows, last)] *= factor
        return weight

    def _weight(self, rows: int, columns: int) -> Tensor:
        if self._zeros:
            return torch.zeros(rows, columns, dtype=self._dtype, device=self._device)
        return self._random(rows, columns)

    def _random(self, *shape: int) -> Tensor:
        place = torch.empty(shape, dtype=self._dtype, device=self._device)
        return place.normal_(std=_SPREAD, generator=self._generator)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)
