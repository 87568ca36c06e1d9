"""Reading recipe files: YAML, changes from the command line, and every check that needs no model.

All errors are one line that names the file or the change at fault, the key as a dotted path, and what is allowed.
`__init__.py` says what the checked contents mean.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, create_model

from quantkit.errors import InputError, did_you_mean
from quantkit.formats import FORMATS, build, options_of
from quantkit.methods import METHODS

KeyPath = tuple[str | int, ...]  # of a key, from the outermost in
Model = TypeVar("Model", bound=BaseModel)

_CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)
_OPEN = ConfigDict(extra="allow", frozen=True, strict=True)  # the extra keys are options, checked against the format
_MUST_BE = {  # by pydantic's kind of error
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "a whole number",
    "invalid_key": "text",
    "model_type": "a mapping of keys to values",
    "string_pattern_mismatch": "one line of text",
    "string_type": "text",
    "tuple_type": "a list",
}


class FormatChoice(BaseModel):
    """A format and the options that the recipe gives it; the others take the format's own defaults."""

    model_config = _OPEN
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Override(BaseModel):
    """What some modules do differently: other options of the same format, or nothing at all (`keep`)."""

    model_config = _OPEN
    modules: str
    keep: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Contents(BaseModel):
    """The keys of a recipe file."""

    model_config = _CLOSED
    summary: Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[^\n]+$")]
    method: str
    format: FormatChoice
    keep: tuple[str, ...] = Field(default=(), strict=False)  # not strict in one point: YAML knows lists, not tuples
    overrides: tuple[Override, ...] = Field(default=(), strict=False)


@dataclass(frozen=True)
class Source:
    """Where the contents come from, so that an error blames the right place."""

    file: str
    changes: tuple[str, ...] = ()

    def error(self, path: str, text: str) -> InputError:
        for change in self.changes:
            key = _key_of(change)
            if path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."):
                return InputError(f"{self.file} with {change}: {text}")
        return InputError(f"{self.file}: {text}")


def read_recipe(file: Path, changes: Sequence[str]) -> Contents:
    """The checked contents of a recipe file with `KEY=VALUE` changes applied."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
    contents = _parse(text, str(file))
    if not isinstance(contents, dict):
        raise InputError(f"{file}: a recipe is a mapping of keys to values, but this is {_short(contents)}")
    for change in changes:
        contents = _changed(contents, change)
    return _checked(contents, Source(str(file), tuple(changes)))


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, made strict: by itself it silently takes the last of two equal keys."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


def _parse(text: str, where: str) -> Any:
    """YAML as plain values. Beside its own errors, PyYAML lets those of numbers and dates through."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{where}: {line}not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


def _key_of(change: str) -> str:
    return change.partition("=")[0].strip()


def _changed(contents: dict[str, Any], change: str) -> dict[str, Any]:
    """The contents with one `KEY=VALUE` applied; the value is YAML."""
    names = _key_of(change).split(".")
    if "=" not in change or not all(names):
        raise InputError(f"change '{change}' is not of the form KEY=VALUE, such as format.bits=3")
    return _replaced(contents, names, _parse(change.partition("=")[2], f"change '{change}'"), change)


def _replaced(holder: dict[str, Any], names: list[str], value: Any, change: str) -> dict[str, Any]:
    first, *rest = names
    if rest:
        inner = holder.get(first, {})
        if not isinstance(inner, dict):
            raise InputError(f"change '{change}': '{first}' has no keys inside; give it whole, as in {first}=VALUE")
        value = _replaced(inner, rest, value, change)
    return {**holder, first: value}


def _checked(contents: dict[str, Any], source: Source) -> Contents:
    recipe = _validated(Contents, contents, (), Contents.model_fields, source)
    _check_name("method", recipe.method, METHODS, source)
    _check_name("format.name", recipe.format.name, FORMATS, source)
    name, options = recipe.format.name, recipe.format.options
    _check_options(name, options, {}, ("format",), ("name",), source)
    for index, override in enumerate(recipe.overrides):
        path = f"overrides.{index}"
        _check_pattern(f"{path}.modules", override.modules, source)
        _check_options(name, override.options, options, ("overrides", index), ("modules", "keep"), source)
        if override.keep == bool(override.options):
            raise source.error(path, f"'{path}' must have either keep: true or options of the format, such as bits: 8")
    for index, pattern in enumerate(recipe.keep):
        _check_pattern(f"keep.{index}", pattern, source)
    return recipe


def _check_name(path: str, given: str, known: Iterable[str], source: Source) -> None:
    if given not in known:
        raise source.error(path, f"'{path}' is '{given}', which is not known; {did_you_mean(given, known)}")


def _check_pattern(path: str, pattern: str, source: Source) -> None:
    if not pattern.removeprefix("re:").strip():
        raise source.error(path, f"'{path}' is empty; give a pattern such as '*.mlp.down_proj'")
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise source.error(
            path, f"'{path}' is {pattern!r}, which is not a valid regular expression: {error}"
        ) from error


def _check_options(
    name: str, options: dict[str, Any], base: dict[str, Any], path: KeyPath, siblings: tuple[str, ...], source: Source
) -> None:
    """Types first, by the annotations of the format; then the values, by building it."""
    hints = get_type_hints(FORMATS[name])
    fields: dict[str, Any] = {option: (hints[option], None) for option in options_of(name)}
    _validated(create_model(name, __config__=_CLOSED, **fields), options, path, (*siblings, *fields), source)
    where = _dotted(path)
    try:
        build(name, base | options, "bfloat16")  # any dtype will do: the model's own is not known yet
    except InputError as error:
        option, _, rule = str(error).removeprefix(f"{name}: ").partition(" ")
        if option in fields:
            raise source.error(f"{where}.{option}", f"'{where}.{option}' {rule}") from error
        raise source.error(where, f"'{where}': {error}") from error


def _validated(model: type[Model], value: object, path: KeyPath, known: Iterable[str], source: Source) -> Model:
    """The value as a model, or its first error in our words; unknown keys first, they explain missing ones."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        error = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key = _dotted(path + error["loc"])
    if error["type"] == "extra_forbidden":
        owner = f" for format '{model.__name__}'" if path else ""
        raise source.error(key, f"unknown key '{key}'{owner}; {did_you_mean(str(error['loc'][-1]), known)}")
    if error["type"] == "missing":
        raise source.error(key, _missing(key, error["input"]))
    wanted = _MUST_BE.get(error["type"], error["msg"])
    raise source.error(key, f"'{key}' is {_short(error['input'])}, but must be {wanted}")


def _missing(key: str, given: dict[str, Any]) -> str:
    """A key that is not there may be there with a typo, where extra keys are allowed."""
    holder, _, name = key.rpartition(".")
    near = difflib.get_close_matches(name, map(str, given), n=1)
    if near:
        return f"unknown key '{holder}.{near[0]}'; did you mean '{name}'?"
    return f"key '{key}' is missing"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _short(value: object) -> str:
    return "empty" if value is None else reprlib.repr(value)
