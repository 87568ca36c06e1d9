"""Draws the pictures of docs/explanations/ as SVG into docs/assets/: `.venv/bin/python docs/tools/pictures.py`.

The weights of `grids.svg` are those of the bundled model; the other pictures are sketches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from quantkit.checkpoint import Checkpoint
from quantkit.formats.codebook import table_of
from quantkit.sources import model_folder

ASSETS = Path(__file__).parents[1] / "assets"
INK, DONE, NOW, LATER, RED, GREEN = "#263238", "#5c6bc0", "#ffb74d", "#eceff1", "#e57373", "#81c784"
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "quantkit", "font.family": "sans-serif", "font.size": 11}


def canvas(width: float, height: float, inches: float = 8.0) -> Axes:
    """In units of the sketch, without axes."""
    figure = plt.figure(figsize=(inches, inches * height / width))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str = "", color: str = LATER, **more: object) -> None:
    shape = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.12", facecolor=color, edgecolor=INK)
    axes.add_patch(shape)
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=INK, **more)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0, color: str = INK
) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, connectionstyle=style, color=color))


def label(axes: Axes, x: float, y: float, text: str, **more: object) -> None:
    axes.text(x, y, text, **({"ha": "center", "va": "center", "color": INK} | more))


def gptq() -> None:
    axes = canvas(16, 6.0)
    for row in range(4):
        for column in range(12):
            color = DONE if column < 4 else NOW if column == 4 else LATER
            axes.add_patch(Rectangle((1 + column, 1.6 + row * 0.8), 1, 0.8, facecolor=color, edgecolor="white", lw=2))
    label(axes, 3, 5.3, "rounded")
    label(axes, 5.5, 5.3, "now")
    label(axes, 9.5, 5.3, "still free to move")
    for end, bend in ((6.6, -0.5), (8.6, -0.45), (10.6, -0.4)):
        arrow(axes, (5.5, 1.5), (end, 1.5), bend=-bend, color="#c62828")
    label(axes, 8.7, 0.2, "the error of this column, spread over the rest by H⁻¹", color="#c62828")
    label(axes, 14.5, 3, "W\n[out, in]", fontsize=13)
    save("gptq")


def awq() -> None:
    axes = canvas(16, 6)
    heights = (0.5, 0.7, 2.2, 0.4, 0.9, 0.6)
    for at, (left, title) in enumerate(((0.8, "before"), (9.0, "after"))):
        label(axes, left + 3, 5.6, title, fontsize=13)
        for column, height in enumerate(heights):
            salient = column == 2
            weight, act = (0.55, height) if not (at and salient) else (0.55 * 1.9, height / 1.9)
            x = left + column
            axes.add_patch(Rectangle((x, 3), 0.8, act, facecolor=NOW if salient else LATER, edgecolor=INK))
            axes.add_patch(Rectangle((x, 0.9), 0.8, weight, facecolor=RED if salient else LATER, edgecolor=INK))
    label(axes, 7.9, 3.8, "activations", fontsize=10)
    label(axes, 7.9, 1.3, "weights", fontsize=10)
    arrow(axes, (7.2, 2.5), (8.7, 2.5))
    label(axes, 3.8, 0.3, "one column carries large inputs: its error counts most", fontsize=10)
    label(axes, 12.0, 0.3, "weight times s, input by s: the same product, less error", fontsize=10)
    save("awq")


def int8() -> None:
    axes = canvas(16, 6)
    for row in range(4):
        for column in range(8):
            outlier = column in (2, 5)
            color = NOW if outlier else LATER
            axes.add_patch(
                Rectangle((0.6 + column * 0.6, 1.6 + row * 0.7), 0.6, 0.7, facecolor=color, edgecolor="white")
            )
    label(axes, 3, 5.0, "activations")
    label(axes, 3, 1.0, "columns with a value of 6 or more", fontsize=10, color="#ef6c00")
    arrow(axes, (5.6, 3.6), (7.0, 4.3))
    arrow(axes, (5.6, 2.6), (7.0, 1.9))
    box(axes, 7.1, 3.7, 4.2, 1.2, "others: INT8 by INT8")
    box(axes, 7.1, 1.3, 4.2, 1.2, "outliers: 16 bits", NOW)
    arrow(axes, (11.4, 4.3), (13.0, 3.4))
    arrow(axes, (11.4, 1.9), (13.0, 2.8))
    box(axes, 13.1, 2.5, 2.2, 1.2, "sum", GREEN)
    save("llm-int8")


def grids() -> None:
    """Weights of a layer of the bundled model, each block of 64 divided by its largest, and both grids."""
    checkpoint = Checkpoint(model_folder("demo"))
    weight = checkpoint.tensor("model.layers.2.mlp.up_proj.weight").float()
    blocks = weight.reshape(-1, 64)
    normal = (blocks / blocks.abs().amax(1, keepdim=True)).flatten()
    figure, axes = plt.subplots(figsize=(8, 3.4))
    axes.hist(normal.numpy(), bins=161, range=(-1, 1), color="#c5cae9", density=True)
    top = axes.get_ylim()[1]
    codes = torch.arange(-8, 8) / 8
    for values, height, color, name in (
        (codes, 0.45, "#c62828", "16 equal steps"),
        (table_of("nf4"), 0.9, "#283593", "NF4"),
    ):
        axes.vlines([float(value) for value in values], 0, top * height, color=color, lw=1.4, label=name)
    axes.set(yticks=[], xlabel="weight, as a share of the largest in its block of 64", xlim=(-1.05, 1.05))
    axes.legend(frameon=False, loc="upper right")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    save("grids")


def step() -> None:
    axes = canvas(16, 7)
    names = ("requests", "Scheduler", "Runner", "device", "Sampler", "text")
    notes = (
        "prompts, running\nanswers",
        "who gets tokens\nand pages",
        "numbers in one\ncopy, launch",
        "layers: a graph\nor kernels",
        "tokens from\nlogits",
        "stop strings,\nstreams",
    )
    for at, (name, note) in enumerate(zip(names, notes, strict=True)):
        x = 0.3 + at * 2.62
        box(axes, x, 5.0, 2.1, 1.0, name, GREEN if name == "device" else LATER, fontsize=11)
        label(axes, x + 1.05, 4.35, note, fontsize=8.5)
        if at:
            arrow(axes, (x - 0.5, 5.5), (x - 0.03, 5.5))
    arrow(axes, (11.8, 6.05), (9.2, 6.05), bend=0.35)
    label(axes, 10.4, 6.75, "the next step reads the token on the device", fontsize=9)
    for row, (who, color) in enumerate((("host", LATER), ("device", GREEN))):
        y = 2.1 - row * 1.3
        label(axes, 0.9, y + 0.45, who)
        for turn in range(3):
            if who == "host":
                box(axes, 2.0 + turn * 4.2, y, 1.9, 0.9, f"prepare {turn + 1}", color, fontsize=9)
                if turn:
                    box(axes, 4.0 + turn * 4.2, y, 1.7, 0.9, f"read {turn}", NOW, fontsize=9)
            else:
                box(axes, 3.9 + turn * 4.2, y, 4.0 if turn < 2 else 3.6, 0.9, f"step {turn + 1}", color, fontsize=9)
    label(
        axes, 8, 3.35, "overlap: a step is launched before the host has seen the tokens of the one before", fontsize=10
    )
    save("step")


def speculative() -> None:
    axes = canvas(16, 5.6)
    label(axes, 1.4, 4.3, "draft guesses")
    label(axes, 1.4, 2.6, "model verifies\nall in one step")
    label(axes, 1.4, 0.9, "answer")
    guesses = ("the", "cat", "sat", "in")
    verified = ("the", "cat", "sat", "on", "")
    for at, word in enumerate(guesses):
        box(axes, 3.2 + at * 2.4, 3.9, 2.0, 0.8, word, NOW)
        arrow(axes, (4.2 + at * 2.4, 3.85), (4.2 + at * 2.4, 3.1))
    for at, word in enumerate(verified):
        right = at < 3
        color = GREEN if right else RED if at == 3 else LATER
        box(axes, 3.2 + at * 2.4, 2.2, 2.0, 0.8, word if at < 4 else "not used", color, fontsize=11 if at < 4 else 9)
    for at, word in enumerate(verified[:4]):
        box(axes, 3.2 + at * 2.4, 0.5, 2.0, 0.8, word, GREEN if at < 3 else LATER)
        arrow(axes, (4.2 + at * 2.4, 2.15), (4.2 + at * 2.4, 1.4))
    label(axes, 8.2, 5.2, "three guesses hold; the fourth gives way to the model's own token", fontsize=10)
    save("speculative")


def save(name: str) -> None:
    plt.savefig(ASSETS / f"{name}.svg", metadata={"Date": None})
    plt.close()


PICTURES: tuple[Callable[[], None], ...] = (gptq, awq, int8, grids, step, speculative)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
