"""What the runner asks of other ranks, seen by peers that stand in for them in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from torch import Tensor

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.peers import Alone, ReturningRows
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.device.step_inputs import PageMoves, Step
from quantkit.runtime.llm import LLM

PROMPTS = [list(range(3, 3 + length)) for length in (40, 40, 5)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=1)


@dataclass(frozen=True)
class Kept:
    """Rows that went through another stage, which had no blocks."""

    hidden: Tensor
    notes: list[str]

    def wait(self) -> Tensor:
        self.notes.append("back")
        return self.hidden


class Noting(Alone):
    """Writes down what it is told. With `staged`, hidden states take a way around."""

    def __init__(self, staged: bool) -> None:
        self.notes: list[str] = []
        self.inside = 0
        self._staged = staged
        self._step = Step(None, [], [])  # type: ignore[arg-type]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def tell_moves(self, moves: PageMoves) -> None:
        self.notes.append("moves")

    def tell_step(self, step: Step) -> None:
        assert self.inside, "an error in a step must end the ranks"
        self.notes.append("step")
        self._step = step

    def send_on(self, hidden: Tensor | None, num_rows: int) -> ReturningRows | None:
        assert self.inside
        if not self._staged:
            return None
        assert hidden is not None
        wanted = hidden[self._step.wanted]
        assert len(wanted) == num_rows
        return Kept(wanted, self.notes)


@pytest.mark.parametrize("staged", [False, True])
def test_every_step_is_told_and_rows_come_back(staged: bool) -> None:
    options = {"device": "cpu", "max_context": 64, "step_tokens": 24, "max_sequences": 2, "kv_tokens": 96}
    expected = [one.answers[0].token_ids for one in LLM("demo-draft", **options).generate(PROMPTS, PARAMS)]
    engine = (llm := LLM("demo-draft", **options)).engine
    peers = Noting(staged)
    engine.runner = Runner(engine.runner.part, engine.runner._sampler, peers)
    assert [one.answers[0].token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected
    assert peers.notes.count("step") == engine.steps
    assert peers.notes.count("back") == (engine.steps if staged else 0)
    assert peers.inside == 0


def test_page_moves_are_told_before_the_step() -> None:
    """The second answer to a prompt shares its last page, and writes into a copy of it."""
    engine = (llm := LLM("demo-draft", device="cpu", max_context=64, step_tokens=40)).engine
    peers = Noting(False)
    engine.runner = Runner(engine.runner.part, engine.runner._sampler, peers)
    llm.generate([PROMPTS[0]], SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    assert peers.notes.count("moves") == 1
    assert peers.notes[peers.notes.index("moves") + 1] == "step"
