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
# # Compare formats
#
# How much smaller does a model get, and what does it lose? This notebook quantizes one model in several formats,
# measures each on held-out text, and draws the trade. It runs in about a minute without a GPU, because `demo-draft`
# has only 1.8 million parameters. Put a folder or a hub name in its place for a model that you know.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt

import quantkit

MODEL = "demo-draft"
RECIPES = ["llm-int8", "nf4", "rtn-w4g32", "gptq-w4g32", "awq-w4g32", "gptq-w3g64"]
folder = Path(mkdtemp(prefix="formats-"))

# %% [markdown]
# ## Quantize
#
# All methods that look at data see the same tokens, so that nothing but the method differs. `quantize` reads every
# tensor back from disk before the folder gets its name. It would also measure the result; here the next cell does
# that.

# %%
calibration = quantkit.Calibration(samples=16, seq_len=256)
reports = {
    recipe: quantkit.quantize(MODEL, recipe, folder / recipe, calibration=calibration, quality_windows=0)
    for recipe in RECIPES
}
for recipe, report in reports.items():
    print(f"{recipe:12} {report.bits_per_weight:5.2f} bits per weight, {report.bytes / 1e6:.2f} MB")

# %% [markdown]
# ## Measure
#
# KL divergence says how far the predictions moved from those of the original. It needs fewer tokens for a clear
# answer than perplexity, which can even fall by luck. Both come with 95 % intervals.

# %%
results = {
    recipe: quantkit.evaluate(folder / recipe, MODEL, window=256, max_windows=8, device="cpu") for recipe in RECIPES
}
for recipe, found in results.items():
    print(f"{recipe:12} KL {found.kl.text('.4f')}, perplexity {found.perplexity.text('.2f')}")

# %% [markdown]
# ## The trade
#
# Down and to the left is better.

# %%
figure, axes = plt.subplots(figsize=(6, 4))
for recipe, found in results.items():
    bits = reports[recipe].bits_per_weight
    axes.errorbar(
        bits, found.kl.value, yerr=[[found.kl.value - found.kl.low], [found.kl.high - found.kl.value]], fmt="o"
    )
    axes.annotate(recipe, (bits, found.kl.value), xytext=(6, 4), textcoords="offset points")
axes.set(xlabel="bits per weight", ylabel="KL divergence from the original", yscale="log")
figure.savefig(folder / "trade.png", dpi=120)

# %% [markdown]
# ## Look at the text
#
# Numbers first, but read some answers too. The engine runs every one of these folders.

# %%
for recipe in RECIPES:
    llm = quantkit.LLM(folder / recipe, device="cpu")
    print(f"{recipe:12} {llm.generate('The function returns', quantkit.SamplingParams(max_tokens=16))[0].text!r}")

# %% [markdown]
# `quantkit compare MODEL -o report` does all of this and more, with speed and memory, in one page.
