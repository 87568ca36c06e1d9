"""Every block of code on Start and Guides is run, page by page, in the order in which it stands, in an empty folder.

`make test-long` runs the pages as they stand and compares what they show. `make test` runs most of them with less: the
model `demo-draft` where they say `demo`, little calibration, few scales to choose from, few windows. In both, a server
gets a free port instead of 8000, and what `pip install -e .` would do for the method of a guide is done without pip.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from few_scales import few_scales
from guide_blocks import NAMES, RUN, Block, blocks, scripts
from pages import PAGES, ROOT, assert_close, words
from quantkit.arch import FAMILIES
from quantkit.eval.interop import rows
from quantkit.extras import EXTRAS
from quantkit.runtime.server.settings import ServerSettings

Cli = Callable[..., tuple[int, str, str]]
PROXY = "docs/guides/behind-a-proxy.md"
ONLY_LONG = {
    "docs/start/report.md",  # a process for each format
    "docs/start/serve.md",  # a server; tests/runtime/server has what it shows
    PROXY,  # the same
    "docs/guides/add-a-kernel.md",  # a process with Triton; tests/kernels has what it shows
}
NOT_RUN = [  # all blocks that nobody runs
    ("docs/guides/add-a-method.md", "installs packages"),
    (PROXY, "needs nginx"),
    ("docs/guides/containers.md", "needs a container engine"),
    ("docs/guides/containers.md", "needs a container engine"),
    ("docs/guides/vllm.md", "needs vLLM"),
    ("docs/guides/vllm.md", "needs vLLM"),
    ("docs/guides/your-own-model.md", "needs the Hugging Face hub"),
    ("docs/start/install.md", "installs packages"),
]
LESS = {  # options that win over those of the page, so that its commands take seconds
    "quantize": "--samples 4 --seq-len 64 --quality-windows 1",
    "eval": "--max-windows 1 --window 128",
    "eval --behaviour": "--behaviour-tokens 24 --behaviour-prompts few.jsonl",
    "serve": "--no-warm-up --max-sequences 2",
}
PROMPTS = ROOT / "eval" / "behaviour" / "prompts.jsonl"
_PATIENCE = 120  # seconds for a server to start on a busy machine


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, no GPU, and families as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(FAMILIES, "nova", None)  # remembered as absent
    del FAMILIES["nova"]


class Page:
    """Runs the blocks of a page."""

    def __init__(self, name: str, run_cli: Cli, less: bool) -> None:
        self.name, self.run_cli, self.less = name, run_cli, less
        self.values: dict[str, object] = {"__name__": "guide"}
        self.port = free_port()
        self.servers = ExitStack()

    def run(self) -> None:
        with self.servers:
            for block in blocks(self.name):
                self.block(block)

    def block(self, block: Block) -> None:
        text = self.adapted(block.text)
        if block.file:
            Path(block.file).write_text(text, encoding="utf-8")
        elif block.not_run == "installs packages" and Path("pyproject.toml").exists():
            install(Path("pyproject.toml"))
        elif block.server:
            (command,) = scripts(text)
            less = f" {LESS['serve']}" if self.less else ""
            self.servers.enter_context(running(command + less, self.port))
        elif block.language == "python":
            exec(compile(text, self.name, "exec"), self.values)
        elif block.language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                self.compare(shown, self.command(command))
        elif block.not_run is None:
            for script in scripts(text):
                self.command(script)

    def command(self, script: str) -> str:
        """What it printed."""
        if script.startswith("quantkit "):
            arguments = shlex.split(script, comments=True)[1:]
            code, out, err = self.run_cli(*arguments, *self.less_work(arguments))
            assert code == 0, f"{self.name}: {script}\n{err}"
            return out
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": f".:{ROOT}"}
        done = subprocess.run(["bash", "-euc", script], env=environment, text=True, capture_output=True, timeout=600)
        assert done.returncode == 0, f"{self.name}: {script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def less_work(self, arguments: list[str]) -> list[str]:
        if not self.less or "--dry-run" in arguments:
            return []
        kind = "eval --behaviour" if "--behaviour" in arguments else arguments[0]
        Path("few.jsonl").write_text("".join(PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)[::10]))
        return LESS.get(kind, "").split()

    def adapted(self, text: str) -> str:
        text = re.sub(r"(?<=:)8000\b|(?<=^port: )8000$", str(self.port), text, flags=re.MULTILINE)
        return re.sub(r"(?<![\w-])demo(?![\w-])", "demo-draft", text) if self.less else text

    def compare(self, shown: str, printed: str) -> None:
        """Words to the letter, numbers closely; a line `...` stands for lines that are left out."""
        if not self.less:
            assert_shown(shown, printed)


def assert_shown(shown: str, printed: str) -> None:
    lines, at = printed.splitlines(), 0
    for piece in shown.strip("\n").removesuffix("\n...").split("\n...\n"):
        length = len(piece.splitlines())
        places = [
            place for place in range(at, len(lines)) if words("\n".join(lines[place : place + length])) == words(piece)
        ]
        assert places, f"not printed:\n{piece}\nbut:\n{printed}"
        at = places[0] + length
        assert_close(piece, "\n".join(lines[places[0] : at]))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: str, port: int) -> Iterator[None]:
    """A server that says that it is ready, until the page ends; then it must end as a server should."""
    given = shlex.split(command)[1:]
    more = [] if "--config" in given else ["--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with Path("server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "quantkit", *given, *more],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert line.startswith("quantkit serves"), line + Path("server.log").read_text()
            yield
        finally:
            server.terminate()
            code = server.wait(_PATIENCE)
            server.stdout.close()
    assert code == 0, Path("server.log").read_text()


def install(project: Path) -> None:
    """What pip would leave of a package whose modules are here: its name and its entry points."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    info = Path(f"{about['name'].replace('-', '_')}-{about['version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
             for group, entries in about["entry-points"].items()]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.parametrize("page", [name for name in NAMES if name not in ONLY_LONG])
def test_every_block_runs(run_cli: Cli, page: str) -> None:
    with few_scales():
        Page(page, run_cli, less=True).run()


@pytest.mark.long
@pytest.mark.parametrize("page", NAMES)
def test_every_block_runs_as_it_stands(run_cli: Cli, page: str) -> None:
    Page(page, run_cli, less=False).run()


def test_blocks_that_nobody_runs_are_few_and_known() -> None:
    found = [(block.page, block.not_run) for name in NAMES for block in blocks(name) if block.not_run]
    assert sorted(found) == sorted(NOT_RUN)


def test_every_block_is_a_file_or_is_run() -> None:
    """One in another language would be passed over in silence, and so would one with a misspelt remark."""
    assert len(NAMES) == 12
    for name in NAMES:
        assert any(block.language in RUN for block in blocks(name)), name
        for block in blocks(name):
            known = block.file or block.server or block.not_run or not block.remark
            assert known, f"{name}: {block.remark}"
            assert block.language in RUN or block.file or block.not_run, f"{name}: {block.text}"
        assert PAGES[name].count("```") == 2 * len(blocks(name)), name


def test_the_proxy_and_the_server_have_the_same_limits() -> None:
    nginx = next(block.text for block in blocks(PROXY) if block.language == "nginx")
    said = yaml.safe_load(next(block.text for block in blocks(PROXY) if block.file == "server.yaml"))
    settings = ServerSettings(**{name: value for name, value in said.items() if name != "api_keys_file"})
    directives = dict(re.findall(r"^\s*(\w+)\s+(.+);$", nginx, re.MULTILINE))
    assert directives["client_max_body_size"] == f"{settings.max_request_bytes // 2**20}m"
    assert directives["proxy_read_timeout"] == f"{settings.request_timeout_seconds:.0f}s"
    assert directives["server"] == f"{settings.host}:{settings.port}"
    assert directives["proxy_buffering"] == "off"
    assert directives["proxy_http_version"] == "1.1"


def test_checkpoints_that_vllm_loaded_have_rows() -> None:
    said = re.search(r"Recipes that vLLM (\S+) loaded there: (.+?) and others", PAGES["docs/guides/vllm.md"], re.DOTALL)
    assert said is not None
    ran = {row["checkpoint"] for row in rows.read(ROOT / rows.FILE)
           if (row["engine"], row["version"], row["loads"]) == ("vLLM", said[1], "yes")}  # fmt: skip
    named = set(re.findall(r"`([\w.-]+)`", said[2]))
    assert len(named) > 5
    assert named <= ran


def test_the_page_about_installing_has_every_extra() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    said = re.findall(r"^\| `pip install (?:-e )?'\.\[(\w+)\]'`", PAGES["docs/start/install.md"], re.MULTILINE)
    assert set(said) == {*EXTRAS, "all", "dev"}
    assert set(said) <= extras


def test_other_numbers_and_words_would_be_seen() -> None:
    printed = "loss 1.00 of 2,000\nmore\nperplexity 16.40\n"
    assert_shown("loss 1.01 of 2,000\n...\nperplexity 16.41\n", printed)
    assert_shown("loss 1.01 of 2,000\n...\n", printed)
    for other in ("loss 1.2 of 2,000", "lost 1.00 of 2,000", "perplexity 16.40\n...\nmore", "perplexity 16.60\n..."):
        with pytest.raises(AssertionError):
            assert_shown(other, printed)


def test_lines_of_the_shell_stay_together() -> None:
    assert scripts("umask 077\necho x \\\n  > y\nquantkit recipes\nquantkit plan a\nls\n") == [
        "umask 077\necho x    > y",
        "quantkit recipes",
        "quantkit plan a",
        "ls",
    ]
