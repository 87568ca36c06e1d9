"""`quantkit inspect --gpu`: what the runtime would do on a card that is not here, in the words of an engine's start."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.eval.kernels.cases import FORMATS
from quantkit.eval.plan.gpus import GPUS, Gpu, find_card
from quantkit.eval.plan.on_gpu import _kernel, look_on_gpu
from quantkit.formats import CtPacked, Gptq
from quantkit.kernels.card import KNOWN, TOO_OLD, pretend
from quantkit.runtime import startup
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.card_plan import plan_card
from quantkit.runtime.llm import LLM

Cli = Callable[..., tuple[int, str, str]]
Quantized = Callable[..., Path]
NVIDIAS = [gpu for gpu in GPUS.values() if gpu.name != "mi300x"]


@pytest.mark.parametrize("gpu", NVIDIAS, ids=lambda gpu: gpu.name)
def test_every_gpu_has_a_card_of_a_kind_that_kernels_are_compiled_for(gpu: Gpu) -> None:
    """A slip of a digit shows: the data sheet has FP8 where the instructions have it."""
    card = find_card(gpu.name)
    alike = KNOWN[card.target]
    assert (card.shared, card.shared_of_processor) == (alike.shared, alike.shared_of_processor)
    assert card.has_float8 == (gpu.fp8 is not None)
    assert 0.4 * alike.processors <= card.processors <= 2.5 * alike.processors
    assert card.name in gpu.reported


def test_a_card_of_each_kind(run_cli: Cli) -> None:
    code, out, err = run_cli("inspect", "demo-draft", "--gpu", "RTX3090")
    assert (code, err) == (0, "")
    assert "On one RTX 3090, compute capability 8.6" in out
    answers = look_on_gpu("demo-draft", "rtx3090").rows()
    assert ("Hopper's own kernels", "no: Triton's do the same") in answers
    assert ("FP8 cache", "no (needs 8.9)") in answers
    assert ("weights", "need 3.67 MB of 24.00 GB") in answers
    assert all(question in out and answer in out for question, answer in answers)
    assert out.endswith("`quantkit plan demo-draft --gpu rtx3090` says how many requests fit, and how fast they are.\n")
    hopper = dict(look_on_gpu("demo-draft", "h200").rows())
    assert (hopper["Hopper's own kernels"], hopper["measured kernels"], hopper["FP8 cache"]) == ("yes", "yes", "yes")
    blackwell = dict(look_on_gpu("demo-draft", "b200").rows())
    assert blackwell["Hopper's own kernels"].startswith("no")
    assert "quantkit bench kernels --tune" in blackwell["measured kernels"]


def test_weights_that_do_not_fit() -> None:
    large = replace(look_on_gpu("demo-draft", "l4"), weights=30 * 10**9)
    assert ("weights", "need 30.00 GB of 24.00 GB, which is not enough") in large.rows()


def test_fp8_is_decoded_before_ada(run_cli: Cli, quantized_draft: Quantized) -> None:
    folder = quantized_draft("fp8")
    code, out, _ = run_cli("inspect", folder, "--gpu", "a100-80")
    line = (
        "NVIDIA A100-SXM4-80GB has no FP8, which begins with compute capability 8.9: 14 layers are decoded in every "
        "step, which is slow; W8A8, INT8 or INT4 have kernels there\n"
    )
    assert code == 0
    assert line in out
    (answer,) = look_on_gpu(folder, "a100-80").kernels.values()
    assert answer == "decoded in every step: NVIDIA A100-SXM4-80GB has no FP8, which begins with compute capability 8.9"
    assert "decoded" not in run_cli("inspect", folder, "--gpu", "l4")[1]
    assert list(look_on_gpu(folder, "l4").kernels.values()) == ["8-bit kernels"]


def test_json(run_cli: Cli, quantized_draft: Quantized) -> None:
    folder = quantized_draft("fp8")
    found = json.loads(run_cli("inspect", folder, "--gpu", "a10", "--json")[1])
    assert found["quant_method"] == "compressed-tensors"
    there = found["gpu"]
    assert (there["name"], there["capability"], there["processors"]) == ("a10", "8.6", 72)
    assert (there["hopper_kernels"], there["measured_kernels"], there["fp8_cache"]) == (False, False, False)
    assert there["memory_bytes"] == 24 * 10**9
    assert found["bytes"] <= there["weight_bytes"] < 1.1 * found["bytes"]
    assert len(there["warnings"]) == 1
    assert "gpu" not in json.loads(run_cli("inspect", folder, "--json")[1])


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("t4", ("Tesla T4 has compute capability 7.5", "kernels need 8.0 (Ampere) or newer")),
        ("V100", ("Tesla V100-SXM2-16GB has compute capability 7.0", "kernels need 8.0 (Ampere) or newer")),
        ("mi300x", ("MI300X", "compiled for NVIDIA only", "docs/reference/amd.md")),
        ("rtx409", ("unknown GPU 'rtx409'", "did you mean 'rtx4090'")),
    ],
)
def test_cards_that_are_refused(
    gpu: str, words: tuple[str, ...], assert_refused: Callable[..., None], tmp_path: Path
) -> None:
    assert_refused(tmp_path, "inspect", "demo-draft", "--gpu", gpu, words=words)


def test_not_beside_launch(assert_refused: Callable[..., None], tmp_path: Path) -> None:
    words = ("--gpu and --launch", "give one")
    assert_refused(tmp_path, "inspect", "demo-draft", "--gpu", "l4", "--launch", words=words)


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_of_every_format(name: str) -> None:
    fmt = FORMATS[name]("bfloat16")
    eight_bit = name in ("llm-int8", "w8a8", "fp8", "fp8-block")
    assert _kernel(fmt, 512, KNOWN["sm_90"]) == ("8-bit kernels" if eight_bit else "weight-only kernels")
    assert ("decoded" in _kernel(fmt, 512, KNOWN["sm_86"])) == name.startswith("fp8")


def test_kernels_of_unusual_layers() -> None:
    assert "groups of 48" in _kernel(CtPacked(group_size=48), 960, KNOWN["sm_90"])
    assert "5-bit codes" in _kernel(CtPacked(bits=5), 512, KNOWN["sm_90"])
    assert _kernel(Gptq(act_order=True), 512, KNOWN["sm_90"]) == "weight-only kernels"


def test_an_engine_says_so_once_when_it_starts(
    quantized_draft: Quantized, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its card is one that is not here, so that what is decided about it stands in for the check of a GPU."""
    monkeypatch.setattr(
        startup, "check_kernels", lambda config, dtype, options, formats: plan_card(KNOWN["sm_80"], formats.values())
    )
    with caplog.at_level(logging.WARNING, "quantkit.runtime"):
        startup.start_engine(quantized_draft("fp8"), EngineOptions(device="cpu", max_context=64))
    (record,) = caplog.records
    assert record.getMessage().startswith("A100 has no FP8, which begins with compute capability 8.9: 14 layers")


@pytest.mark.gpu
def test_an_engine_on_a_card_without_fp8(quantized_draft: Quantized, caplog: pytest.LogCaptureFixture) -> None:
    """A newer GPU that is taken for an A100: the start warns, layers are decoded, and it answers."""
    with pretend(KNOWN["sm_80"]), caplog.at_level(logging.WARNING, "quantkit.runtime"):
        llm = LLM(quantized_draft("fp8"), device="cuda", max_context=64, kv_tokens=256)
        assert llm.generate("The function")[0].text
    assert [record.getMessage()[:19] for record in caplog.records] == ["A100 has no FP8, wh"]


def test_too_old_cards_are_no_gpus_to_plan_for() -> None:
    assert not TOO_OLD.keys() & GPUS.keys()
