"""What a step brings, from the device to the host: hidden states, samples, and what they mean for each sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.runtime.core.step_plan import Scheduled, StepPlan

NO_TOKEN = -1  # in the place of a token, where logits are NaN or +inf (`kernels/sampling/greedy.py`)


@dataclass(frozen=True)
class LogitsRows:
    """The rows of a step whose logits are wanted, behind each of which a token is sampled."""

    hidden: Tensor  # [rows, hidden]
    ids: Tensor  # int64 [rows], the token there
    owner_rows: Tensor  # int64 [rows], the device row of the sequence that it belongs to
    positions: Tensor  # int64 [rows]
    features: Tensor | None = None  # of all tokens of the step, where a drafter reads them (`model/taps.py`)


@dataclass(frozen=True)
class Samples:
    """Of every sampling sequence, on the device. `top` and `top_logprobs` hold the most probable tokens."""

    tokens: Tensor  # int64 [rows]
    logprobs: Tensor | None = None  # float32 [rows], before penalties and temperature
    top: Tensor | None = None  # int64 [rows, most]
    top_logprobs: Tensor | None = None  # float32 [rows, most]


def joined(parts: list[Samples]) -> Samples:
    """One behind the other; all have log-probabilities, or none."""
    columns = ([getattr(part, field.name) for part in parts] for field in fields(Samples))
    return Samples(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the prompt tokens from position `first` on: their log-probability, and the most probable ones there."""

    first: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + len(self.logprobs)

    def since(self, position: int) -> PromptLogprobs:
        """Those from a position on."""
        skipped = position - self.first
        return PromptLogprobs(position, self.logprobs[skipped:], self.top[skipped:])


@dataclass(frozen=True)
class StepRows:
    """Of the rows behind which a token was sampled, on the device and valid until the next step is launched: the token
    there, its position, and the one that was sampled."""

    ids: Tensor
    positions: Tensor
    sampled: Tensor


@dataclass(frozen=True)
class Launched:
    """A step on its way. Tensors are on the host and filled when `done` has happened."""

    plan: StepPlan
    sampling: list[Scheduled]
    samples: Samples
    verified: Tensor | None  # the tokens of the rows behind which a token was sampled, where guesses are among them
    prompts: dict[int, PromptLogprobs]  # sequence id -> log-probabilities of the prompt tokens in this step
    done: torch.cuda.Event | None
    hidden: Tensor | None = None  # of the rows behind which a token was sampled, on the device, where kept
    rows: StepRows | None = None  # what the device knows before the host does
    features: Tensor | None = None  # as `LogitsRows.features`, valid until the next step is launched


class Sampled(NamedTuple):
    """A token that came back."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class Outcome(NamedTuple):
    """What came back for one sequence: the tokens of its draft that were right, and the one that follows. `path` has
    the numbers of these guesses."""

    scheduled: Scheduled
    tokens: list[Sampled]
    path: tuple[int, ...] = ()
    logits_row: int = 0  # the first of its rows among those of the step, as in `Launched.hidden`

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1
