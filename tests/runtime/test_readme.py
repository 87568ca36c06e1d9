"""The two walks of runtime/README.md name files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:\.\./)?[\w/]+\.py)`")


def test_every_named_file_exists() -> None:
    text = (ROOT / "runtime" / "README.md").read_text(encoding="utf-8")
    files = [file for file in NAMED.findall(text) if file != "__init__.py"]
    assert len(files) > 25
    assert [file for file in files if not (ROOT / "runtime" / file).is_file() and not (ROOT / file).is_file()] == []


def test_every_room_is_listed() -> None:
    text = (ROOT / "runtime" / "README.md").read_text(encoding="utf-8")
    rooms = {folder.name for folder in (ROOT / "runtime").iterdir() if folder.is_dir() and any(folder.glob("*.py"))}
    assert rooms == set(re.findall(r"^    (\w+)/ ", text, re.MULTILINE))


def test_both_walks_have_eight_steps() -> None:
    text = (ROOT / "runtime" / "README.md").read_text(encoding="utf-8")
    for walk in text.split("## ")[1:]:
        assert re.findall(r"^(\d)\. \*\*", walk, re.MULTILINE) == list("12345678"), walk.splitlines()[0]
