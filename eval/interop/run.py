"""`python -m quantkit.eval.interop run`: every checkpoint of a folder through one engine, each answer kept at once."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quantkit.checkpoint import Checkpoint
from quantkit.devices import resolve_device
from quantkit.engines import layout_of
from quantkit.errors import InputError, StorageError
from quantkit.eval.interop import rows
from quantkit.eval.interop.adapters import Adapter, find_adapter, version_of
from quantkit.eval.interop.attempt import Setting, attempt_all
from quantkit.eval.interop.checkpoints import AS_IT_IS, Tried, chosen, make
from quantkit.eval.interop.compare import Seen, missing_packages, package_versions
from quantkit.inspection import layers_of
from quantkit.wording import model_name

WINDOWS, WINDOW = 4, 256
LIMIT = 300.0  # seconds
Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same for every engine."""
    parser.add_argument("folder", type=Path, help="with the checkpoints, as `make` leaves them")
    parser.add_argument("--make", metavar="MODEL", help="first make what is missing, from this model")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these checkpoints; default: all")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that one checkpoint may take")
    parser.add_argument("--again", action="store_true", help="also what this machine has rows of")
    parser.add_argument("--output", type=Path, default=rows.FILE, metavar="FILE", help="CSV to append to")


def run(engine: str, given: argparse.Namespace, command: Sequence[str], say: Say = print) -> list[dict[str, str]]:
    """Appends a row for every checkpoint that this machine has no row of yet; gives the rows of this engine."""
    device = resolve_device(given.device)
    wanted = chosen([name for name in given.only.split(",") if name])
    if given.make:
        make(given.make, given.folder, wanted, device, say)
    adapter = find_adapter(engine, device)
    if not version_of(adapter.distribution):
        raise InputError(f"{adapter.engine} is not installed here; docs/reference/interop.md says how")
    setting = Setting(engine, device, given.windows, given.window, given.limit)
    model = model_name(_folder(given.folder, AS_IT_IS).resolve())
    layouts = {tried.name: layout_of(layers_of(Checkpoint(_folder(given.folder, tried.name)))) for tried in wanted}
    known = {
        "engine": adapter.engine,
        "version": version_of(adapter.distribution),
        "model": model,
        "windows": f"{given.windows} x {given.window}",
    }
    done = set() if given.again else _done(rows.read(given.output), known)
    left = [tried for tried in wanted if (tried.name, layouts[tried.name]) not in done]
    folders = [given.folder / tried.name for tried in _runnable(adapter, given.folder, left, say)]
    for folder, seen in attempt_all(setting, folders, given.folder / f"{engine}.log"):
        about = known | {"checkpoint": folder.name, "layout": layouts[folder.name], "command": shlex.join(command)}
        about |= {"packages": package_versions(adapter, Checkpoint(folder))}
        rows.append(given.output, rows.row_of(seen, **about))
        say(f"{folder.name}: {describe(seen)}")
    return [row for row in rows.newest(rows.read(given.output), model).values() if row["engine"] == adapter.engine]


def describe(seen: Seen) -> str:
    if not seen.loads:
        return seen.reason if seen.loads is None else f"does not load: {seen.reason}"
    return (
        f"perplexity {seen.perplexity_there} there, {seen.perplexity_here} here, log-probabilities differ by "
        f"{seen.difference} ({seen.dtype_there})"
    )


def _folder(folder: Path, name: str) -> Path:
    if not (folder / name).is_dir():
        raise StorageError(f"{folder} has no '{name}'; make it first, or give --make MODEL")
    return folder / name


def _done(known_rows: list[dict[str, str]], known: dict[str, str]) -> set[tuple[str, str]]:
    """(checkpoint, layout) that this version of the engine was given on this machine."""
    wanted = known | {"machine": rows.machine()}
    same = [row for row in known_rows if all(row[name] == value for name, value in wanted.items())]
    return {(row["checkpoint"], row["layout"]) for row in same}


def _runnable(adapter: Adapter, folder: Path, wanted: Iterable[Tried], say: Say) -> list[Tried]:
    found = []
    for tried in wanted:
        missing = missing_packages(adapter, Checkpoint(folder / tried.name))
        if missing:
            say(f"{tried.name}: not run, {adapter.engine} needs {' and '.join(missing)} for it")
        else:
            found.append(tried)
    return found
