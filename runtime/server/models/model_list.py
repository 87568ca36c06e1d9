"""Which models a server has: one, or several with a name each.

    quantkit serve MODEL                one; its name is its folder's, its hub name, or --served-model-name
    quantkit serve a=MODEL b=MODEL      several

    models:                             the same in the file of --config, where each may have settings of its own
      a: MODEL
      b: {model: MODEL, kv_dtype: fp8}
    virtual_models:                     names that stand for some of them
      c: {policy: cheapest, members: [a, b]}

Every model gets a `ServerSettings`; what concerns the server itself is the same in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.server.config_file import read_config
from quantkit.runtime.server.settings import ENGINE_OPTIONS, FLAGS, ServerSettings, merge_settings, parse_parts
from quantkit.runtime.server.virtual_models import EXAMPLE, read_virtual_model

# What a model may have for itself. The share of a device's memory is that of all its models together.
PER_MODEL = (*(name for name in ENGINE_OPTIONS if name != "memory_share"), "tool_parser", "shadow", "shadow_rate")
_NAME = re.compile(r"[\w.:@-]+(/[\w.:@-]+)*")
_Entry = dict[str, Any]


def load_model_settings(
    arguments: Sequence[str],
    flags: Mapping[str, Any],
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[ServerSettings, ...]:
    """The settings of each model, from the arguments of `quantkit serve`, its flags (None: not given) and its file."""
    from_file = read_config(config) if config is not None else {}
    virtual = from_file.pop("virtual_models", None)
    found = _checked(_load(arguments, flags, from_file, config, environment))
    return found if virtual is None else _with_virtual_models(found, virtual, config)


def _load(
    arguments: Sequence[str],
    flags: Mapping[str, Any],
    from_file: _Entry,
    config: str | Path | None,
    environment: Mapping[str, str] | None,
) -> tuple[ServerSettings, ...]:
    listed = from_file.pop("models", None)
    entries = _entries(listed, config)
    if listed is not None and "model" in from_file:
        raise InputError(f"{config}: 'model' and 'models' exclude each other; write all of them under 'models'")
    named = _named(arguments)
    if arguments and not named:
        return (merge_settings({"model": arguments[0], **flags}, from_file, config, environment),)
    if named:
        from_file.pop("model", None)
        entries = {name: entries.get(name, {}) | {"model": model} for name, model in named.items()}
    if not entries:
        return (merge_settings(flags, from_file, config, environment),)
    return _each(entries, flags, from_file, config, environment)


def _each(
    entries: Mapping[str, _Entry],
    flags: Mapping[str, Any],
    from_file: _Entry,
    config: str | Path | None,
    environment: Mapping[str, str] | None,
) -> tuple[ServerSettings, ...]:
    if flags.get("served_model_name") or "served_model_name" in from_file:
        raise InputError("a model written as NAME=MODEL, or under 'models', has its name; leave served_model_name out")
    if len(entries) > 1 and (flags.get("shadow") or "shadow" in from_file):
        raise InputError("shadow compares one model; with several, write it under the model, in 'models' of the file")
    merge_settings(flags, from_file | {"model": "any"}, config, environment)  # what is wrong here is wrong for all
    found = []
    for name, entry in entries.items():
        if "model" not in entry:
            raise InputError(f"{config}: models: '{name}' has no 'model'; say which one it is, as `{name}: demo`")
        own = from_file | entry | {"served_model_name": [name]}
        found.append(merge_settings(flags, own, f"{config}: models: {name}", environment))
    return tuple(found)


def _with_virtual_models(
    found: tuple[ServerSettings, ...], listed: Any, config: str | Path | None
) -> tuple[ServerSettings, ...]:
    """The same in all of them: they are names of the server."""
    where, names = f"{config}: virtual_models", [settings.names[0] for settings in found]
    if len(found) == 1:
        raise InputError(f"{where} choose among several models, and there is one; leave them out")
    if not isinstance(listed, dict) or not listed:
        raise InputError(f"{where} must hold a name with policy and members for each, such as {EXAMPLE}")
    virtual = []
    for name, entry in listed.items():
        _check_name(str(name), f"{where}: '{name}'")
        if str(name) in names:
            raise InputError(f"{where}: '{name}' is the name of a model; choose another one")
        virtual.append(read_virtual_model(str(name), entry, names, f"{where}: {name}"))
    return tuple(settings.model_copy(update={"virtual_models": tuple(virtual)}) for settings in found)


def _checked(found: tuple[ServerSettings, ...]) -> tuple[ServerSettings, ...]:
    several = len(found) > 1
    if several and found[0].tgi_routes:
        raise InputError("tgi_routes have no field that names a model, and there are several; leave them out")
    split = found[0].cache_split
    if split is None:
        return found
    names = [settings.names[0] for settings in found]
    if not several:
        raise InputError("cache_split divides memory among several models, and there is one; leave it out")
    if set(parse_parts(split)) != set(names):
        raise InputError(f"cache_split is '{split}', but must name each model once: {', '.join(names)}")
    return found


def _named(arguments: Sequence[str]) -> dict[str, str]:
    """Name and model of each argument; nothing for a single model without a name."""
    if len(arguments) == 1 and ("=" not in arguments[0] or Path(arguments[0]).is_dir()):
        return {}
    found: dict[str, str] = {}
    for argument in arguments:
        name, equals, model = argument.partition("=")
        if not equals:
            raise InputError(f"'{argument}' has no name; write each of several models as NAME=MODEL, such as a=demo")
        _check_name(name, f"'{argument}'")
        if not model:
            raise InputError(f"'{argument}' has no model after the =; write NAME=MODEL, such as {name}=demo")
        if name in found:
            raise InputError(f"the name '{name}' is given twice, to '{found[name]}' and '{model}'; each needs its own")
        found[name] = model
    return found


def _entries(listed: Any, config: str | Path | None) -> dict[str, _Entry]:
    """What stands under `models`, checked as far as keys go."""
    if listed is None:
        return {}
    if not isinstance(listed, dict) or not listed:
        raise InputError(f"{config}: 'models' must hold `name: model` lines, such as `small: demo`")
    found: dict[str, _Entry] = {}
    for name, entry in listed.items():
        _check_name(str(name), f"{config}: models: '{name}'")
        if not isinstance(entry, str | dict):
            raise InputError(f"{config}: models: '{name}' must be a model, or keys such as `model: demo`")
        keys = {"model": entry} if isinstance(entry, str) else entry
        found[str(name)] = {str(key).replace("-", "_"): value for key, value in keys.items()}
        for key in found[str(name)]:
            if key in FLAGS and key not in PER_MODEL:
                raise InputError(f"{config}: models: {name}: '{key}' is for the whole server; write it beside 'models'")
            if key not in ("model", *PER_MODEL):
                known = did_you_mean(key, ("model", *PER_MODEL))
                raise InputError(f"{config}: models: {name}: unknown key '{key}'; {known}")
    return found


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(f"{where}: a name of a model must be letters, digits, '.', '_', '-', ':', '@' or '/'")
