"""What is to be compared and how: everything that decides a number, and the formats that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantkit.defaults import QUALITY_WINDOWS
from quantkit.eval.engine.run import Load
from quantkit.eval.shapes import PLAIN_SHAPES

LONG_FROM, LONG_PROMPT = 64, 512  # so many requests at once get longer prompts, as they would in service
LAYER_WINDOWS = 2  # for errors of single layers, which few tokens show
SAMPLE_PROMPT, SAMPLE_ANSWER, SAMPLES = 32, 48, 3  # tokens, tokens, continuations


@dataclass(frozen=True)
class Asked:
    """One comparison. Texts are files, or names of datasets where `read_windows` knows them."""

    model: str
    text: str
    windows: int  # fewer where the text has no more
    window: int
    calibration_text: str | dict[str, float] | None  # None: what the recipe says, else the text that ships
    samples: int | None
    seq_len: int | None
    batches: tuple[int, ...]
    prompt: int
    new: int
    device: str  # cpu or cuda
    reference: bool  # whether quality is measured on transformers too
    seed: int = 0
    card_windows: int = QUALITY_WINDOWS  # of text that `quantize` measures for the model card; no more than `windows`
    layers: bool = True  # whether errors of single layers are looked for

    @property
    def of_shape(self) -> bool:
        """Random weights of a known shape: speed and memory can be measured, quality cannot."""
        return self.model in PLAIN_SHAPES

    @property
    def loads(self) -> list[Load]:
        return [Load(size, LONG_PROMPT if size >= LONG_FROM else self.prompt, self.new) for size in self.batches]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"batches": list(self.batches)}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Asked:
        return cls(**(given | {"batches": tuple(given["batches"])}))


@dataclass(frozen=True)
class Entry:
    """One format to measure."""

    name: str
    kind: Literal["baseline", "recipe", "checkpoint"]
    source: str  # the model, the recipe's name or file, or the checkpoint's folder
