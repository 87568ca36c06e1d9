"""Reading recipe files: every check that needs no model. `parse.py` turns text into the plain values checked here.

All errors are one line that names the file or the change at fault, the key as a dotted path, and what is allowed.
`__init__.py` says what the checked contents mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, create_model

from quantkit.errors import InputError, did_you_mean
from quantkit.formats import RECIPE_FORMATS, build
from quantkit.methods import Method, find_method, method_names
from quantkit.recipe.limits import check_kv_scales, check_target_bits
from quantkit.recipe.parse import changed, key_of, parse

KeyPath = tuple[str | int, ...]  # of a key, from the outermost in
Model = TypeVar("Model", bound=BaseModel)

_CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)
_OPEN = ConfigDict(extra="allow", frozen=True, strict=True)  # the extra keys are options, checked by `_check_options`
_MUST_BE = {  # by pydantic's kind of error
    "bool_type": "true or false",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "invalid_key": "text",
    "model_type": "a mapping of keys to values",
    "string_pattern_mismatch": "one line of text",
    "string_too_short": "text",
    "string_type": "text",
    "tuple_type": "a list",
    "value_error": "text, or a mapping from texts to their shares, which are numbers above 0",  # `_source`
}
_MUST_BE_AT = {"method": "a name such as gptq, or a mapping such as {name: gptq, damping: 0.05}"}  # by key
_NAME_BEFORE = re.compile(r"^[\w-]+: ")  # formats start their errors with their name


class _Choice(BaseModel):
    """A mapping with a few keys of its own; all the others are options."""

    model_config = _OPEN

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class MethodChoice(_Choice):
    """A method and the options that the recipe gives it; the others take the method's own defaults."""

    name: str

    def build(self) -> Method:
        return find_method(self.name)(**self.options)


class FormatChoice(_Choice):
    """A format and the options that the recipe gives it; the others take the format's own defaults."""

    name: str


class Override(_Choice):
    """What some modules do differently: other options of the same format, or nothing at all (`keep`)."""

    modules: str
    keep: bool = False


def _source(value: Any) -> Any:
    """One source, or a mix of several."""
    if isinstance(value, dict) and value and all(name and isinstance(name, str) for name in value):
        numbers = [share for share in value.values() if type(share) in (int, float)]
        if len(numbers) == len(value) and all(0 < share < math.inf for share in numbers):
            return value
    elif value is None or (isinstance(value, str) and value):  # null is refused by _check_filled, in its own words
        return value
    raise ValueError  # in the words of _MUST_BE


class CalibrationChoice(BaseModel):
    """What a recipe says about calibration data; None where it is silent and the defaults hold."""

    model_config = _CLOSED
    source: Annotated[str | dict[str, float] | None, BeforeValidator(_source)] = None
    samples: Annotated[int | None, Field(ge=1)] = None
    seq_len: Annotated[int | None, Field(ge=2)] = None
    seed: Annotated[int | None, Field(ge=0)] = None


class Contents(BaseModel):
    """The keys of a recipe file, in the order in which they are shown."""

    model_config = _CLOSED
    summary: Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[^\n]+$")]
    method: MethodChoice
    format: FormatChoice
    target_bits: float | None = None  # of a weight on average, scales and all; the bits of each layer follow
    touch_up: Annotated[int, Field(ge=0)] = 0  # steps that scales and norms learn at the end
    kv_scales: str | None = None  # how many scales an FP8 cache gets: one of STRATEGIES
    calibration: CalibrationChoice = CalibrationChoice()
    keep: tuple[str, ...] = Field(default=(), strict=False)  # not strict in one point: YAML knows lists, not tuples
    overrides: tuple[Override, ...] = Field(default=(), strict=False)


@dataclass(frozen=True)
class Source:
    """Where the contents come from, so that an error blames the right place."""

    file: str
    changes: tuple[str, ...] = ()

    def error(self, path: str, text: str) -> InputError:
        for change in self.changes:
            key = key_of(change)
            if path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."):
                return InputError(f"{self.file} with {change}: {text}")
        return InputError(f"{self.file}: {text}")


def read_recipe(file: Path, changes: Sequence[str]) -> Contents:
    """The checked contents of a recipe file with `KEY=VALUE` changes applied."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
    contents = parse(text, str(file))
    if not isinstance(contents, dict):
        raise InputError(f"{file}: a recipe is a mapping of keys to values, but this is {_short(contents)}")
    contents = _in_long_form(contents)
    for change in changes:
        contents = _in_long_form(changed(contents, change))
    return _checked(contents, Source(str(file), tuple(changes)))


def _in_long_form(contents: dict[str, Any]) -> dict[str, Any]:
    """`method: gptq` as `method: {name: gptq}`, so that a change may add an option to it."""
    method = contents.get("method")
    return contents | {"method": {"name": method}} if isinstance(method, str) else contents


def _checked(contents: dict[str, Any], source: Source) -> Contents:
    recipe = _validated(Contents, contents, (), Contents.model_fields, source)
    optional: dict[str, Any] = {
        key: contents[key] for key in ("target_bits", "touch_up", "kv_scales", "calibration") if key in contents
    }
    _check_filled(optional, (), source)
    _check_method(recipe.method, source)
    _check_name("format.name", recipe.format.name, RECIPE_FORMATS, source)
    _check_format_options(recipe.format, {}, recipe.format.name, ("format",), source)
    for index, override in enumerate(recipe.overrides):
        path = f"overrides.{index}"
        _check_pattern(f"{path}.modules", override.modules, source)
        _check_format_options(override, recipe.format.options, recipe.format.name, ("overrides", index), source)
        if override.keep == bool(override.options):
            raise source.error(path, f"'{path}' must have either keep: true or options of the format, such as bits: 8")
    for index, pattern in enumerate(recipe.keep):
        _check_pattern(f"keep.{index}", pattern, source)
    check_target_bits(recipe, source)
    check_kv_scales(recipe, source)
    return recipe


def _check_filled(contents: dict[str, Any], path: KeyPath, source: Source) -> None:
    """Optional keys may be left out, but not be empty: YAML reads a forgotten value as null."""
    for name, value in contents.items():
        key = _dotted((*path, name))
        if value is None:
            raise source.error(key, f"'{key}' is empty; give it a value or leave it out")
        if isinstance(value, dict):
            _check_filled(value, (*path, name), source)


def _check_name(path: str, given: str, known: Iterable[str], source: Source) -> None:
    if given not in known:
        raise source.error(path, f"'{path}' is '{given}', which is not known; {did_you_mean(given, known)}")


def _check_method(choice: MethodChoice, source: Source) -> None:
    _check_name("method", choice.name, method_names(), source)
    try:
        kind = find_method(choice.name)
    except InputError as error:
        raise source.error("method", str(error)) from error
    _check_options(choice, kind, f"method '{choice.name}'", ("method",), choice.build, source)


def _check_pattern(path: str, pattern: str, source: Source) -> None:
    if not pattern.removeprefix("re:").strip():
        raise source.error(path, f"'{path}' is empty; give a pattern such as '*.mlp.down_proj'")
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise source.error(
            path, f"'{path}' is {pattern!r}, which is not a valid regular expression: {error}"
        ) from error


def _check_format_options(choice: _Choice, base: dict[str, Any], name: str, path: KeyPath, source: Source) -> None:
    def build_it() -> object:
        return build(name, base | choice.options, "bfloat16")  # any dtype will do: the model's own is not known yet

    _check_options(choice, RECIPE_FORMATS[name], f"format '{name}'", path, build_it, source)


def _check_options(
    choice: _Choice, kind: type[Any], owner: str, path: KeyPath, build_it: Callable[[], object], source: Source
) -> None:
    """Types first, by the annotations of the dataclass that the options are for; then the values, by building it."""
    model = _options_of(kind)  # type: ignore[arg-type]  # a class is hashable
    _validated(model, choice.options, path, (*type(choice).model_fields, *model.model_fields), source, owner)
    where = _dotted(path)
    try:
        build_it()
    except InputError as error:
        option, _, rule = _NAME_BEFORE.sub("", str(error)).partition(" ")
        if option in model.model_fields:
            raise source.error(f"{where}.{option}", f"'{where}.{option}' {rule}") from error
        raise source.error(where, f"'{where}': {error}") from error


@cache
def _options_of(kind: type[Any]) -> type[BaseModel]:
    """The fields of a dataclass, with their types."""
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if _is_required(field) else None) for field in dataclasses.fields(kind)
    }
    return create_model(kind.__name__, __config__=_CLOSED, **fields)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _validated(
    model: type[Model], value: object, path: KeyPath, known: Iterable[str], source: Source, owner: str = ""
) -> Model:
    """The value as a model, or its first error in our words; unknown keys first, they explain missing ones."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        error = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key = _dotted(path + error["loc"])
    if error["type"] == "extra_forbidden":
        inside = len(error["loc"]) > 1  # of the one closed mapping that stands in another
        hint = did_you_mean(str(error["loc"][-1]), CalibrationChoice.model_fields if inside else known)
        raise source.error(key, f"unknown key '{key}'{owner and f' for {owner}'}; {hint}")
    if error["type"] == "missing":
        raise source.error(key, _missing(key, error["input"]))
    by_type = _MUST_BE.get(error["type"])
    wanted = by_type.format(**error.get("ctx", {})) if by_type else error["msg"]
    raise source.error(key, f"'{key}' is {_short(error['input'])}, but must be {_MUST_BE_AT.get(key, wanted)}")


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
    return "empty" if value in (None, "") else reprlib.repr(value)
