"""Clusters that cannot be reached, ports that are taken: one line before anything starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="needs the extra `ray`: pip install 'quantkit[ray]'")
pytestmark = [pytest.mark.long, pytest.mark.ray]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
MODEL = "models: [{name: a, path: demo, cpus: 0.1, options: {device: cpu, max_context: 64, kv_tokens: 512}}]"


def refused(*arguments: object) -> str:
    command = [sys.executable, "-m", "quantkit", "deploy", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


def test_clusters_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODEL)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert f"what listens at 127.0.0.1:{port} is no Ray cluster" in refused(file, "--address", f"127.0.0.1:{port}")
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in refused(file, "--address", f"127.0.0.1:{port}")
    assert "must be HOST:PORT" in refused("--stop", "--address", "ray://somewhere:10001")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "models.yaml"
        file.write_text(f"{MODEL}\nhttp: {{port: {port}}}\n")
        assert f"cannot listen on 127.0.0.1 port {port}: another process uses it" in refused(file)
