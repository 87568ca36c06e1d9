# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Add your own method
#
# A method decides which codes stand for a weight. It sees the weight of one or several linear layers that share an
# input, a format, and statistics of that input; files, models and calibration are not its business. This notebook
# writes a small one, tries it on a single matrix, and then runs it on a whole model beside plain rounding and GPTQ.

# %%
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import torch

import quantkit
from quantkit.formats import CtPacked
from quantkit.methods import Method, register
from quantkit.methods.method import Rounded, require_integer
from quantkit.methods.statistics import InputStatistics

# %% [markdown]
# ## The idea
#
# Plain rounding stretches each group's grid to its largest weight. A smaller range cuts that weight off and has finer
# steps for all others. Which one is better depends on the inputs: an error counts by how large the input is that it
# meets. So: try several ranges for each group of weights, and keep the one with the least error, each column weighted
# by the mean square of its input, which is the diagonal of H = sum of x xᵀ.
#
# A method is a frozen dataclass. Its fields are the options that a recipe may give.


# %%
@register
@dataclass(frozen=True)
class ClippedRounding(Method):
    name: ClassVar[str] = "clipped-rounding"

    smallest: float = 0.6  # part of the range that is tried last
    steps: int = 9

    @property
    def wants_hessian(self) -> bool:
        return True

    def round(self, weight, fmt, inputs: InputStatistics) -> Rounded:
        group = require_integer(self.name, fmt).group_size
        importance = inputs.require_hessian().diagonal()
        best = weight.clone()  # the weight, each group cut off where that helps
        least = torch.full_like(_by_group(weight, group)[..., 0], torch.inf)
        for part in torch.linspace(1.0, self.smallest, self.steps).tolist():
            largest = part * _by_group(weight, group).abs().amax(-1, keepdim=True)
            tried = _by_group(weight, group).clamp(-largest, largest).view_as(weight)
            decoded = fmt.quantize(tried).dequantize(torch.float32)
            error = _by_group((decoded - weight).square() * importance, group).sum(-1)
            better = (error < least)[..., None]
            best = torch.where(better, _by_group(tried, group), _by_group(best, group)).view_as(weight)
            least = torch.minimum(least, error)
        return Rounded(fmt.quantize(best))


def _by_group(weight, group):
    return weight.view(len(weight), -1, group)


# %% [markdown]
# ## On one matrix
#
# Inputs of language models are unequal: a few columns are much larger than the others. The error that counts is that
# of the outputs.

# %%
generator = torch.Generator().manual_seed(0)
weight = torch.randn(64, 256, generator=generator)
inputs = torch.randn(2048, 256, generator=generator) * torch.exp(torch.randn(256, generator=generator))
statistics = InputStatistics(256)
statistics.add(inputs)
fmt = CtPacked(bits=3, group_size=64)


def output_error(quantized) -> float:
    wrong = inputs @ (quantized.dequantize(torch.float32) - weight).T
    return float(wrong.square().mean() / (inputs @ weight.T).square().mean())


plain = output_error(fmt.quantize(weight))
clipped = output_error(ClippedRounding().round(weight, fmt, statistics).quantized)
print(f"relative error of the outputs: plain rounding {plain:.4f}, clipped {clipped:.4f}")
assert clipped < plain

# %% [markdown]
# ## On a model
#
# A recipe names the method, its options and a format. Everything else is there: calibration block by block, the
# checkpoint that other engines load, the measurement.

# %%
folder = Path(mkdtemp(prefix="method-"))
calibration = quantkit.Calibration(samples=16, seq_len=256)
methods = {"plain": "rtn", "clipped": "{name: clipped-rounding, smallest: 0.5}", "gptq": "gptq"}
kl = {}
for name, method in methods.items():
    recipe = folder / f"{name}.yaml"
    recipe.write_text(f"summary: A trial.\nmethod: {method}\nformat: {{name: ct-packed, bits: 3, group_size: 64}}\n")
    quantkit.quantize("demo-draft", str(recipe), folder / name, calibration=calibration, quality_windows=0)
    kl[name] = quantkit.evaluate(folder / name, "demo-draft", window=256, max_windows=8, device="cpu").kl
    print(f"{name:8} KL {kl[name].text('.4f')}")
assert kl["clipped"].value < kl["plain"].value

# %% [markdown]
# To share a method, put the class in a package and name it under the entry point `quantkit.methods`; recipes then
# find it by its name, on the command line too. `quantkit/methods/` has the methods that ship, one file each.
