"""Which tasks there are: the local set, a folder of the user's, and all that lm-eval brings."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

from quantkit.errors import InputError

LOCAL_TASKS = Path(__file__).parent / "local"
_NEAR = 3


class Catalog(TaskManager):  # type: ignore[misc]
    """lm-eval's own, with one clear line where a task's data or code are not here.

    It keeps what it loaded last: tasks are loaded before the model, and lm-eval asks for them again.
    """

    _kept: tuple[Any, Any] | None = None

    def load(self, task_list: Any) -> Any:
        if self._kept is not None and self._kept[0] == task_list:
            return self._kept[1]
        try:
            loaded = super().load(task_list)
        except Exception as error:  # any of datasets' and lm-eval's own; a task's code may raise what it likes
            raise InputError(_why_not(task_list, error)) from error
        unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
        if unsafe:
            raise InputError(f"task '{unsafe[0]}' runs code that the model writes, which quantkit does not do; drop it")
        self._kept = (task_list, loaded)
        return loaded


def find_tasks(tasks: str | Sequence[str], task_path: Path | None) -> tuple[list[str], Catalog]:
    """The names of tasks, given as `arc_easy,hellaswag` or as a list, and the catalog that has them all.

    A name may be a pattern such as `arc_*`. lm-eval's own thousands are looked through only where they are needed.
    """
    given = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    wanted = [name.strip() for name in given if name.strip()]
    if not wanted:
        raise InputError("no task is named; give one or more, such as 'local' or 'arc_easy,hellaswag'")
    if task_path is not None and not task_path.is_dir():
        raise InputError(f"no folder '{task_path}'; the task path is a folder with YAML tasks")
    folders = [str(LOCAL_TASKS), *([str(task_path)] if task_path else [])]
    catalog = Catalog(include_path=folders, include_defaults=False)
    if not all(catalog.match_tasks([name]) for name in wanted):
        catalog = Catalog(include_path=folders)
    names = []
    for name in wanted:
        found = catalog.match_tasks([name])
        if not found:
            raise InputError(unknown_task(name, catalog.all_tasks))
        names += [task for task in found if task not in names]
    return names, catalog


def unknown_task(name: str, known: Sequence[str]) -> str:
    """What to say about a name that is not there."""
    near = difflib.get_close_matches(name, known, n=_NEAR, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(one) for one in near)}? " if near else ""
    return (
        f"no task '{name}' among lm-eval's {len(known):,} tasks and groups; {hint}"
        "'lm-eval ls tasks' lists them, 'local' is the set that needs no network"
    )


def _why_not(tasks: Any, error: Exception) -> str:
    names = ", ".join(str(task) for task in (tasks if isinstance(tasks, list) else [tasks]))
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ConnectionError):
        return (
            f"the data of '{names}' are not on this machine and cannot be fetched: {reason}; "
            "use the task set 'local', which needs no network, or YAML tasks of your own with --task-path"
        )
    return f"'{names}' cannot be loaded: {reason}; mend the task or its data, or use the task set 'local'"
