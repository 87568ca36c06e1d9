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

from long_cases import others_long
from quantkit import quantize
from quantkit.calibration import Calibration
from quantkit.errors import InputError
from quantkit.formats import QuantizedWeight
from quantkit.kernels.card import KNOWN, pretend
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.known_answer import known_ids
from quantkit.runtime.model.reader import Reader
from quantkit.runtime.paper.engine import paper_engine
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from quantkit.runtime.warm_up import all_parts, first_parts, rehearse
from tiny_models import SETTINGS, save_model

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
    """What a server does before its first answer, a graph of two answers, and every step of sampling."""
    parts = [part for part in all_parts(engine) if part.name in ("2 sequences", "sampling 3")]
    rehearse(engine, [first_parts(engine)[0], *parts])
    score_tokens(engine, known_ids(engine))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    """`models(family, recipe)`: as few numbers as kernels take, so that the interpreter is quick; None: not
    quantized."""
    top = tmp_path_factory.mktemp("paper")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    small = {"hidden_size": 128, "intermediate_size": 128, "initializer_range": 0.02}

    def folder_of(family: str, recipe: str | None) -> Path:
        plain = top / family
        if not plain.exists():
            save_model(family, plain, "float16", **(small if family == "llama" else SETTINGS[family]) | heads)
        if recipe is None:
            return plain
        quantized = top / f"{family}-{recipe}"
        if not quantized.exists():
            few = Calibration(samples=2, seq_len=32)
            quantize(plain, recipe, quantized, calibration=few, quality_windows=0)
        return quantized

    return folder_of


CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "W4": ("llama", "rtn-w4g32", {}),
    "NF4 over int8": ("llama", "nf4", {"kv_dtype": "int8"}),
    "LLM.int8 over int4": ("llama", "llm-int8", {"kv_dtype": "int4"}),
    "as it is": ("llama", None, {}),
    "windows and norms": ("gemma2", None, {}),
    "experts": ("qwen3_moe", None, {}),
}


@pytest.mark.parametrize("name", others_long(list(CASES), ("W4",)))
def test_launches_are_those_of_a_real_engine(
    name: str, models: Callable[[str, str | None], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(reader: Reader, name: str) -> QuantizedWeight:  # as onto a GPU: not where the mapped file has it
        return reader.checkpoint.quantized(name, reader.device, copies=True)

    family, recipe, more = CASES[name]
    model = models(family, recipe)
    given: dict[str, Any] = {"dtype": "float16", "max_context": 32, "max_sequences": 2, "kv_tokens": 128}
    options = EngineOptions(device="cpu", step_tokens=24, **given | more)
    with recorded(runs=False) as on_paper:
        use(paper_engine(model, options, AVAILABLE))
    with recorded(runs=True) as real:
        monkeypatch.setattr(Reader, "quantized", copied)
        engine = start_engine(model, options)
        loaded = len(real)
        use(engine)
    assert set(on_paper) == set(real)
    run = real[loaded:]
    assert on_paper[-len(run) :] == run  # the loader reads one block of each kind; all else is the same, in order
    assert len(run) > 40


def test_what_a_card_has_not_is_refused(tiny_model: Path) -> None:
    with pretend(CARD), pytest.raises(InputError, match="FP8"):
        paper_engine(tiny_model, EngineOptions(device="cpu", kv_dtype="fp8"), AVAILABLE)
    with pretend(CARD), pytest.raises(InputError, match="one GPU"):
        paper_engine(tiny_model, EngineOptions(device="cpu", tensor_parallel=2), AVAILABLE)
    with pretend(CARD), pytest.raises(InputError, match="does not fit"):
        paper_engine(tiny_model, EngineOptions(device="cpu"), 1 << 20)
