"""Drafts whose vocabulary is not quite the target's: padded to another size, or with tokens of other names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.drafters.draft_model import ModelDrafter
from quantkit.runtime.drafters.shared_tokens import UNKNOWN, match_tokens
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder

PROMPT = "for i in range(3):\n    print(i)\n" * 2
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
Change = Callable[[Path], None]


def copied(folder: Path) -> Path:
    shutil.copytree(model_folder("demo-draft"), folder)
    return folder


def set_rows(folder: Path, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Other rows of the embedding and of the output layer."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = rows(tensors[name]).contiguous()
            size = len(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}), encoding="utf-8")


def padded(folder: Path) -> None:
    """Rows that would win every choice, if anybody looked at them."""
    set_rows(folder, lambda rows: torch.cat([rows, 50 * rows.abs().amax() * rows[:77].sign()]))


def rename(folder: Path, names: dict[str, str]) -> dict[str, int]:
    """Other words for some tokens; returns the vocabulary before."""
    file = folder / "tokenizer.json"
    contents = json.loads(file.read_text(encoding="utf-8"))
    known = dict(contents["model"]["vocab"])
    contents["model"]["vocab"] = {names.get(token, token): number for token, number in known.items()}
    contents["model"]["merges"] = []
    file.write_text(json.dumps(contents), encoding="utf-8")
    return known


def padded_with_nothing(folder: Path) -> None:
    set_rows(folder, lambda rows: torch.cat([rows, rows.new_zeros(77, rows.shape[1])]))


COMMON, OTHER = "\u0120the", "("  # the second one stands in every answer here


def renumbered(folder: Path) -> None:
    """Two tokens have each other's numbers, and their rows too."""
    known = rename(folder, {COMMON: OTHER, OTHER: COMMON})
    order = list(range(len(known) + 1000))
    order[known[COMMON]], order[known[OTHER]] = known[OTHER], known[COMMON]
    set_rows(folder, lambda rows: rows[torch.tensor(order[: len(rows)])])


def lacking(folder: Path) -> None:
    rename(folder, {OTHER: "<nothing>"})


@cache
def plain() -> list[int]:
    return (
        LLM("demo-draft", device="cpu", dtype="float32", max_context=256)
        .generate(PROMPT, PARAMS)[0]
        .answers[0]
        .token_ids
    )


@pytest.mark.parametrize(
    ("target", "draft", "least", "most"),
    [
        pytest.param(None, padded, 1.0, 1.0, id="the draft is larger"),
        pytest.param(padded_with_nothing, None, 1.0, 1.0, id="the target is larger"),
        pytest.param(None, renumbered, 1.0, 1.0, id="two tokens have other numbers"),
        pytest.param(None, lacking, 0.01, 0.9, id="the draft lacks a token"),
    ],
)
def test_answers_are_those_of_plain_decoding(
    tmp_path: Path, target: Change | None, draft: Change | None, least: float, most: float
) -> None:
    """The draft is the target itself but for the change, so that all its guesses are right where it has the token."""
    folders = []
    for name, change in (("target", target), ("draft", draft)):
        folders.append(copied(tmp_path / name) if change is not None else model_folder("demo-draft"))
        if change is not None:
            change(folders[-1])
    llm = LLM(
        str(folders[0]),
        device="cpu",
        dtype="float32",
        max_context=256,
        speculative=f"draft={folders[1]},k=3,adaptive=off",
    )
    assert llm.generate(PROMPT, PARAMS)[0].answers[0].token_ids == plain()
    found = llm.engine.speculation
    assert found.guessed > 0
    assert least <= found.accepted / found.guessed <= most


def test_a_token_that_the_draft_lacks_is_never_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen, complete = copied(tmp_path / "draft"), [], ModelDrafter.complete
    number = rename(folder, {OTHER: "<nothing>"})[OTHER]

    def noted(drafter: ModelDrafter, plan: StepPlan) -> StepPlan:
        found = complete(drafter, plan)
        seen.extend(logits.clone() for logits in found.proposals.values())
        return found

    monkeypatch.setattr(ModelDrafter, "complete", noted)
    llm = LLM("demo-draft", device="cpu", max_context=256, speculative=f"draft={folder},k=3,adaptive=off")
    llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True))
    logits = torch.cat(seen)
    assert torch.isinf(logits[:, number]).all()
    assert torch.isfinite(logits).sum() == logits.numel() - len(logits)


def test_which_tokens_are_shared(tmp_path: Path) -> None:
    own = model_folder("demo-draft")
    folder = copied(tmp_path / "draft")
    assert match_tokens(own, 4096, folder, 4096, "d") is None
    assert match_tokens(own, 4096, folder, 4200, "d") == list(range(4096))
    assert match_tokens(own, 4100, folder, 4096, "d") == [*range(4096), *[UNKNOWN] * 4]
    known = rename(folder, {COMMON: OTHER, OTHER: "<nothing>"})
    found = match_tokens(own, 4096, folder, 4096, "d")
    assert found is not None
    assert found[known[OTHER]] == known[COMMON]
    assert found[known[COMMON]] == UNKNOWN
    assert sum(row != number for number, row in enumerate(found)) == 2


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path / "draft")
    file = folder / "tokenizer.json"
    contents = json.loads(file.read_text(encoding="utf-8"))
    words = list(contents["model"]["vocab"])
    names = dict(zip(words[1000:1100], [*words[1001:1100], words[1000]], strict=True))
    rename(folder, names)
    with pytest.raises(InputError, match=r"numbers tokens otherwise .*100 of .*same tokenizer"):
        LLM("demo-draft", device="cpu", speculative=f"draft={folder}")
