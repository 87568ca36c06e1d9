"""A checkpoint to serve, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint import Checkpoint
from quantkit.engines import Verdict
from quantkit.errors import InputError
from quantkit.formats import Dialect, Format
from quantkit.formats.engine_rules import EngineName
from quantkit.inspection import inspect_checkpoint, layers_of
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.ranks import Ranks, check_parallel
from quantkit.sources import BUNDLED, model_folder
from quantkit.wording import model_name


@dataclass(frozen=True)
class Target:
    """A checkpoint to serve, and how."""

    given: str  # as the user named it
    folder: Path
    checkpoint: Checkpoint
    verdicts: dict[EngineName, Verdict]
    bytes: int
    ranks: Ranks
    max_context: int

    @property
    def path(self) -> str:
        """What other programs understand: bundled models have no name there."""
        return str(self.folder) if self.given in BUNDLED else self.given

    @property
    def name(self) -> str:
        return self.given if self.given in BUNDLED else model_name(self.given)

    @property
    def local(self) -> bool:
        """Whether it lies on this machine, and not on the hub."""
        return self.given in BUNDLED or Path(self.given).exists()

    @property
    def volume_path(self) -> str:
        return Path(self.name).name

    @property
    def dialect(self) -> Dialect | None:
        """None: a folder with no layer quantized."""
        return layers_of(self.checkpoint).dialect

    @property
    def formats(self) -> set[Format]:
        return set(self.checkpoint.formats.values())


def read_target(model: str, *, tensor: int = 1, pipeline: int = 1, max_context: int | None = None) -> Target:
    """Reads headers and config only; InputError where the model cannot be cut so, or was not made for the context."""
    folder = model_folder(model)
    found = inspect_checkpoint(folder)
    checkpoint = Checkpoint(folder)
    config = read_model_config(checkpoint.config)
    ranks = Ranks(tensor, pipeline, experts=config.has_experts and tensor > 1)
    check_parallel(config, checkpoint, ranks)
    if max_context is not None and not 1 <= max_context <= config.max_positions:
        raise InputError(f"--max-context is {max_context}, but this model takes 1 to {config.max_positions} tokens")
    verdicts: dict[EngineName, Verdict] = {verdict.engine: verdict for verdict in found.engines}
    return Target(model, folder, checkpoint, verdicts, found.bytes, ranks, max_context or config.max_positions)
