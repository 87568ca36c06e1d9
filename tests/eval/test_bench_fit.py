"""`bench engine` with as many requests as fit and with outliers as a profile says; what the host does for a step."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.eval.engine.host_cost import calls_of_step, host_engine, measure
from quantkit.eval.engine.outliers import PROFILES, ROLES, measured_shares
from quantkit.eval.engine.run import _quantile
from quantkit.eval.engine.shapes import SHAPES
from quantkit.eval.engine.start import start
from quantkit.eval.engine.step_run import all_answering
from quantkit.formats import LlmInt8
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.decode_graphs import graph_sizes
from quantkit.runtime.model import layers
from tiny_models import build_model

Cli = Callable[..., tuple[int, str, str]]

TINY = ("bench", "engine", "--shape", "tiny", "--device", "cpu", "--no-save", "--new-tokens", 8)


def rows_of(run_cli: Cli, *more: object) -> list[dict[str, Any]]:
    code, out, err = run_cli(*TINY, "--format", "bf16", *more, "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["rows"]
    return found


def test_as_many_as_the_cache_holds_at_full_length(run_cli: Cli) -> None:
    """24 and 8 tokens are two pages each: 7 requests in 15 pages. Before, 9 requests: two of them wait."""
    rows = rows_of(run_cli, "--batch", "9,fit", "--prompt-len", 24, "--kv-tokens", 240, "--max-sequences", 7)
    assert [(row["batch"], row["held"]) for row in rows] == [(9, 7), (7, 7)]
    assert rows[1]["cache_percent"] == pytest.approx(100 * 14 / 15, abs=0.1)
    assert all(row["outliers"] is None for row in rows)


def test_places_may_be_fewer_than_the_cache_holds(run_cli: Cli) -> None:
    (row,) = rows_of(run_cli, "--batch", "fit", "--prompt-len", 24, "--kv-tokens", 240, "--max-sequences", 3)
    assert (row["batch"], row["held"]) == (3, 3)


def test_what_is_refused(assert_refused: Callable[..., None], tmp_path: Path) -> None:
    assert_refused(tmp_path, *TINY, "--batch", "fit,x", words=("--batch is 'fit,x'", "as many as the cache holds"))
    assert_refused(tmp_path, *TINY, "--batch", "0", words=("--batch is '0'",))
    assert_refused(tmp_path, *TINY, "--outliers", "al", words=("unknown outlier profile 'al'", "all"))
    wrong = ("bench", "engine", "demo", "--outliers", "all", "--no-save")
    assert_refused(tmp_path, *wrong, words=("--outliers is for a --shape",))
    large = ("--batch", "fit", "--kv-tokens", 32, "--max-context", 32, "--prompt-len", 30)
    assert_refused(tmp_path, *TINY, *large, words=("the cache holds 32 tokens", "30 + 8"))


def test_a_quantile_is_torchs() -> None:
    values = torch.rand(37, generator=torch.Generator().manual_seed(0)).double().sort().values
    for share in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert _quantile(values.tolist(), share) == pytest.approx(1e3 * float(values.quantile(share)))


@pytest.mark.parametrize("name", PROFILES)
def test_random_weights_have_the_outliers_of_a_profile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, seen = PROFILES[name], []
    multiply = layers._multiply

    def look(x: Tensor, *rest: Any) -> Tensor:
        if len(x) > 1:
            seen.append(float((x.half().abs() >= LlmInt8().threshold).any(0).float().mean()))
        return multiply(x, *rest)

    monkeypatch.setattr(layers, "_multiply", look)
    engine, _ = start("tiny", "bf16", EngineOptions(device="cpu", kv_tokens=512), first=False, outliers=profile)
    seen.clear()
    engine.add(list(range(1, 200)), SamplingParams(max_tokens=1))
    engine.step()
    by_role = dict(zip(ROLES, torch.tensor(seen[: 4 * SHAPES["tiny"]["num_hidden_layers"]]).view(-1, 4).T, strict=True))
    for role, shares in by_role.items():
        assert float(shares.mean()) == pytest.approx(profile.shares[role], abs=0.03), role


def test_shares_as_they_are_in_a_model() -> None:
    """A norm that makes two columns large in every token: qkv sees these two, and nobody else any."""
    model = build_model("llama")
    block = model.model.layers[0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(0.1)
            layer.post_attention_layernorm.weight.fill_(0.1)
        block.input_layernorm.weight[[3, 5]] = 1e6
        for linear in (block.self_attn.v_proj, block.mlp.up_proj):
            linear.weight.zero_()
    tokens = torch.randint(5, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    found = measured_shares(model, tokens, (1, 12), LlmInt8().threshold)
    width = model.config.hidden_size
    assert found[12]["qkv"][0] == pytest.approx(2 / width)
    assert found[1]["qkv"][0] == pytest.approx(2 / width)
    assert found[12]["output"][0] == found[12]["down"][0] == found[12]["gate_up"][0] == 0


def test_the_host_calls_little_for_a_sequence() -> None:
    """62 Python functions for each sequence of a step before they were counted; a new one shows without a clock."""
    few, many = (sum(calls_of_step(count).values()) for count in (64, 128))
    assert (many - few) / 64 < 13


def test_the_host_of_two_thousand_sequences() -> None:
    """All of them answer in every step, and the pages are in order."""
    engine = host_engine(2048, 24)
    requests = all_answering(engine, 2048, 24, 20)
    known = [len(request.sequences[0].tokens) for request in requests]
    for _ in range(3):
        assert len(engine.step()) == 2048
    engine.check_integrity()
    assert [len(request.sequences[0].tokens) for request in requests] == [count + 3 for count in known]
    cost = measure(16, 4)
    assert cost.step_ms > 0
    assert set(cost.stages_ms) == {"schedule", "prepare", "launch", "collect"}


def test_graphs_for_up_to_two_thousand_sequences() -> None:
    sizes = graph_sizes(2048)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 2048
    assert max(after - before for before, after in pairwise(sizes)) == 64
    assert graph_sizes(780)[-1] == 780
