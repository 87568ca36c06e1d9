"""Structured logs: one JSON object a line on stderr, one line a request.

A line never holds an API key (only its name), and holds a prompt only where the operator asked for it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = "quantkit.server"
_QUIET = ("uvicorn.access", "httpx", "asyncio")  # a line of our own stands for each request
_FIELDS = "fields"  # attribute of a log record that carries the values of its line


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
