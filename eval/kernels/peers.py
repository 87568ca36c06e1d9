"""Other implementations of the same products, each timed by the same protocol on the same weights.

To add one: a Contender here and in PEERS; its name becomes a choice of --against and a column of the results.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.kernels.contenders import Compute, Contender
from quantkit.eval.kernels.problems import AttentionProblem, LinearProblem, Problem
from quantkit.formats import Fp4, IntegerWeight, LlmInt8, Nf4


class Torch(Contender):
    """The 16-bit product of the same shape; for prompts, scaled_dot_product_attention on contiguous 16-bit keys."""

    name = "torch"

    def supports(self, problem: Problem) -> bool:
        if isinstance(problem, LinearProblem):
            return True
        return problem.case.kind == "prefill" and problem.case.format == problem.case.dtype

    def prepare(self, problem: Problem) -> Compute:
        if isinstance(problem, AttentionProblem):
            return _sdpa(problem)
        x, dense = problem.x, problem.weight.dense.clone()
        return lambda: torch.nn.functional.linear(x, dense)


def _sdpa(problem: AttentionProblem) -> Compute:
    """All sequences have one length, so that batch and length are two dimensions."""
    from quantkit.kernels.reference.attention import gather

    case = problem.case
    queries, keys, values, table, _, _ = problem.batch.tensors
    rows = [(gather(keys, pages, case.length), gather(values, pages, case.length)) for pages in table]
    q = queries.view(case.batch, case.length, case.heads, case.head_dim).transpose(1, 2).contiguous()
    k, v = (torch.stack([row[i] for row in rows]).transpose(1, 2).contiguous() for i in range(2))

    def compute() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)  # [batch, length, heads, dim]

    return compute


class TinyGemm(Contender):
    """torch's own int4 product: bfloat16, groups of 32 to 256."""

    name = "tinygemm"

    def supports(self, problem: Problem) -> bool:
        if not isinstance(problem, LinearProblem) or problem.x.dtype != torch.bfloat16:
            return False
        weight = problem.weight.quantized
        fits = isinstance(weight, IntegerWeight) and weight.bits == 4 and weight.group_size in (32, 64, 128, 256)
        return fits and problem.case.inputs % 128 == 0 and problem.case.outputs % 16 == 0

    def prepare(self, problem: Problem) -> Compute:
        assert isinstance(problem, LinearProblem)
        weight = problem.weight.quantized
        assert isinstance(weight, IntegerWeight)
        x, group = problem.x, weight.group_size
        scales = weight.scales.float()
        offsets = (8 - weight.zeros.float()) * scales  # it computes (code - 8) * scale + offset
        grid = torch.stack([scales, offsets], -1).transpose(0, 1).to(torch.bfloat16).contiguous()  # [groups, out, 2]
        if x.device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 8)
            return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, grid)
        pairs = (weight.codes[:, ::2] << 4) | weight.codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, group, grid)


class GemLite(Contender):
    """Triton kernels for 2, 4 and 8-bit integers."""

    name = "gemlite"
    remedy = "pip install gemlite"

    def installed(self) -> bool:
        return _importable("gemlite")

    def supports(self, problem: Problem) -> bool:
        if not isinstance(problem, LinearProblem) or problem.x.device.type != "cuda":
            return False
        weight, fmt = problem.weight.quantized, problem.weight.fmt
        weights_only = fmt is not None and fmt.input_rounding is None
        return weights_only and isinstance(weight, IntegerWeight) and weight.bits in (2, 4, 8)

    def prepare(self, problem: Problem) -> Compute:
        assert isinstance(problem, LinearProblem)
        weight, x = problem.weight.quantized, problem.x
        assert isinstance(weight, IntegerWeight)
        core = importlib.import_module("gemlite.core")
        dtype = core.DType.BF16 if x.dtype == torch.bfloat16 else core.DType.FP16
        sizes = {"in_features": problem.case.inputs, "out_features": problem.case.outputs}
        layer = core.GemLiteLinear(
            weight.bits, group_size=weight.group_size, **sizes, input_dtype=dtype, output_dtype=dtype
        )
        scales, zeros = (part.to(x.dtype).reshape(-1, 1) for part in (weight.scales, weight.zeros))
        layer.pack(weight.codes.clone(), scales, zeros, None)
        return lambda: layer(x)


class BitsAndBytes(Contender):
    """NF4 and FP4 by `matmul_4bit`; LLM.int8 by `Linear8bitLt`, which waits for the GPU, so no graph can hold it."""

    name = "bitsandbytes"
    remedy = "pip install bitsandbytes"

    def installed(self) -> bool:
        return _importable("bitsandbytes")

    def supports(self, problem: Problem) -> bool:
        if not isinstance(problem, LinearProblem) or problem.x.device.type != "cuda":
            return False
        return isinstance(problem.weight.fmt, Nf4 | Fp4 | LlmInt8)

    def captures(self, problem: Problem) -> bool:
        return isinstance(problem, LinearProblem) and not isinstance(problem.weight.fmt, LlmInt8)

    def prepare(self, problem: Problem) -> Compute:
        assert isinstance(problem, LinearProblem)
        library = importlib.import_module("bitsandbytes")
        fmt, x, dense = problem.weight.fmt, problem.x, problem.weight.dense
        if isinstance(fmt, LlmInt8):
            layer = library.nn.Linear8bitLt(
                problem.case.inputs, problem.case.outputs, bias=False, has_fp16_weights=False, threshold=fmt.threshold
            )
            values = dense.to("cpu", torch.float16)
            layer.weight = library.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)
            layer = layer.to(x.device).eval()  # quantizes
            return lambda: layer(x)
        assert isinstance(fmt, Nf4 | Fp4)
        packed, state = library.functional.quantize_4bit(
            dense, blocksize=fmt.block, compress_statistics=fmt.double_quant, quant_type=fmt.kind
        )
        return lambda: library.matmul_4bit(x, packed.t(), quant_state=state)


PEERS: dict[str, Contender] = {peer.name: peer for peer in (Torch(), TinyGemm(), GemLite(), BitsAndBytes())}


def choose_peers(names: Sequence[str] | None) -> list[Contender]:
    """Those asked for, all of which must be installed; None: whatever is installed."""
    if names is None:
        return [peer for peer in PEERS.values() if peer.installed()]
    for name in names:
        if name not in PEERS:
            raise InputError(f"unknown peer '{name}'; {did_you_mean(name, PEERS)}")
        if not PEERS[name].installed():
            raise InputError(f"peer '{name}' is not installed; {PEERS[name].remedy}, or leave it out of --against")
    return [peer for name, peer in PEERS.items() if name in names]


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
