"""How long `quantkit serve` takes from the start of its process to a first token, on a machine that never ran it and on
one that did.

    python -m quantkit.eval.serve.start_times MODEL --runs 3 -- --kv-dtype fp8

Each run begins with an empty cache of Triton (cold), or with that of a run before (warm); `--kernels FILE` installs an
archive of `quantkit warm-up --to` into the empty one first. What stands behind `--` goes to `quantkit serve`. JSON on
stdout: seconds from the start of the process to its line that it serves, to the first token of a request that is sent
then, and to the end of the rehearsal; and how many kernels the cache got, which for a warm start should be none.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

_PROMPT = "The first thing that a server should say is"
_PATIENCE = 900.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m quantkit.eval.serve.start_times")
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--kernels", metavar="FILE", help="an archive to install before each cold start")
    own, serve = sys.argv[1:], []
    if "--" in own:
        own, serve = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    found = []
    for number in range(1, given.runs + 1):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                if kind == "cold" and given.kernels:
                    _quantkit(cache, "warm-up", "--from", given.kernels)
                before = _kernels(cache)
                times = _start(given.model, serve, cache)
                found.append({"run": number, "kind": kind, **times, "new_kernels": _kernels(cache) - before})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"model": given.model, "serve": serve, "kernels": given.kernels, "runs": found}, indent=1))


def _start(model: str, options: list[str], cache: str) -> dict[str, float | None]:
    began = time.perf_counter()
    with _serving(model, options, cache) as port:
        listening = time.perf_counter() - began
        _first_token(port)
        first = time.perf_counter() - began
        while (left := _ask(port, "/ready").get("left")) is not None:
            time.sleep(0.1)
            if time.perf_counter() - began > _PATIENCE:
                raise TimeoutError(f"{left} parts are still to rehearse after {_PATIENCE:.0f} s")
        rehearsed = time.perf_counter() - began
    return {name: round(seconds, 2) for name, seconds in
            (("listening", listening), ("first_token", first), ("rehearsed", rehearsed))}  # fmt: skip


@contextmanager
def _serving(model: str, options: list[str], cache: str) -> Iterator[int]:
    """The port on which it listens."""
    process = subprocess.Popen(
        _command("serve", model, "--port", "0", *options), env=_environment(cache), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "serves" in line), None)
        if line is None:
            raise SystemExit(f"the server ended with code {process.wait()} before it listened")
        yield int(line.rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _first_token(port: int) -> None:
    body = json.dumps({"prompt": _PROMPT, "max_tokens": 2, "temperature": 0, "stream": True})
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while not response.readline().startswith(b"data: {"):
            pass


def _ask(port: int, path: str) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found


def _kernels(cache: str) -> int:
    return len(list(Path(cache).glob("*/*.cubin")))


def _quantkit(cache: str, *arguments: str) -> None:
    subprocess.run(_command(*arguments), env=_environment(cache), check=True, stdout=sys.stderr)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "quantkit", *arguments]


def _environment(cache: str) -> dict[str, str]:
    return os.environ | {"TRITON_CACHE_DIR": cache}


if __name__ == "__main__":
    main()
