"""Random JSON schemas through the official client: every answer of the bundled model validates."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest


def random_schema(pick: random.Random, depth: int = 2) -> dict[str, Any]:
    """One that even a weak model comes to the end of: all lengths and ranges are bounded."""
    leaves = ("integer", "string", "pattern", "enum", "boolean", "const")
    kind = pick.choice((*leaves, "object", "object", "array", "anyOf") if depth else leaves)
    if kind == "integer":
        low = pick.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + pick.randint(0, 1000)}
    if kind == "string":
        return {"type": "string", "maxLength": pick.randint(1, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": pick.choice(["^[a-z]{2,4}$", r"^\d{2}-\d{2}$", "^(red|green)$"])}
    if kind == "enum":
        return {"enum": pick.sample(["a", "b", 1, 2, None, True], pick.randint(1, 4))}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "const":
        return {"const": pick.choice(["yes", 7, None, [1, "x"]])}
    if kind == "array":
        most = pick.randint(1, 3)
        items = random_schema(pick, depth - 1)
        return {"type": "array", "items": items, "minItems": pick.randint(0, most), "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [random_schema(pick, depth - 1) for _ in range(2)]}
    return random_object(pick, depth)


def random_object(pick: random.Random, depth: int) -> dict[str, Any]:
    names = pick.sample(["name", "size", "tags", "größe", "a b"], pick.randint(1, 3))
    properties = {name: random_schema(pick, depth - 1) for name in names}
    required = [name for name in names if pick.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("count", [16, pytest.param(100, marks=pytest.mark.long)])
def test_many_schemas(live_server: Any, count: int) -> None:
    client = live_server.openai()
    schemas = [random_object(random.Random(seed), 2) for seed in range(count)]

    def ask(numbered: tuple[int, dict[str, Any]]) -> Any:
        seed, schema = numbered
        return client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Describe a thing as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
            temperature=1.0,
            seed=seed,
            max_tokens=400,
        ).choices[0]

    with ThreadPoolExecutor(8) as threads:
        choices = list(threads.map(ask, enumerate(schemas)))
    for choice, schema in zip(choices, schemas, strict=True):
        assert choice.finish_reason == "stop", (choice, schema)
        jsonschema.validate(json.loads(choice.message.content), schema)
    assert len({choice.message.content for choice in choices}) > count // 2
