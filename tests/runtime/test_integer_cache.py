"""Caches of int8 and int4 in whole engines: their answers do not depend on how they came about, and kernels give what
their meaning in torch gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from long_cases import others_long
from quantkit.errors import InputError
from quantkit.kernels.attention.attend import attend
from quantkit.kernels.attention.integer_codes import BY_NAME
from quantkit.kernels.reference.compare import relative_error
from quantkit.kernels.rotary import rotate_and_cache
from quantkit.runtime.core.kv_dtypes import KV_DTYPES, check_kv_dtype
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.keep_path import keep_path
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.batch import KvCache
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine

IDS = torch.randint(3, 2000, (90,), generator=torch.Generator().manual_seed(3)).tolist()
BEGINNING = "The first of the two functions reads a file and returns a list of all the lines that it has found in it. "
PROMPTS = [  # of text: what a code on the other side of a rounding changes is less than what tokens differ in
    BEGINNING + "The second one",
    BEGINNING + "If there is no such file,",
    "In the year 1848 there was a war between the",
    "The number of people who live in the city is",
]


def answers(kv_dtype: str, **options: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM("demo", device="cpu", dtype="float32", kv_dtype=kv_dtype, max_context=96, **options)
    generations = llm.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    return [generation.answers[0].token_ids for generation in generations], llm


@pytest.mark.parametrize("kv_dtype", others_long(BY_NAME.keys(), ["int4"]))
def test_answers_do_not_depend_on_the_way(kv_dtype: str) -> None:
    """Alone and in full; in chunks with a shared prefix; computed anew; swapped to the host and back; guessed."""
    expected, _ = answers(kv_dtype, max_sequences=1, share_prefixes=False)
    found, llm = answers(kv_dtype, step_tokens=24)
    assert found == expected
    assert llm.engine.scheduler.reused_tokens > 0
    for swap_gib in (0.0, 0.01):
        found, llm = answers(kv_dtype, kv_tokens=96, swap_gib=swap_gib)
        assert found == expected
        assert llm.engine.scheduler.preemptions > 0
    found, _ = answers(kv_dtype, speculative="ngram")
    assert found == expected


@pytest.mark.parametrize(("kv_dtype", "closest", "farthest"), [("int8", 1e-4, 0.02), ("int4", 1e-2, 0.3)])
def test_logits_are_those_of_a_full_cache_but_for_rounding(kv_dtype: str, closest: float, farthest: float) -> None:
    found = []
    for kind in ("auto", kv_dtype):
        engine = start_engine("demo", EngineOptions(device="cpu", dtype="float32", kv_dtype=kind, max_context=96))
        found.append(score_tokens(engine, torch.tensor(IDS), 32))
    assert closest < relative_error(found[1], found[0]) < farthest


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("kv_dtype", "step"),
    others_long([(name, step) for name in BY_NAME for step in (13, 1)], [("int4", 13), ("int8", 1)]),
)
def test_kernels_in_an_engine(kv_dtype: str, step: int) -> None:
    """Prompts in chunks, and token by token as answers are."""
    if torch.cuda.is_available():
        pytest.skip("puts the kernels into an engine on a CPU, where they are interpreted")
    ids = torch.tensor(IDS[: 26 if step > 1 else 3])
    found = []
    for kernels in ({}, {"attend": attend, "rotate_and_cache": rotate_and_cache}):
        options = EngineOptions(device="cpu", dtype="float16", kv_dtype=kv_dtype, max_context=64)
        engine = start_engine("demo-draft", options)
        engine.runner.decoder._ops = replace(engine.runner.decoder._ops, **kernels)
        found.append(score_tokens(engine, ids, step))
    assert relative_error(found[1], found[0]) < (0.02 if kv_dtype == "int8" else 0.1)  # one code is a step further off


@pytest.mark.parametrize("kv_dtype", BY_NAME)
def test_a_page_has_all_its_bytes(kv_dtype: str) -> None:
    engine = start_engine("demo", EngineOptions(device="cpu", kv_dtype=kv_dtype, kv_tokens=64, max_context=64))
    cache, plan = engine.runner.cache, engine.memory
    assert cache.pages.nbytes == plan.pages * plan.page_bytes
    assert sum(plane.nbytes for plane in cache.planes) == cache.pages.nbytes
    assert cache.kind.label == kv_dtype


@pytest.mark.parametrize("kv_dtype", BY_NAME)
def test_tokens_of_an_accepted_path_take_their_words_along(kv_dtype: str) -> None:
    codes = BY_NAME[kv_dtype]
    shape = (2, 2, 3, 2, 16, codes.token_bytes(64))
    drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    cache = KvCache(drawn.clone(), codes=codes)
    keep_path(cache.planes, torch.tensor([40, 3]), torch.tensor([17, 40]))
    for before, after in zip(KvCache(drawn, codes=codes).planes, cache.planes, strict=True):
        expected = before.view(torch.uint8).clone()
        expected[:, :, 1, :, 1] = before.view(torch.uint8)[:, :, 2, :, 8]
        expected[:, :, 2, :, 8] = before.view(torch.uint8)[:, :, 0, :, 3]
        assert torch.equal(after.view(torch.uint8), expected)


def test_latents_are_refused() -> None:
    for kv_dtype in KV_DTYPES:
        if kv_dtype in BY_NAME:
            with pytest.raises(InputError, match=f"kv_dtype is {kv_dtype}, but this model keeps latents"):
                check_kv_dtype(kv_dtype, (1, 1, 576))
        else:
            check_kv_dtype(kv_dtype, (1, 1, 576))
