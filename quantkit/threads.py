"""How threads of OpenMP wait for each other. They read it from the environment when torch is loaded.

By default they spin for a while, in the hope that the next piece of work comes soon. Where another process needs the
same cores, they spin away the time in which the thread that they wait for would run (docs/explanations/engine.md).
"""

from __future__ import annotations

from collections.abc import Mapping

PATIENCE = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # turns of a loop (GNU), milliseconds (Intel)
_SAID = (*PATIENCE, "OMP_WAIT_POLICY")


def patient(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process whose threads wait asleep; where somebody has said how they wait, as it is."""
    said = any(name in environment for name in _SAID)
    return {**environment, **({} if said else PATIENCE)}
