"""The same load over HTTP: our client against our server, and against another engine's OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.eval.engine.run import Load, random_prompts
from quantkit.eval.interop.speed_rows import Timed, longest
from quantkit.eval.serve.answers import Failure
from quantkit.eval.serve.bench import Plan, run_bench
from quantkit.eval.serve.client import Client, Target
from quantkit.eval.serve.loads import Load as Streams
from quantkit.eval.serve.results import ServeRow

_ROUNDS = 4  # requests for each stream, as `quantkit bench serve` sends them


def server_command(engine: str, folder: Path, port: int, loads: Sequence[Load], device: str) -> list[str]:
    """What starts a server of the folder; both get the same context and the same number of places."""
    most, context = str(max(load.batch for load in loads)), str(longest(loads))
    if engine == "vLLM":
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--dtype", "bfloat16"]
        command += ["--max-model-len", context, "--max-num-seqs", most, "--no-enable-prefix-caching"]
    else:
        command = [sys.executable, "-m", "quantkit", "serve", str(folder), "--device", device]
        command += ["--max-context", context, "--max-sequences", most]
    return [*command, "--port", str(port)]


def measure_served(
    engine: str,
    folder: Path,
    loads: Sequence[Load],
    *,
    device: str,
    vocab: int,
    environment: dict[str, str],
    log: Path,
    limit: float,
) -> Iterator[Timed]:
    """A load's batch is the number of streams; each asks again when it is answered."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with _server(server_command(engine, folder, port, loads, device), environment, log) as server:
        start = _wait(url, server, log, limit)
        for load in loads:
            row = asyncio.run(_bench(url, load, vocab, log.with_suffix(".prompts.jsonl")))
            yield _timed(load, row, start)


async def _bench(url: str, load: Load, vocab: int, prompts: Path) -> ServeRow:
    """Warm-up and load send prompts of one file, each once."""
    count = load.batch * (_ROUNDS + 1)
    asked = random_prompts(Load(count, load.prompt, load.new), vocab, seed=load.batch)
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in asked), encoding="utf-8")
    streams = Streams(concurrency=load.batch, requests=load.batch * _ROUNDS)
    plan = Plan(url, (streams,), endpoint="completions", new_tokens=load.new, prompts=prompts)
    return (await run_bench(plan, lambda row: None)).rows[0]


def _timed(load: Load, row: ServeRow, start: float) -> Timed:
    if row.errors:
        raise QuantkitError(f"{row.errors} of {len(row.measured.answers)} requests failed: {row.error_examples}")
    first, gap = (row.spread(name) for name in ("ttft", "itl"))
    tokens = len(row.whole) * load.prompt if load.new == 1 else sum(answer.tokens for answer in row.whole)
    return Timed(
        load,
        row.measured.seconds,
        start,
        row.per_second(tokens),
        None if first is None else first.p50,
        None if gap is None else gap.p50,
    )


@contextmanager
def _server(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as printed:
        server = subprocess.Popen(
            command, stdout=printed, stderr=printed, start_new_session=True, env=os.environ | environment
        )
        try:
            yield server
        finally:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Politely first; then with all that it started, so that the GPU's memory is free."""
    for sent, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        try:
            os.killpg(server.pid, sent)
        except ProcessLookupError:
            break
        try:
            server.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _wait(url: str, server: subprocess.Popen[bytes], log: Path, limit: float) -> float:
    """Seconds until it lists its model."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        if server.poll() is not None:
            raise QuantkitError(f"the server ended with code {server.returncode}; {log} says why")
        if asyncio.run(_answers(url)):
            return time.monotonic() - begin
        time.sleep(0.5)
    raise QuantkitError(f"the server did not answer within {limit:g} s; {log} says why")


async def _answers(url: str) -> bool:
    client = Client(Target.parse(url), timeout=5.0)
    try:
        status, _ = await client.json("GET", "/v1/models")
    except Failure:
        return False
    finally:
        await client.close()
    return status == 200


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
