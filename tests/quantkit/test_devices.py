"""Devices by name: which names there are, what is refused, and that work goes to the GPU that was named."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from quantkit import load_reference, quantize
from quantkit.devices import find_device, is_device_name, on_device, resolve_device
from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from quantkit.runtime.scoring import score_tokens

PROMPT = list(range(1, 20))
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture
def seen_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`seen_gpus(n)`: torch says that it sees so many, and no variable hides any."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return see


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_names(name: str) -> None:
    assert is_device_name(name)


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "CUDA", "cuda:99999"])
def test_other_names_are_refused_with_those_that_exist(name: str) -> None:
    assert not is_device_name(name)
    with pytest.raises(InputError, match="auto, cpu, cuda or cuda:N"):
        resolve_device(name)


def test_auto_is_a_gpu_where_there_is_one(seen_gpus: Callable[[int], None]) -> None:
    seen_gpus(0)
    assert (resolve_device("auto"), resolve_device("cpu")) == ("cpu", "cpu")
    seen_gpus(2)
    assert [resolve_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == ["cuda", "cpu", "cuda", "cuda:1"]
    assert find_device("cuda:1") == torch.device("cuda", 1)


def test_an_index_that_is_not_here(seen_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seen_gpus(2)
    with pytest.raises(InputError) as refused:
        resolve_device("cuda:2")
    assert str(refused.value) == (
        "device 'cuda:2' is not available: torch sees 2 GPUs, cuda:0 to cuda:1; use one of these"
    )
    seen_gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(InputError) as refused:
        resolve_device("cuda:3")
    assert str(refused.value) == (
        "device 'cuda:3' is not available: torch sees 1 GPU, cuda:0 (CUDA_VISIBLE_DEVICES is '3'); use one of these"
    )


def test_every_command_refuses_it_in_one_line(
    seen_gpus: Callable[[int], None], assert_refused: Callable[..., None], tmp_path: Path
) -> None:
    seen_gpus(2)
    commands: Sequence[Sequence[object]] = (
        ("generate", "demo-draft", "x"),
        ("chat", "demo-draft"),
        ("quantize", "demo-draft", "-r", "nf4", "-o", tmp_path / "out"),
        ("eval", "demo-draft"),
        ("compare", "demo-draft", "-o", tmp_path / "out"),
        ("demo", "-o", tmp_path / "out"),
        ("train-medusa", "demo-draft", "-o", tmp_path / "out"),
        ("bench", "kernels"),
        ("bench", "engine", "demo-draft"),
        ("bench", "step", "demo-draft"),
        ("bench", "batching", "demo-draft"),
        ("bench", "speculative", "demo-draft", "--speculative", "ngram"),
    )
    for command in commands:
        assert_refused(tmp_path, *command, "--device", "cuda:2", words=("'cuda:2'", "2 GPUs"))


def test_so_does_the_library(seen_gpus: Callable[[int], None], tmp_path: Path) -> None:
    seen_gpus(2)
    doors: Sequence[Callable[[], object]] = (
        lambda: LLM("demo-draft", device="cuda:2"),
        lambda: EngineOptions(device="cuda:2").torch_device,
        lambda: load_reference("demo-draft", device="cuda:2"),
        lambda: quantize("demo-draft", "nf4", tmp_path / "out", device="cuda:2"),
    )
    for door in doors:
        with pytest.raises(InputError, match="torch sees 2 GPUs"):
            door()


def test_gpus_that_the_environment_hides() -> None:
    """Real processes, as torch reads the variable once."""
    command = [sys.executable, "-m", "quantkit", "generate", "demo-draft", "x", "--device", "cuda"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    assert "sees no GPU (CUDA_VISIBLE_DEVICES is ''); use cpu\n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_cpu_makes_no_gpu_current() -> None:
    with on_device("cpu"), on_device(torch.device("cpu", 0)):
        assert torch.zeros(1).device.type == "cpu"


def in_a_thread(work: Callable[[], object]) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


@pytest.mark.gpu
def test_steps_in_another_thread_than_the_one_that_loaded() -> None:
    llm = LLM("demo-draft", device="cuda", dtype="bfloat16", max_context=256, kv_tokens=1024)
    here = llm.generate([PROMPT], GREEDY)[0].answers[0].token_ids
    assert in_a_thread(lambda: llm.generate([PROMPT], GREEDY)[0].answers[0].token_ids) == [here]


@pytest.mark.gpu
@two_gpus
def test_the_second_gpu_answers_while_the_first_is_current(tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "max_context": 256, "kv_tokens": 1024, "warm_up": True}
    first = LLM("demo-draft", device="cuda:0", **options)
    expected = first.generate([PROMPT], GREEDY)[0].answers[0].token_ids
    torch.cuda.reset_peak_memory_stats(0)
    held = torch.cuda.max_memory_allocated(0)
    second = LLM("demo-draft", device="cuda:1", **options)
    assert second.engine.runner.device == torch.device("cuda", 1)
    assert second.generate([PROMPT], GREEDY)[0].answers[0].token_ids == expected
    assert in_a_thread(lambda: second.generate([PROMPT], GREEDY)[0].answers[0].token_ids) == [expected]
    ids = torch.tensor(PROMPT)
    torch.testing.assert_close(score_tokens(second.engine, ids).cpu(), score_tokens(first.engine, ids).cpu())
    assert first.generate([PROMPT], GREEDY)[0].answers[0].token_ids == expected  # they take turns in one thread
    quantize("demo-draft", "gptq-w4g128", tmp_path / "out", device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) < held + (64 << 20), "work for the second GPU went to the first"


@pytest.mark.gpu
@two_gpus
def test_commands_work_on_the_second_gpu(run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    small = ("--max-context", 256, "--kv-tokens", 1024, "--device", "cuda:1")
    code, out, err = run_cli("generate", "demo-draft", "The function", "--max-tokens", 8, *small)
    assert (code, err) == (0, ""), err
    assert out.strip()
    kernels = ("bench", "kernels", "--format", "w4", "--shape", "256x256", "--m", "1", "--repeat", 2, "--no-save")
    assert run_cli(*kernels, "--device", "cuda:1")[0] == 0
    assert torch.cuda.current_device() == 0
