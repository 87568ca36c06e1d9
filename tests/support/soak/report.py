"""What a soak did and found."""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MOST_FAULTS = 20  # that are kept; the first ones say most


@dataclass
class Report:
    seconds: float
    requests: Counter[str] = field(default_factory=Counter)  # by kind of client
    checked: Counter[str] = field(default_factory=Counter)  # answers that equal those of the request alone, by when
    refused: Counter[str] = field(default_factory=Counter)  # requests, by status
    broken: Counter[str] = field(default_factory=Counter)  # accepted, and ended by an engine that was gone; by client
    deeds: Counter[str] = field(default_factory=Counter)  # what was done to engines
    given_up: Counter[str] = field(default_factory=Counter)  # clients that did not read, by kind
    counters: dict[str, float] = field(default_factory=dict)  # of /metrics, over the time of the chaos
    log: Counter[str] = field(default_factory=Counter)  # its warnings and errors
    leaks: dict[str, int] = field(default_factory=dict)
    growth_mib: dict[str, float] = field(default_factory=dict)  # of resident memory
    faults: list[str] = field(default_factory=list)  # whatever should not have happened

    def fault(self, what: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(what)

    def publish(self) -> None:
        """To stdout, and to the file of QUANTKIT_TEST_SOAK_REPORT."""
        print("\n" + "\n".join(_lines(self)), flush=True)
        file = os.environ.get("QUANTKIT_TEST_SOAK_REPORT")
        if file:
            Path(file).write_text(json.dumps(vars(self), indent=2) + "\n", encoding="utf-8")


def _lines(report: Report) -> list[str]:
    tables = {name: value for name, value in vars(report).items() if isinstance(value, dict)}
    width = max((len(name) for table in tables.values() for name in table), default=0)
    requests, checked = sum(report.requests.values()), sum(report.checked.values())
    restarts, leaks = report.counters.get("restarts", 0), sum(report.leaks.values())
    done = f"{requests} requests, {checked} answers checked, {restarts:g} restarts, leaks {leaks}"
    lines = [f"soak of {report.seconds:g} s: {done}, faults {len(report.faults)}"]
    for name, table in tables.items():
        lines += [f"  {name.replace('_', ' ')}", *(f"    {key:{width}}  {value:g}" for key, value in table.items())]
    return [*lines, "  faults", *(f"    {fault}" for fault in report.faults)]
