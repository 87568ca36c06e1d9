"""Structured logs: one JSON object a line on stderr, one line a request.

What handlers say about a request (`note`) becomes fields of its line. A line never holds an API key (only its name),
and holds a prompt only where the operator asked for it.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from starlette.types import Scope

LOGGER = "quantkit.server"
_QUIET = ("uvicorn.access", "httpx", "asyncio")  # a line of our own stands for each request
_FIELDS = "fields"  # attribute of a log record that carries the values of its line
_ACCEPTED, _ASKED = "accepted", "asked"


def log_event(message: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Writes a line with these fields; those that are None stay away."""
    known = {name: _short(value) for name, value in fields.items() if value is not None}
    logging.getLogger(LOGGER).log(level, message, extra={_FIELDS: known})


def setup_logging(level: str, stream: TextIO | None = None) -> None:
    """Everything that this process logs becomes JSON lines; uvicorn and libraries included."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))  # the start and end are ours to tell


@dataclass(frozen=True)
class Noted:
    """What handlers have said about a request."""

    accepted: bool  # the engine had it: however it ended, it was not refused
    model: str | None  # the name that it asked for
    fields: dict[str, Any]  # of its line


def note(scope: Scope, **fields: Any) -> None:
    """Adds fields to the line of a request."""
    scope.setdefault("state", {}).setdefault("log", {}).update(fields)


def note_accepted(scope: Scope) -> None:
    """The engine has it: however it ends, it was not refused."""
    note(scope, **{_ACCEPTED: True})


def note_model(scope: Scope, name: str) -> None:
    """Which model it asks for: whose number it is when it is refused later."""
    note(scope, **{_ASKED: name})


def noted(scope: Scope) -> Noted:
    fields = dict(scope.get("state", {}).get("log", {}))
    return Noted(fields.pop(_ACCEPTED, False), fields.pop(_ASKED, None), fields)


class JsonFormatter(logging.Formatter):
    """A record as one line. JSON escapes new lines, so that no field can forge another line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in getattr(record, _FIELDS, {}).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _short(value: Any) -> Any:
    """Times to a hundredth of a millisecond."""
    return round(value, 5) if isinstance(value, float) else value
