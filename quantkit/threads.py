"""How threads of OpenMP wait for each other. They read it from the environment when torch is loaded.

By default they spin for a while, in the hope that the next piece of work comes soon. Where something else needs the
same cores, another process or our own kernels of a CPU, they spin away the time in which the thread that they wait for
would run (docs/explanations/engine.md). So `import quantkit`, before torch is loaded, lets them sleep after some
microseconds.
"""

from __future__ import annotations

from collections.abc import MutableMapping

PATIENCE = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # turns of a loop (GNU), milliseconds (Intel)
_SAID = (*PATIENCE, "OMP_WAIT_POLICY")


def wait_asleep(environment: MutableMapping[str, str]) -> None:
    """For this process and those that it starts; where somebody has said how threads wait, it stays."""
    if not any(name in environment for name in _SAID):
        environment.update(PATIENCE)
