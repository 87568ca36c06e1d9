"""`quantkit plan` as a user types it: tables, formulas, JSON, and wrong input in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.eval.shapes import SHAPES

Cli = Callable[..., tuple[int, str, str]]
H200 = ("--gpu", "h200")


def write_config(folder: Path, **changes: Any) -> Path:
    """A folder with config.json and nothing else."""
    config = SHAPES["llama-3.1-8b"] | changes
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value != "left out"})
    )
    return folder


def test_a_plan_for_one_gpu(run_cli: Cli) -> None:
    code, out, err = run_cli("plan", "llama-3.1-8b", *H200)
    assert (code, err) == (0, "")
    first, second = out.splitlines()[:2]
    assert first.startswith("On one H200, gptq-w4g128 leaves room for")
    assert "x as fast" in second
    for word in ("131,072 bytes a token", "16.06", "5.73", "smoothquant-w8a8", "data sheet", "ceilings", "10^9 bytes"):
        assert word in out
    assert "Cost, estimated" not in out


def test_without_a_gpu_all_of_them_are_compared(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, _ = run_cli("plan", "demo", "-r", "nf4,rtn-w4g128")
    assert code == 0
    for word in ("RTX 4090, 24 GB", "A100 80 GB SXM", "MI300X, 192 GB", "nf4", "rtn-w4g128", "bf16"):
        assert word in out
    assert "gptq" not in out


def test_json_holds_everything(run_cli: Cli) -> None:
    args = ("plan", "llama-3.1-8b", *H200, "-r", "nf4", "--batch", "1,256", "--price-per-hour", "2.5", "--json")
    found = json.loads(run_cli(*args)[1])
    assert found["cache"] == {
        "kind": "GQA",
        "layers": 32,
        "bytes_per_token": 131_072,
        "bytes_per_request": 131_072 * 4096,
        "bytes_read_per_token": 131_072 * 4096,
    }
    plain, nf4 = found["formats"]
    assert plain["weights"]["bytes"] == 16_060_522_496
    assert [speed["batch"] for speed in nf4["decode"]] == [1, 256]
    assert [speed["fits"] for speed in nf4["decode"]] == [True, False]
    assert nf4["decode"][0]["times_bf16"] > 2.5
    assert nf4["decode"][0]["estimated_cost_per_million_output_tokens"] > 0
    assert (found["question"]["prompt"], found["question"]["answer"]) == (3840, 256)
    assert nf4["bandwidth_bound_up_to_batch"] is None
    assert found["requests_by_gpu"]["h200"]["nf4"] == nf4["fit"]["requests"]
    assert found["formulas"]["format"] == "nf4"


def test_formulas_have_their_numbers(run_cli: Cli) -> None:
    code, out, _ = run_cli("plan", "llama-3.1-8b", *H200, "--explain", "--price-per-hour", 3, "--batch", "1,64")
    assert code == 0
    for words in (
        "2 x 8 kv heads x 128 = 2,048 numbers (GQA)",
        "32 layers x 2,048 x 2 bytes = 131,072 bytes",
        "2 x 128,256 x 4,096 x 2 = 2.101 GB",
        "8,192 tokens x (max(3 x 14,336, 6,144 + 2 x 4,096) + 3 x 4,096) x 2 bytes",
        "0.9 x 141.000 GB",
        "/ 4.8 TB/s",
        "decode, batch 64",
        "3,840 of the prompt + half of 255 = 3,967 tokens",
        "64 x 256 tokens / (64 prompts",
        "a million tokens out",
    ):
        assert words in out, words
    latent = run_cli("plan", "deepseek-v3", "--explain", *H200, "-r", "nf4")[1]
    assert "61 layers x 576 x 2 bytes = 70,272 bytes" in latent
    assert "163,840 tokens x 1,776 bytes of their latents + 0.134 GB of keys and values = 0.425 GB" in latent
    assert "the sum of these six" in latent
    assert "4 x 69,632 x 249,856" in latent  # 128 heads x (576 + 512) / 2


def test_costs_are_called_what_they_are(run_cli: Cli) -> None:
    args = ("plan", "llama-3.1-8b", *H200, "-r", "nf4", "--price-per-hour", "2.5")
    whole = run_cli(*args)[1]
    assert "Cost, estimated from data sheets" in whole
    assert "Of a million output tokens at 2.5 an hour: prompts of 3,840 and answers of 256 tokens." in whole
    assert "A lower bound, not a measurement: no engine is as fast as the ceiling." in whole
    assert "Computing the prompts is counted, and steps at the mean context of 3,967 tokens" in whole
    assert "prompts of 4,000 and answers of 96 tokens" in run_cli(*args, "--new-tokens", "96")[1]
    half = run_cli(*args, "--efficiency", "0.5")[1]
    assert "At 0.5 of the ceiling" in half
    assert "lower bound" not in half


def test_a_folder_needs_only_its_config(run_cli: Cli, tmp_path: Path) -> None:
    code, out, err = run_cli("plan", write_config(tmp_path / "mine"), *H200, "-r", "nf4")
    assert (code, err) == (0, "")
    assert "mine: weights" in out
    assert str(tmp_path) not in out


def test_what_cannot_be_planned_is_said(run_cli: Cli, tmp_path: Path) -> None:
    latents = {"n_routed_experts": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    code, out, _ = run_cli("plan", write_config(tmp_path / "other", model_type="deepseek_v9", **latents))
    assert code == 0
    assert "mixture of experts" in out.splitlines()[0]
    assert "only its cache" in out.splitlines()[0]
    assert "36,864 bytes a token" in out
    code, out, _ = run_cli("plan", write_config(tmp_path / "new", model_type="falcon9"), *H200)
    assert code == 0
    assert "'falcon9' is of another family" in out
    assert "131,072 bytes a token" in out


def test_a_model_that_fits_nowhere(run_cli: Cli) -> None:
    code, out, err = run_cli("plan", "llama-3.1-405b", *H200, "-r", "gptq-w4g128")
    assert (code, err) == (0, "")
    assert "does not fit on one H200" in out
    assert "no single GPU" in out
    assert "ceilings" not in out
    code, out, _ = run_cli("plan", "llama-3.1-70b", "--gpu", "rtx4090", "-r", "gptq-w4g128")
    assert code == 0
    assert "It fits on: A100 80 GB SXM, A100 80 GB PCIe, H100 PCIe" in out


def test_notes(run_cli: Cli, tmp_path: Path) -> None:
    out = run_cli("plan", "gemma-2-9b", "--gpu", "a100-80", "-r", "fp8", "--context", 16384)[1]
    assert "more than the 8,192 that this model was made for" in out
    assert "sliding layers read 3.52 GB" in out
    assert "no FP8 units" in out
    odd = write_config(tmp_path / "odd", hidden_size=4000, num_attention_heads=40, num_key_value_heads=8)
    out = run_cli("plan", odd, *H200, "-r", "gptq-w4g128,llm-int8")[1]
    assert "gptq-w4g128 is left out: model.layers.0.self_attn.q_proj" in out
    assert "llm-int8" in out


def test_several_gpus(run_cli: Cli) -> None:
    args = ("plan", "llama-3.1-70b", *H200, "-r", "nf4", "--tensor-parallel", "2,8", "--batch", "1,64")
    code, out, err = run_cli(*args)
    assert (code, err) == (0, "")
    assert out.startswith("2 x H200, tensor 2: nf4 takes")
    for words in ("tensor 8", "40,960", "2,637,824", "nvlink 64", "pcie 1", "pipeline ahead from batch"):
        assert words in out, words
    assert "Cost, estimated" not in out
    priced = run_cli(*args, "--price-per-hour", 3)[1]
    assert "Cost, estimated from data sheets" in priced
    assert "Of a million output tokens at 3 an hour for each GPU, nvlink between them" in priced
    assert "A lower bound, not a measurement" in priced
    found = json.loads(run_cli(*args, "--json")[1])
    for layout in found["layouts"]:
        plain, nf4 = layout["formats"]
        assert f"{nf4['weight_bytes_per_rank'] / 1e9:.2f}" in out
        assert f"{nf4['requests']:,}" in out
        assert plain["stages"][0]["traffic_per_token"]["reduced"] == (1 + 2 * 80) * 8192 * 2
        for speed in (*plain["decode"], *nf4["decode"]):
            assert f"{speed['times_one_gpu']:.2f}" in out
            rate = speed["batch"] / speed["seconds"] / layout["gpus"]
            assert speed["tokens_per_second_per_gpu"] == pytest.approx(rate)
    assert found["formulas"]["format"] == "nf4"
    ahead = {
        (one["gpus"], one["format"], one["link"]): one["pipeline_ahead_from_batch"]
        for one in found["tensor_or_pipeline"]
    }
    assert ahead[8, "nf4", "pcie"] < ahead[8, "nf4", "nvlink"]


def test_formulas_of_several_gpus(run_cli: Cli) -> None:
    layout = ("--tensor-parallel", 8, "--pipeline-parallel", 2, "--link", "nvlink")
    out = run_cli("plan", "llama-3.1-70b", *H200, *layout, "--explain")[1]
    for words in (
        "on 16 x H200, tensor 8 x pipeline 2",
        "64 / 8 = 8 heads, 8 / 8 = 1 KV heads",
        "81 x 8,192 x 2 bytes = 1,327,104 bytes",
        "start + 14 hops + 14/8 x 16,384 bytes / 369.0 GB/s",
        "(p - 1) / (m + p - 1) = 1 / 3 = 33 %",
    ):
        assert words in out, words
    shared = run_cli("plan", "llama-3.1-70b", *H200, "--tensor-parallel", 16, "--explain", "-r", "fp8")[1]
    assert "at least 1: ranks share one" in shared
    assert "320 gathers, 8,519,680 bytes" in shared


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama-3.1-70b", "--tensor-parallel", "3"), ("tensor parallel is 3", "64 attention heads", "32 or 64")),
        (("qwen2.5-32b", "--tensor-parallel", "5"), ("tensor parallel is 5", "8 key-value heads")),
        (("phi-3-mini", "--tensor-parallel", "32", "--pipeline-parallel", "33"), ("pipeline parallel is 33", "32")),
        (("llama-3.1-70b", "--tensor-parallel", "0"), ("tensor parallel is 0",)),
        (("llama-3.1-70b", "--tensor-parallel", "two"), ("--tensor-parallel is 'two'", "whole numbers")),
        (("llama-3.1-70b", "--tensor-parallel", ","), ("--tensor-parallel is ','", "whole numbers")),
        (("qwen2.5-1.5b", "--tensor-parallel", "4", "-r", "gptq-w4g128"), ("70 groups of 128", "--tensor-parallel 2")),
        (("llama-3.1-405b", "--tensor-parallel", "2", "--gpu", "rtx4090"), ("does not fit", "it fits with --tensor")),
        (("deepseek-v3", "--tensor-parallel", "2"), ("has experts", "add --expert-parallel")),
        (("llama-3.1-8b", "--tensor-parallel", "2", "--expert-parallel"), ("'llama' has none", "leave it out")),
        (("llama-3.1-70b", "--tensor-parallel", "2", "--link", "fast"), ("--link is 'fast'", "nvlink")),
        (("llama-3.1-70b", "--link", "nvlink"), ("--link joins several GPUs", "--tensor-parallel")),
    ],
)
def test_layouts_that_cannot_be(
    assert_refused: Callable[..., None], tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(tmp_path, "plan", *arguments, words=words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama-3.1-8b", "--gpu", "h2000"), ("unknown GPU 'h2000'", "did you mean 'h200'")),
        (("llama-3.1-8", *H200), ("no model at 'llama-3.1-8'", "did you mean the shape 'llama-3.1-8b'")),
        (("demo", "-r", "nf5"), ("unknown recipe 'nf5'", "did you mean 'nf4'")),
        (("demo", "--batch", "1,x"), ("--batch is '1,x'", "whole numbers")),
        (("demo", "--batch", "0"), ("--batch is [0]", "1 to 4096")),
        (("demo", "--context", "0"), ("--context is 0", "1 or more")),
        (("demo", "--new-tokens", "4096"), ("--new-tokens is 4096", "room for a prompt")),
        (("demo", "--new-tokens", "0"), ("--new-tokens is 0", "1 or more")),
        (("demo", "--price-per-hour", "-1"), ("--price-per-hour is -1", "more than 0")),
        (("demo", "--efficiency", "1.5"), ("--efficiency is 1.5", "at most 1")),
    ],
)
def test_wrong_input_is_one_line(
    assert_refused: Callable[..., None], tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(tmp_path, "plan", *arguments, words=words)


@pytest.mark.parametrize("key", ["model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_configs_without_a_size(assert_refused: Callable[..., None], tmp_path: Path, key: str) -> None:
    assert_refused(tmp_path, "plan", write_config(tmp_path / "m", **{key: "left out"}), words=(key,))


def test_an_unknown_family_without_its_heads(assert_refused: Callable[..., None], tmp_path: Path) -> None:
    changes = {"model_type": "new", "num_attention_heads": "left out", "num_key_value_heads": "left out"}
    assert_refused(tmp_path, "plan", write_config(tmp_path / "m", **changes), words=("num_attention_heads",))
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path, "plan", tmp_path / "empty", words=("config.json is missing",))
