"""The scheduler's machine and traffic of tests/runtime/test_scheduler_machine.py, for minutes instead of seconds."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

pytestmark = pytest.mark.long
SHORT = Path(__file__).parents[1] / "runtime" / "test_scheduler_machine.py"


@pytest.fixture(scope="module")
def short() -> ModuleType:
    spec = spec_from_file_location("short_scheduler_machine", SHORT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_machine(short: ModuleType) -> None:
    run_state_machine_as_test(
        short.SchedulerMachine, settings=settings(max_examples=1200, stateful_step_count=60, deadline=None)
    )


@pytest.mark.parametrize("seed", range(0, 1600, 200))
def test_traffic(short: ModuleType, seed: int) -> None:
    for one in range(1000 + seed, 1000 + seed + 200):
        short.run_traffic(one, actions=150)
