"""Version, changelog and pins agree, and a wheel would hold the files of the package."""

import re
import subprocess
import sys
import tomllib

from dist import packaged, tracked_files
from package_imports import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RELEASE = re.compile(r"^## \[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d$", re.MULTILINE)


def test_the_version_follows_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = [tuple(map(int, match.groups())) for match in RELEASE.finditer(text)]
    assert releases == sorted(releases, reverse=True)
    assert text.index("## [Unreleased]") < text.index("## [0.1.0]")
    number, _, development = PROJECT["version"].partition(".dev")
    version = tuple(map(int, number.split(".")))
    assert version > releases[0] if development else version == releases[0]


def test_the_lock_has_what_was_chosen_by_hand() -> None:
    lines = [
        (ROOT / name).read_text(encoding="utf-8").split("\n") for name in ("constraints.txt", "requirements-lock.txt")
    ]
    chosen, locked = ({line for line in file if line and not line.startswith("#")} for file in lines)
    assert chosen <= locked
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in locked), "pins alone: no paths, no local versions"


def test_a_wheel_holds_the_package() -> None:
    """As setuptools lists it, which is quick; `make dist` looks into a real one."""
    code = """
import setuptools
project = setuptools.Distribution()
project.parse_config_files()
project.script_name, project.include_package_data = "setup.py", False  # only what pyproject.toml lists; writes nothing
build = project.get_command_obj("build_py")
build.ensure_finalized()
print(*(file for _, _, file in build.find_all_modules()), sep="\\n")
print(*(f"{source}/{name}" for _, source, _, names in build.data_files for name in names), sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) == packaged(tracked_files(ROOT))
