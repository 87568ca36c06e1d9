"""Methods by their names in recipes: those of this folder, and those that other packages register.

A package registers one in its pyproject.toml, and nothing of it is imported until a recipe asks for the name:

    [project.entry-points."quantkit.methods"]
    mine = "my_package.my_method:MyMethod"

A script or a notebook adds one for its own process with `register`.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeGuard, TypeVar

from quantkit.errors import InputError, did_you_mean
from quantkit.methods.method import Method

GROUP = "quantkit.methods"  # of entry points, and the name of this package
OWN_PACKAGE = "quantkit"
M = TypeVar("M", bound=Method)


def _is_method(value: object) -> TypeGuard[type[Method]]:
    return inspect.isclass(value) and issubclass(value, Method) and not inspect.isabstract(value)


def methods_in(folders: Iterable[str], package: str) -> dict[str, type[Method]]:
    """The methods in the files of a package, by name: one is added by adding its file."""
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(folders, f"{package}."):
        module = import_module(info.name)
        for value in vars(module).values():
            if _is_method(value) and value.__module__ == info.name:
                assert value.name not in found, f"two methods are called '{value.name}'"
                found[value.name] = value
    return found


METHODS = methods_in([str(Path(__file__).parent)], GROUP)  # quantkit's own, by name
_ADDED: dict[str, type[Method]] = {}  # by `register`


def register(method: type[M]) -> type[M]:
    """Makes a method known to the recipes of this process; a decorator. A cell that is run again replaces its own."""
    if not _is_method(method) or not hasattr(method, "name"):
        raise InputError(
            f"{method!r} is no method: it must be a subclass of quantkit.methods.Method with name and round"
        )
    before = _ADDED.get(method.name)
    taken = method_names() if before is None else []
    if method.name in taken or (before is not None and _place(before) != _place(method)):
        raise InputError(f"method '{method.name}' is known already; choose another name")
    _ADDED[method.name] = method
    return method


def _place(method: type[Method]) -> tuple[str, str]:
    return method.__module__, method.__qualname__


def method_names() -> list[str]:
    """What a recipe may ask for."""
    return sorted({*METHODS, *_ADDED, *(each.name for each in _registered())})


def find_method(name: str) -> type[Method]:
    """A method by its name. Refuses unknown names, names that are taken twice, and packages that cannot be loaded."""
    own, others = METHODS.get(name) or _ADDED.get(name), [each for each in _registered() if each.name == name]
    if own is None and not others:
        raise InputError(f"unknown method '{name}'; {did_you_mean(name, method_names())}")
    if len(others) + (own is not None) > 1:
        owners = [OWN_PACKAGE] * (own is not None) + [_package(each) for each in others]
        raise InputError(
            f"method '{name}' is registered more than once, by {' and '.join(owners)}; "
            f"uninstall one, or have it registered under another name"
        )
    return own or _loaded(others[0])


def package_of(name: str) -> str:
    """The package that a method comes from, whose version decides its results too."""
    return next((_package(each) for each in _registered() if each.name == name), OWN_PACKAGE)


def _registered() -> tuple[EntryPoint, ...]:
    return _registered_on(tuple(sys.path))


@lru_cache(maxsize=1)
def _registered_on(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looking through all installed packages takes 30 ms, and there are dozens of recipes to list."""
    return tuple(entry_points(group=GROUP))


def _loaded(entry: EntryPoint) -> type[Method]:
    where = f"method '{entry.name}' of package '{_package(entry)}'"
    try:
        found = entry.load()
    except Exception as error:  # whatever another package raises while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{where} cannot be loaded from {entry.value}: {reason}; update or uninstall it") from error
    if not _is_method(found):
        raise InputError(f"{where} is not usable: {entry.value} is no subclass of quantkit.methods.Method with `round`")
    if getattr(found, "name", None) != entry.name:
        raise InputError(f"{where} is not usable: {entry.value} must have `name` = '{entry.name}'")
    return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module
