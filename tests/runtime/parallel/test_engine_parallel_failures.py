"""Ranks that die, and what cannot be divided: one clear line, nobody left behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.parallel.launcher import Job, LocalWorkers
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.engine_process.pending import EngineDied
from quantkit.runtime.startup import start_engine

pytestmark = pytest.mark.xdist_group("ranks")  # as those of `test_engine_parallel.py`
SMALL: dict[str, Any] = {"device": "cpu", "max_context": 64, "kv_tokens": 256, "max_sequences": 4}
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SECONDS = 5  # within which a killed rank must end its engine


def alive(pid: int) -> bool:
    """Whether a process computes; one that is dead and not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def run_dry(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.fixture
def start(
    tiny_model: Path, forked_workers: Callable[[], LocalWorkers]
) -> Iterator[Callable[..., tuple[Engine, LocalWorkers]]]:
    """`start(**options)`: an engine and its ranks, which are forked; `own=True` starts them as users do."""
    engines: list[Engine] = []

    def start_one(own: bool = False, **options: int) -> tuple[Engine, LocalWorkers]:
        workers = LocalWorkers() if own else forked_workers()
        engines.append(start_engine(tiny_model, EngineOptions(**SMALL | options), launcher=workers))
        return engines[-1], workers

    yield start_one
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("layout", "rank", "own"),
    [
        ({"tensor_parallel": 2}, 1, True),
        ({"pipeline_parallel": 2}, 1, False),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 2, False),
        pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, 2, True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_killed_rank_ends_the_engine(
    layout: dict[str, int], rank: int, own: bool, start: Callable[..., tuple[Engine, LocalWorkers]]
) -> None:
    engine, workers = start(own, **layout)
    for _ in range(3):
        engine.add([5, 6, 7], LONG)
    for _ in range(4):
        engine.step()
    os.kill(workers.pids[rank], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(
        QuantkitError, match=rf"^rank {rank} of \d died: killed by SIGKILL; all ranks have ended"
    ) as seen:
        run_dry(engine)
    assert time.monotonic() - killed < SECONDS
    assert "\n" not in str(seen.value)
    with pytest.raises(QuantkitError, match=f"rank {rank} of"):
        engine.check()
    wait_until(lambda: not any(map(alive, workers.pids.values())))


def test_a_rank_that_dies_while_nobody_asks(start: Callable[..., tuple[Engine, LocalWorkers]]) -> None:
    engine, workers = start(tensor_parallel=2)
    told: list[bool] = []
    engine.when_broken(lambda: told.append(True))
    engine.check()
    os.kill(workers.pids[1], signal.SIGKILL)
    wait_until(lambda: bool(told), SECONDS)
    engine.add([5, 6, 7], LONG)
    with pytest.raises(QuantkitError, match="rank 1 of 2 died: killed by SIGKILL"):
        engine.step()


def test_what_a_rank_says_is_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    """Only the second stage reads the last block, which is broken."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.layers\.1\.input_layernorm.*says rank 1 of 2") as seen:
        start_engine(tmp_path, EngineOptions(**SMALL, pipeline_parallel=2))
    assert "\n" not in str(seen.value)


def test_an_interrupted_step_ends_the_other_ranks(
    start: Callable[..., tuple[Engine, LocalWorkers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for this one's part of a sum, and the next step would add what does not belong together."""
    engine, workers = start(tensor_parallel=2)
    engine.add([5, 6, 7], LONG)
    engine.step()

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner.part.decoder, "_attention", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    wait_until(lambda: not alive(workers.pids[1]), SECONDS)
    with pytest.raises(QuantkitError, match="rank 0 of 2 died: KeyboardInterrupt"):
        engine.step()


def test_a_listener_asks_while_the_ranks_are_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank wrote is not closed under the one who reads it."""
    workers = LocalWorkers()
    entered = threading.Event()
    read = LocalWorkers._reason

    def read_slowly(*given: Any) -> str:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            time.sleep(0.3)
        return read(*given)

    monkeypatch.setattr(LocalWorkers, "_reason", read_slowly)
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the launcher)
    script = "import sys; sys.exit('no room')"
    workers._processes[1] = subprocess.Popen([sys.executable, "-c", script], stdout=errors, stderr=errors)
    workers._errors[1] = errors
    workers._processes[1].wait()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(workers.check)
        assert entered.wait(10)
        workers.stop()
        assert answer.result() == workers.check() == {1: "exit code 1, no room"}
    assert errors.closed


def test_closing_an_engine_ends_its_ranks(start: Callable[..., tuple[Engine, LocalWorkers]]) -> None:
    engine, workers = start(tensor_parallel=2)
    engine.close()
    assert not any(map(alive, workers.pids.values()))
    engine.close()


def test_forgetting_an_engine_ends_its_ranks(tiny_model: Path, forked_workers: Callable[[], LocalWorkers]) -> None:
    workers = forked_workers()
    engine = start_engine(tiny_model, EngineOptions(**SMALL, pipeline_parallel=2), launcher=workers)
    engine.add([5, 6, 7], LONG)
    engine.step()
    assert alive(workers.pids[1])
    del engine
    gc.collect()
    assert not alive(workers.pids[1])


SCRIPT = """
import sys
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.parallel.launcher import LocalWorkers
from quantkit.runtime.startup import start_engine

workers = LocalWorkers()
stages = int(sys.argv[3])
options = EngineOptions(device="cpu", max_context=64, kv_tokens=256, tensor_parallel=2, pipeline_parallel=stages)
engine = start_engine(sys.argv[1], options, launcher=workers)
print(*workers.pids.values(), flush=True)
if sys.argv[2] == "ends":
    sys.exit()
while True:
    engine.add([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
    while engine.busy:
        engine.step()
"""


@pytest.mark.parametrize(
    ("how", "stages"),
    [
        ("killed", 1),
        pytest.param("ends", 1, marks=pytest.mark.long),
        pytest.param("killed", 2, marks=pytest.mark.long),
        pytest.param("ends", 2, marks=pytest.mark.long),
    ],
)
def test_ranks_go_when_rank_0_goes(how: str, stages: int, tiny_model: Path) -> None:
    """Killed in the middle of a step, or at the end of its program, which closed nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tiny_model), how, str(stages)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 * stages - 1
    if how == "killed":
        assert all(map(alive, pids))
        time.sleep(0.2)  # into the middle of steps
        process.kill()
    assert process.wait(30) == (-signal.SIGKILL if how == "killed" else 0)
    wait_until(lambda: not any(map(alive, pids)), SECONDS)


async def lose_a_rank(client: EngineClient) -> list[int]:
    """Kills one amid an answer; returns the processes of the engine."""
    assert client.pid is not None
    first, ranks = client.pid, children(client.pid)
    assert len(ranks) == 1
    answering = client.submit([5, 6, 7], LONG)
    os.kill(ranks[0], signal.SIGKILL)
    with pytest.raises(EngineDied):
        async for _ in answering:
            pass
    return [first, *ranks]


@pytest.mark.long
def test_a_server_sees_that_a_rank_died(tiny_model: Path) -> None:
    """The engine process goes with its ranks. `test_engine_client.py` has what follows: another one is started."""

    async def run() -> None:
        client = EngineClient(str(tiny_model), SMALL | {"tensor_parallel": 2})
        await client.start()
        try:
            lost = await lose_a_rank(client)
            assert not client.ready
        finally:
            await client.close()
        wait_until(lambda: not any(map(alive, lost)), SECONDS)

    asyncio.run(run())


@pytest.mark.long
def test_the_server_starts_another_engine(tiny_model: Path) -> None:
    """As after any death of the engine process; the ranks of the first one are gone by then."""

    async def run() -> None:
        client = EngineClient(str(tiny_model), SMALL | {"tensor_parallel": 2})
        await client.start()
        try:
            lost = await lose_a_rank(client)
            end = time.monotonic() + 60
            while not client.ready:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert client.restarts == 1
            assert client.pid is not None
            assert client.pid != lost[0]
            assert not any(map(alive, lost))
            second = client.submit([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
            assert len([delta async for delta in second]) == 2
            ranks = children(client.pid)
        finally:
            await client.close()
        assert not any(map(alive, ranks))

    asyncio.run(run())


class NoLauncher(LocalWorkers):
    """Fails the test where anything is started."""

    def start(self, jobs: Sequence[Job]) -> None:
        pytest.fail("ranks were started")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 3}, "tensor parallel is 3, but the model has 8 attention heads.* 1, 2, 4"),
        ({"pipeline_parallel": 6}, "pipeline parallel is 6, but the model has 5 blocks"),
        ({"tensor_parallel": 2, "kv_tokens": 10**12, "max_context": 64}, "the model does not fit: .* --kv-tokens"),
        ({"tensor_parallel": 2, "speculative": "self=nf4"}, "no rank has the whole model .* draft=PATH"),
        ({"pipeline_parallel": 2, "speculative": "ngram"}, "leave --speculative or --pipeline-parallel out"),
    ],
    ids=str,
)
def test_refused_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as seen:
        start_engine("demo", EngineOptions(**{"device": "cpu"} | options), launcher=NoLauncher())
    assert "\n" not in str(seen.value)


def test_groups_are_not_cut_apart(tmp_path: Path) -> None:
    """Two halves of 1280 inputs have no whole number of groups of 256."""
    import quantkit
    from quantkit.recipe import load_recipe

    recipe = load_recipe("rtn-w4g128", ("format.group_size=256",))
    quantkit.quantize("demo", recipe, tmp_path / "out", quality_windows=0)
    with pytest.raises(InputError, match=r"tensor parallel is 2, but .*down_proj has 5 groups of 256 inputs"):
        start_engine(tmp_path / "out", EngineOptions(device="cpu", tensor_parallel=2), launcher=NoLauncher())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0, but must be a whole number from 1 to 1024"),
        ({"pipeline_parallel": True}, "pipeline_parallel is True"),
        ({"micro_batches": 2}, "micro_batches is about the stages"),
        ({"pipeline_parallel": 2, "micro_batches": 0}, "micro_batches is 0, but must be a positive"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "demo", "x", "--device", "cpu", "--tensor-parallel", 3), ("8 attention heads", "1, 2, 4")),
        (("eval", "demo", "--backend", "runtime", "--pipeline-parallel", 9), ("5 blocks",)),
        (("eval", "demo", "--tensor-parallel", 2), ("--backend runtime",)),
        (("bench", "engine", "--shape", "llama-3.2-1b", "--device", "cpu", "--tensor-parallel", 2, "--no-save"),
         ("random weights",)),
        pytest.param(  # by its engine process; `test_serve_process.py` has another error of one
            ("serve", "demo", "--device", "cpu", "--port", 0, "--tensor-parallel", 3), ("8 attention heads",),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda given: str(given[0]),
)  # fmt: skip
def test_the_command_line_says_one_line(
    arguments: tuple[object, ...], words: tuple[str, ...], run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = run_cli(*arguments)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert all(word in last for word in words), err


@pytest.mark.gpu
def test_more_ranks_than_gpus() -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(InputError, match=f"needs {count} GPUs, but torch sees {count - 1}"):
        start_engine("demo", EngineOptions(device="cuda", pipeline_parallel=count), launcher=NoLauncher())
