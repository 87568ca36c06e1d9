"""From the finished blocks of a run to a GGUF file: embeddings rounded last, all of it read back and measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from quantkit.checkpoint import require_finite
from quantkit.formats import Format, Gguf
from quantkit.formats.gguf.mixes import UNBLOCKED
from quantkit.gguf_export import FileTensor, arranged, exported, file_type, plain_tensor, write_model
from quantkit.gguf_import.folder import write_view
from quantkit.gguf_import.placement import Placement
from quantkit.pipeline.job import Job
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.report import LayerReport, QuantizeReport
from quantkit.pipeline.verification import verify_written
from quantkit.pipeline.writing import measured_quality
from quantkit.provenance import origin_of

RECORD = "quantkit.quantization"  # the key of the file that says how it was made


def write_gguf_file(job: Job, chosen: Mapping[str, Format], journal: Journal) -> QuantizeReport:
    """Writes what the journal and the source say; the file gets its name after it was read back and measured."""
    records = [journal.record(index) for index in range(journal.finished)]
    layers = tuple(LayerReport(**layer) for record in records for layer in record["layers"])
    promised = {module: value for record in records for module, value in record["promised"].items()}
    changed = {name for record in records for name in record["changed"]}  # what took input scales
    model = exported(job.source, job.model)
    finished = _Finished(journal)
    mix, outside = job.mix, job.outside
    assert mix is not None
    quality = None

    def changed_tensor(place: Placement) -> Tensor | None:
        return finished.tensor(place) if place.target in changed else None

    def tensor(place: Placement) -> FileTensor:
        module = place.target.removesuffix(".weight")
        if module in chosen:
            kind = chosen[module].describe()
            return FileTensor(place.source, place.shape, kind, lambda: arranged(finished.tensor(place), place))
        fmt = outside.get(module)
        if fmt is None:
            return plain_tensor(job.source, place, UNBLOCKED, changed_tensor)
        return FileTensor(place.source, place.shape, fmt.kind, lambda: _rounded(job, place, fmt))

    def check(file: Path) -> None:
        nonlocal quality
        with tempfile.TemporaryDirectory() as folder:
            write_view(file, Path(folder))
            verify_written(Path(folder), promised, job.device)
            quality = measured_quality(job, Path(folder))

    record = {"recipe": job.recipe.to_dict(), "calibration": job.calibration}
    record["origin"] = asdict(origin_of(job.source.folder))
    report = write_model(
        model,
        Path(job.output),
        file_type(mix.mix or mix.kind),
        tensor,
        exact=False,
        more={RECORD: json.dumps(record)},
        changed=changed_tensor,
        overwrite=job.overwrite,
        verify=check,
    )
    source_bytes = sum(stored.nbytes for stored in job.source.tensors.values())
    name = f"{mix.name} {mix.describe()}"
    sizes = (source_bytes, report.bytes)
    return QuantizeReport(
        str(job.output), job.recipe.name, name, *sizes, job.calibration, quality, layers, report.notes
    )


class _Finished:
    """Packed rows and changed tensors from the journal: one unit, a decoder block, is in memory at a time."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._unit, self._tensors = journal, -1, dict[str, Tensor]()

    def tensor(self, place: Placement) -> Tensor:
        unit = int(place.source.split(".")[1])
        if unit != self._unit:
            self._unit, self._tensors = unit, dict(self._journal.tensors(unit))
        return self._tensors[place.target]


def _rounded(job: Job, place: Placement, fmt: Gguf) -> Tensor:
    """Embeddings and output layer: no calibration looks at them."""
    weight = job.source.tensor(place.target).to(job.device)
    require_finite(place.target, weight)
    return fmt.encode(weight)["weight"].cpu()
