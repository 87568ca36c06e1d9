"""An engine on paper launches what a real one launches: both are asked to do the same, the real one by Triton's
interpreter, and every launch is compared: kernel, dtypes, constants, grid, and what Triton specializes kernels by."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from quantkit.kernels.card import KNOWN, pretend
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.known_answer import known_ids
from quantkit.runtime.paper.engine import paper_engine
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from quantkit.runtime.warm_up import Part, all_parts, first_parts, rehearse

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")]

CARD = KNOWN["sm_80"]  # whose kernels are all Triton's: the interpreter does not know Gluon
AVAILABLE = 2 << 30
Launch = tuple[Any, ...]


def seen_by_triton(value: Any) -> object:
    """What Triton makes of an argument, in our words."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if type(value) is int:
        return "int", value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value).__name__ if isinstance(value, float) else repr(value)


@contextmanager
def recorded(*, runs: bool) -> Iterator[list[Launch]]:
    """Every launch; on paper nothing `runs`."""
    launches: list[Launch] = []
    run = InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        shape = tuple(grid(given)) if callable(grid) else tuple(grid)
        constants = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
        seen = [
            (name, repr(value) if name in constants else seen_by_triton(value)) for name, value in given.items()
        ]  # fmt: skip
        launches.append((self.fn.__name__, shape, *seen))
        if runs:
            run(self, *args, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = launch
    try:
        with pretend(CARD):
            yield launches
    finally:
        InterpretedFunction.run = run


def use(engine: Engine) -> None:
    """What a server does before its first answer, and of each kind of part the smallest."""
    rehearse(engine, first_parts(engine))
    score_tokens(engine, known_ids(engine))
    rehearse(engine, list(_smallest(all_parts(engine))))


def _smallest(parts: list[Part]) -> Iterator[Part]:
    names = ("prompts of 16 tokens", "7 tokens", "16 tokens", "1 prompts", "2 prompts", "sampling 3", "2 sequences")
    for name in names:
        yield next(part for part in parts if part.name == name)


MODELS = {
    "W4": ("rtn-w4g32", {}),
    "NF4 over int8": ("nf4", {"kv_dtype": "int8"}),
    "LLM.int8": ("llm-int8", {}),
    "as it is": (None, {"kv_dtype": "int4"}),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_launches_are_those_of_a_real_engine(
    name: str, tiny_model: Path, quantized_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, more = MODELS[name]
    model = tiny_model if recipe is None else quantized_tiny(recipe)
    given: dict[str, Any] = {"dtype": "float16", "max_context": 64, "max_sequences": 2, "kv_tokens": 256}
    options = EngineOptions(device="cpu", step_tokens=24, **given | more)
    with recorded(runs=False) as on_paper:
        use(paper_engine(model, options, AVAILABLE))
    with recorded(runs=True) as real:
        engine = start_engine(model, options)
        loaded = len(real)
        use(engine)
    assert set(on_paper) == set(real)
    run = real[loaded:]
    assert on_paper[-len(run) :] == run  # the loader reads one block of each kind; all else is the same, in order
    assert len(run) > 100


def test_what_a_card_has_not_is_refused(tiny_model: Path) -> None:
    from quantkit.errors import InputError

    with pretend(CARD), pytest.raises(InputError, match="FP8"):
        paper_engine(tiny_model, EngineOptions(device="cpu", kv_dtype="fp8"), AVAILABLE)
    with pretend(CARD), pytest.raises(InputError, match="one GPU"):
        paper_engine(tiny_model, EngineOptions(device="cpu", tensor_parallel=2), AVAILABLE)
    with pretend(CARD), pytest.raises(InputError, match="does not fit"):
        paper_engine(tiny_model, EngineOptions(device="cpu"), 1 << 20)
