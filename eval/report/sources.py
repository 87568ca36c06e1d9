"""Where the numbers of a comparison come from: the base model, the calibration of every format, the protocol."""

from __future__ import annotations

from quantkit.eval.compare.results import Comparison


def source_lines(comparison: Comparison) -> list[tuple[str, str]]:
    """(what, where it comes from); formats that share something stand together."""
    base = comparison.baseline
    lines = []
    if base is not None and base.provenance is not None:
        lines.append(("base model", f"{comparison.model}, {base.provenance.origin}"))
    shared: dict[str, list[str]] = {}
    for found in comparison.formats:
        if found.provenance is not None and not found.baseline:
            shared.setdefault(str(found.provenance.calibration), []).append(found.name)
    lines += [("calibration", f"{', '.join(names)}: {data}") for data, names in shared.items()]
    protocols = dict.fromkeys(found.quality.protocol for found in comparison.formats if found.quality)
    return [*lines, *(("protocol", protocol) for protocol in protocols)]
