"""Structured output through the engine: masks meet sampling, overlap, preemption and other requests."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from quantkit.runtime.output.output_processor import OutputProcessor
from quantkit.runtime.sampling.structured_output import GuideCompiler, GuideSpec

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
FREE_PROMPTS, FREE = ("The function returns", "In the year"), SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"overlap": True, "kv_tokens": 256},
        {"overlap": True, "speculative": "ngram,k=6,adaptive=off"},
        pytest.param(
            {"overlap": False, "speculative": "draft={noisy},k=4,adaptive=off", "kv_tokens": 320},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_answers_follow_their_guides_beside_others(
    options: dict[str, Any], known: list[str], unguided: list[str], noisy_draft: Path
) -> None:
    if "speculative" in options:
        options = options | {"speculative": options["speculative"].format(noisy=noisy_draft)}
    assert _guided_answers(options, unguided) == known


@pytest.fixture(scope="module")
def unguided() -> list[str]:
    """What the free requests are answered where nobody has a guide."""
    alone = LLM("demo-draft", device="cpu", max_context=160).generate(list(FREE_PROMPTS), FREE)
    return [one.text for one in alone]


@pytest.fixture(scope="module")
def known(unguided: list[str]) -> list[str]:
    """Guided answers of plain decoding, which no option may change."""
    return _guided_answers({"overlap": False}, unguided)


def never(index: int) -> None:
    raise AssertionError("nobody asked for stop strings")


def _guided_answers(options: dict[str, Any], unguided: list[str]) -> list[str]:
    """Checks them, and those beside them, on the way."""
    llm = LLM("demo-draft", device="cpu", max_context=160, **options)
    engine = llm.engine
    compiler = GuideCompiler(llm.tokenizer, engine.config.vocab, engine.config.eos)
    specs = [
        GuideSpec("json_schema", json.dumps(SCHEMA)),
        GuideSpec("regex", r"[a-c]{3}-[0-9]{2}"),
        GuideSpec("choice", json.dumps(["yes", "no", "perhaps"])),
    ]
    plain = [engine.add(llm.encode(text), FREE) for text in FREE_PROMPTS]
    guided = []
    for seed, spec in enumerate(specs):
        params = SamplingParams(max_tokens=120, temperature=1.0, seed=seed, n=2)
        guides = [compiler.compile(spec) for _ in range(2)]
        guided.append(engine.add(llm.encode("Answer:"), params, guides=guides))
    texts: dict[tuple[int, int], str] = {}
    ends: dict[tuple[int, int], str | None] = {}
    processors = {
        request.id: OutputProcessor(llm.tokenizer, request.prompt, request.params, engine.config.eos, never)
        for request in plain + guided
    }
    while engine.busy:
        for output in engine.step():
            key = (output.request, output.index)
            found = processors[output.request].process(output)
            assert found is not None
            texts[key] = texts.get(key, "") + found.text
            ends[key] = found.finished
        engine.check_integrity()
    for index in range(2):
        answers = [texts[request.id, index] for request in guided]
        jsonschema.validate(json.loads(answers[0]), SCHEMA)
        assert re.fullmatch(r"[a-c]{3}-[0-9]{2}", answers[1])
        assert answers[2] in ("yes", "no", "perhaps")
        assert {ends[request.id, index] for request in guided} == {"stop"}
    if "draft" in str(options):
        assert sum(sequence.num_accepted for request in guided for sequence in request.sequences) > 5
    assert [texts[request.id, 0] for request in plain] == unguided
    return [texts[request.id, index] for request in guided for index in range(2)]


def test_a_broken_guide_ends_its_answer_alone() -> None:
    """A guide that fails must not take the step down with it."""
    from quantkit.errors import QuantkitError

    class Broken:
        finished = False

        def mask(self) -> None:
            raise QuantkitError("too complex")

        advance = staticmethod(lambda token: Broken().mask())

    llm = LLM("demo-draft", device="cpu", max_context=160)
    other = llm.engine.add(llm.encode("In the year"), SamplingParams(max_tokens=6, ignore_eos=True))
    broken = llm.engine.add(llm.encode("In the year"), SamplingParams(), guides=[Broken()])  # type: ignore[list-item]
    ends = {}
    while llm.engine.busy:
        ends |= {delta.request: delta.finished for delta in llm.engine.step()}
    assert ends == {other.id: "length", broken.id: "error"}
