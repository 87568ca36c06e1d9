"""500 clients stream from a live server for a minute, some of them leaving amid an answer; then the server must end.

Every client checks its text against what the same prompt gets alone.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

CLIENTS = 500
SECONDS = float(os.environ.get("QUANTKIT_TEST_LOAD_SECONDS", "60"))
PROMPTS = [
    f"{start} {number}"
    for start in ("The function returns", "In the year", "A list of", "import")
    for number in range(10)
]
NEW_TOKENS = 12
Texts = dict[str, tuple[str, str | None]]  # prompt -> answer and why it ended


async def ask(port: int, prompt: str, *, leave_after: int | None = None) -> tuple[str, str | None]:
    """The streamed text and why it ended; ("", "left") for a client that goes after so many events."""
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True})
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        status = await reader.readline()
        assert b" 200 " in status, status
        text, reason, events = "", None, 0
        while line := await reader.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["text"]
            reason = choice["finish_reason"] or reason
            events += 1
            if events == leave_after:
                return "", "left"
        return text, reason
    finally:
        writer.close()


async def page_status(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /page/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    found: dict[str, float] = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["live"]
    return found


def resident(pid: int) -> int:
    """Bytes of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (pid, *children))
    return pages * os.sysconf("SC_PAGE_SIZE")


async def client(port: int, expected: Texts, seed: int, end: float, seen: Counter[str]) -> None:
    generator = random.Random(seed)
    while time.monotonic() < end:
        prompt = generator.choice(PROMPTS)
        leaves = generator.randint(1, NEW_TOKENS - 2) if generator.random() < 0.1 else None
        found = await ask(port, prompt, leave_after=leaves)
        if found[1] == "left":
            seen["left"] += 1
        else:
            assert found == expected[prompt], f"{prompt}: {found} instead of {expected[prompt]}"
            seen["right"] += 1


async def load(port: int, pid: int) -> None:
    expected = {prompt: await ask(port, prompt) for prompt in PROMPTS}
    assert len({text for text, _ in expected.values()}) > 20  # or a mix-up would not show
    seen: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    clients = [asyncio.create_task(client(port, expected, seed, end, seen)) for seed in range(CLIENTS)]
    await asyncio.sleep(SECONDS / 3)
    early = resident(pid)
    await asyncio.gather(*clients)
    late = resident(pid)
    assert seen["right"] > CLIENTS
    assert seen["left"] > CLIENTS / 20
    assert late < early * 1.2 + (50 << 20), f"memory grew from {early} to {late} bytes"
    for _ in range(100):  # those who left are noticed within a step or two
        live = await page_status(port)
        if live["running"] == live["waiting"] == 0 and live["kv_percent"] == 0:
            break
        await asyncio.sleep(0.1)
    assert (live["running"], live["waiting"], live["kv_percent"]) == (0, 0, 0), live


async def drain(port: int, process: subprocess.Popen[str]) -> None:
    """Whoever was accepted before the signal is answered in full."""
    expected = {prompt: await ask(port, prompt) for prompt in PROMPTS}
    asked = [asyncio.create_task(ask(port, prompt)) for prompt in PROMPTS * 3]
    while (await page_status(port))["running"] == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    found = await asyncio.gather(*asked)
    assert found == [expected[prompt] for prompt in PROMPTS * 3]


def test_five_hundred_clients_and_a_clean_end(start_server: Callable[..., tuple[subprocess.Popen[str], int]]) -> None:
    limits = ("--max-queue", "2000", "--max-sequences", "64", "--max-context", "128")
    process, port = start_server(*limits, "--log-level", "error", "--drain-seconds", "120")
    asyncio.run(load(port, process.pid))
    asyncio.run(drain(port, process))
    assert process.wait(timeout=60) == 0
