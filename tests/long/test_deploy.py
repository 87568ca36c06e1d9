"""`quantkit deploy` on a real Ray cluster of this machine: two models, replicas that die, scale and are replaced."""

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml

pytest.importorskip("ray.serve", reason="needs the extra `ray`: pip install 'quantkit[ray]'")
pytestmark = [pytest.mark.long, pytest.mark.ray]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # or Ray would make one for the user
ENVIRONMENT = os.environ | TOKEN | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
ENGINE = {"device": "cpu", "max_context": 512, "kv_tokens": 4096}
PROMPTS = [f"{start} {number}" for start in ("The function returns", "In the year", "import") for number in range(8)]
WAIT_SECONDS = 240.0
Client = aiohttp.ClientSession


def config(port: int, **changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration of all tests, with changes of models by name."""
    demo = {"name": "demo", "path": "demo", "replicas": 2, "cpus": 0.2, "options": ENGINE}
    small = {"name": "small", "path": "demo-draft", "replicas": 1, "cpus": 0.2, "options": ENGINE}
    models = [model | changes.get(str(model["name"]), {}) for model in (demo, small)]
    return {"http": {"port": port}, "models": models, "health_check_seconds": 2, "drain_seconds": 60}


@dataclass(frozen=True)
class Cluster:
    process: subprocess.Popen[str]
    address: str
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, *arguments: str) -> str:
        """`quantkit deploy` with this cluster's address."""
        command = [sys.executable, "-m", "quantkit", "deploy", *arguments, "--address", self.address]
        run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WAIT_SECONDS)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def engines(self, model: str) -> list[dict[str, Any]]:
        return list(json.loads(self.deploy("--status", "--json"))["deployments"][model]["engines"])

    def wait_for(self, model: str, reached: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        end = time.monotonic() + WAIT_SECONDS
        while not reached(found := self.engines(model)):
            assert time.monotonic() < end, found
        return found

    def update(self, **changes: dict[str, Any]) -> None:
        (self.folder / "changed.yaml").write_text(yaml.safe_dump(config(self.port, **changes)))
        self.deploy(str(self.folder / "changed.yaml"))


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A local cluster with both models; its end must be clean."""
    folder = tmp_path_factory.mktemp("deploy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "first.yaml").write_text(yaml.safe_dump(config(port)))
    command = [sys.executable, "-m", "quantkit", "deploy", str(folder / "first.yaml")]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        line, said = process.stdout.readline(), (folder / "stderr").read_text()
        assert f"quantkit serves demo, small at http://127.0.0.1:{port}" in line, said
        address = re.search(r"Ray cluster at (\S+)", said)
        assert address
        yield Cluster(process, address[1], port, folder)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, (folder / "stderr").read_text()
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Answer:
    text: str = ""
    error: str = ""  # of what a client may repeat; other failures raise
    replica: str = ""
    cached: int = 0


async def ask(client: Client, model: str, prompt: str, *, stream: bool, tokens: int = 16) -> Answer:
    """One request. An answer is either complete and ended once, or an error that says: repeat me."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    async with client.post("/v1/completions", json=body) as response:
        replica = response.headers.get("x-quantkit-replica", "")
        if response.status == 503:
            assert int(response.headers["retry-after"]) > 0
            return Answer(error=(await response.json())["error"]["code"])
        assert response.status == 200, (response.status, await response.read())
        if not stream:
            whole = await response.json()
            cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
            return Answer(whole["choices"][0]["text"], replica=replica, cached=cached)
        text, done, reason = "", 0, None
        async for raw in response.content:
            line = raw.decode().rstrip()
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    assert not done
                    return Answer(error=event["error"]["code"], replica=replica)
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
        assert (done, reason) == (1, "length")
        return Answer(text, replica=replica)


def with_client(work: Callable[[Client], Any], cluster: Cluster) -> Any:
    async def run() -> Any:
        async with Client(cluster.url, timeout=aiohttp.ClientTimeout(total=WAIT_SECONDS)) as client:
            return await work(client)

    return asyncio.run(run())


async def texts(client: Client, model: str) -> dict[str, str]:
    found = await asyncio.gather(*(ask(client, model, prompt, stream=False) for prompt in PROMPTS))
    return {prompt: answer.text for prompt, answer in zip(PROMPTS, found, strict=True)}


class Load:
    """Clients that ask without a pause until told to stop; every answer is looked at."""

    def __init__(self, client: Client, model: str, *allowed: dict[str, str]) -> None:
        self.client, self.model, self.allowed = client, model, allowed
        self.clients = 0
        self.seen: Counter[str] = Counter()

    async def one(self, number: int) -> None:
        turn = 0
        while number < self.clients:
            prompt = PROMPTS[(7 * number + turn) % len(PROMPTS)]
            answer = await ask(self.client, self.model, prompt, stream=(number + turn) % 2 == 0)
            right = answer.text in {texts[prompt] for texts in self.allowed}
            assert answer.error or right, (prompt, answer.text)
            self.seen[answer.error or "right"] += 1
            turn += 1

    async def during(self, clients: int, work: Callable[[], Any]) -> Any:
        """The work's result, done in a thread while so many clients ask."""
        self.clients = clients
        tasks = [asyncio.create_task(self.one(number)) for number in range(clients)]
        try:
            return await asyncio.to_thread(work)
        finally:
            self.clients = 0
            await asyncio.gather(*tasks)


def test_both_models_answer_as_the_plain_server_does(
    cluster: Cluster, start_server: Callable[..., tuple[subprocess.Popen[str], int]]
) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo", "small"]
    _, port = start_server("--max-context", "512", "--kv-tokens", "4096", "--no-page")
    body = {"prompt": "The function", "max_tokens": 8, "temperature": 0, "logprobs": 2, "model": "demo"}
    for extra in ({"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}):
        urls = (f"http://127.0.0.1:{port}", cluster.url)
        plain, here = (fetch(f"{url}/v1/completions", body | extra) for url in urls)
        differ = r'"id":"cmpl-\w+"|"created":\d+|"cached_tokens":\d+'
        assert re.sub(differ, "", plain) == re.sub(differ, "", here)
    asked = [{"role": "user", "content": "What is a list?"}]
    found = client.chat.completions.create(model="small", messages=asked, max_tokens=8)
    assert (found.model, bool(found.choices[0].message.content)) == ("small", True)
    with pytest.raises(openai.NotFoundError, match="this server has: demo, small"):
        client.completions.create(model="large", prompt="x")
    page = fetch(f"{cluster.url}/metrics")
    started = re.findall(r'quantkit:requests_total{model_name="(\w+)",replica="(\w+)"}', page)
    assert sorted(name for name, _ in started) == ["demo", "demo", "small"]
    assert len({replica for _, replica in started}) == 3


def test_requests_with_the_same_beginning_land_on_the_same_replica(cluster: Cluster) -> None:
    beginnings = [f"Chapter {number}. " + f"It was the {number}th day, and it rained. " * 9 for number in range(12)]

    async def work(client: Client) -> list[list[Answer]]:
        ends = ("Then", "But", "Now")
        return [[await ask(client, "demo", text + end, stream=False) for end in ends] for text in beginnings]

    groups = with_client(work, cluster)
    assert all(len({answer.replica for answer in group}) == 1 for group in groups)
    assert all(answer.cached > 64 for group in groups for answer in group[1:])
    assert len({group[0].replica for group in groups}) == 2  # or everything always went to one


def test_a_client_that_leaves_is_not_computed_for(cluster: Cluster) -> None:
    async def work(client: Client) -> None:
        body = {"model": "small", "prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()

    with_client(work, cluster)
    cluster.wait_for("model-small", lambda engines: engines[0]["running"] == engines[0]["kv_pages_used"] == 0)
    page = fetch(f"{cluster.url}/metrics")
    assert re.search(r'request_success_total{finished_reason="abort",model_name="small",replica="\w+"} 1\.0', page)


@pytest.mark.parametrize("victim", ["pid", "engine_pid"])
def test_a_killed_replica_loses_nothing_and_comes_back(cluster: Cluster, victim: str) -> None:
    before = cluster.engines("model-demo")
    assert len(before) == 2

    def kill() -> list[dict[str, Any]]:
        time.sleep(2)
        os.kill(before[0][victim], signal.SIGKILL)
        gone = before[0][victim]
        return cluster.wait_for("model-demo", lambda found: len({one[victim] for one in found} - {gone, None}) == 2)

    async def work(client: Client) -> tuple[Load, list[dict[str, Any]]]:
        load = Load(client, "demo", await texts(client, "demo"))
        assert len(set(load.allowed[0].values())) > 12  # or a mix-up would not show
        return load, await load.during(8, kill)

    load, after = with_client(work, cluster)
    assert load.seen.keys() <= {"right", "replica_died", "engine_unavailable"}, load.seen
    assert load.seen["right"] > 16  # the load went on
    assert before[1]["pid"] in [engine["pid"] for engine in after]


def test_scaling_under_load_without_an_error(cluster: Cluster) -> None:
    first = cluster.engines("model-small")
    scaling = {"min": 1, "max": 3, "target_queue": 2, "up_seconds": 1, "down_seconds": 3}
    cluster.update(small={"replicas": scaling})
    assert [engine["pid"] for engine in cluster.engines("model-small")] == [first[0]["pid"]]  # nothing was reloaded

    async def work(client: Client) -> Load:
        load = Load(client, "small", await texts(client, "small"))
        await load.during(12, lambda: cluster.wait_for("model-small", lambda found: len(found) == 3))
        await load.during(1, lambda: cluster.wait_for("model-small", lambda found: len(found) == 1))
        return load

    load = with_client(work, cluster)
    assert load.seen.keys() == {"right"}, load.seen


def test_a_new_checkpoint_replaces_the_old_one_without_dropping_requests(cluster: Cluster) -> None:
    small = cluster.engines("model-small")[0]["pid"]

    async def work(client: Client) -> tuple[Load, dict[str, str], dict[str, str]]:
        old, new = await texts(client, "demo"), await texts(client, "small")
        assert sum(old[prompt] != new[prompt] for prompt in PROMPTS) > 12
        load = Load(client, "demo", old, new)
        await load.during(6, lambda: cluster.update(demo={"path": "demo-draft"}))
        return load, new, await texts(client, "demo")

    load, new, now = with_client(work, cluster)
    assert load.seen.keys() == {"right"}, load.seen
    assert now == new
    assert cluster.engines("model-small")[0]["pid"] == small


def test_the_end_waits_for_open_requests(cluster: Cluster) -> None:  # the last test: nothing is left after it
    async def work(client: Client) -> list[Answer]:
        asked = [asyncio.create_task(ask(client, "demo", prompt, stream=True, tokens=200)) for prompt in PROMPTS]
        await asyncio.sleep(1)
        cluster.process.send_signal(signal.SIGTERM)
        while not (late := await ask(client, "demo", "late", stream=False)).error:
            pass  # until the front has heard of it
        assert late.error == "draining"
        return await asyncio.gather(*asked)

    assert all(answer.text and not answer.error for answer in with_client(work, cluster))
    assert cluster.process.wait(timeout=120) == 0
