"""Every error a user can cause or meet. The command line prints them as one line, without a traceback.

QuantkitError            something failed while the input was right      exit code 1
└── InputError           the input is wrong; the message says the remedy  exit code 2
    ├── CannotHold       a format cannot store these quantized weights
    └── StorageError     files cannot be read or written (missing, corrupt, disk full)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantkitError(Exception):
    """Base of all errors raised on purpose by quantkit."""

    exit_code = 1


class InputError(QuantkitError):
    """What was given is wrong. Says what was given, what is allowed and what to do next."""

    exit_code = 2


class CannotHold(InputError):
    """A format refuses weights that it could not store without changing them."""


class StorageError(InputError):
    """A file or folder cannot be read or written as asked."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`did you mean 'nf4'? Known: ...` for messages about unknown names."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}Known: {', '.join(names)}."
