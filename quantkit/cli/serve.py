"""quantkit serve"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from quantkit.extras import require
from quantkit.runtime.server.models.model_list import load_model_settings
from quantkit.runtime.server.settings import FLAGS, ServerSettings

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each setting. None means that it was not given, so that the configuration file counts."""
    for name in reversed(FLAGS):
        command = _option(name, ServerSettings.model_fields[name])(command)
    return command


def _option(name: str, field: FieldInfo) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag, kind, help_text = f"--{name.replace('_', '-')}", _kind(field.annotation), _help(field)
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=help_text)
    if get_origin(kind) is list:
        return click.option(flag, name, multiple=True, metavar="TEXT", help=f"{help_text} May be given several times.")
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if isinstance(choices[0], int):
            return click.option(flag, name, type=int, metavar="|".join(map(str, choices)), help=help_text)
        return click.option(flag, name, type=click.Choice(choices), help=help_text)
    metavar = "FILE" if name.endswith("file") else _METAVARS[kind]
    return click.option(flag, name, type=kind, metavar=metavar, help=help_text)


def _kind(annotation: Any) -> Any:
    """`int` of `int | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation


def _help(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    text = field.description or ""
    if default is None or default == []:
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text}  [default: {shown}]"


@click.command("serve", short_help="Serve models over HTTP, as OpenAI's API.")
@click.argument("models", nargs=-1, metavar="MODEL | NAME=MODEL...")
@click.option("--config", metavar="FILE", help="YAML file with a key for each flag, such as `max_queue: 64`.")
@_settings_options
def command(models: tuple[str, ...], config: str | None, **flags: Any) -> None:
    """Serve MODEL, or several models with a name each, over HTTP with OpenAI's API, until SIGTERM or Ctrl-C.

    \b
    quantkit serve demo
    quantkit serve org/model --host 0.0.0.0 --api-keys-file keys.txt
    quantkit serve model-w4 --served-model-name small --kv-dtype fp8 --max-context 8192
    quantkit serve small=model-w4 large=org/model --cache-split small=30,large=70
    quantkit serve --config server.yaml

    In the file, virtual_models are names that stand for several models: each request gets the cheapest that can answer,
    or asks for the next one (escalate).

    Flags win over the file, QUANTKIT_API_KEYS (keys, separated by commas) over its api_keys_file. The page at / shows
    what the server does; /metrics is for Prometheus. See docs/reference/serving.md.
    """
    given = {name: list(value) or None if isinstance(value, tuple) else value for name, value in flags.items()}
    served = load_model_settings(models, given, config)
    if served[0].otlp_endpoint is not None:
        require("--otlp-endpoint", "traces")
    require("quantkit serve", "serve", "fastapi", "starlette", "uvicorn", "prometheus_client")
    from quantkit.runtime.server.serve import run

    code = run(served)
    if code:
        raise SystemExit(code)
