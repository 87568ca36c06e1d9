"""The model card: readable by Hugging Face, the same in every run, free of paths, true to its facts."""

import ast
import importlib.util
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.engines import Layers, verdicts
from quantkit.formats import Gptq, build
from quantkit.pipeline import quantize
from quantkit.pipeline.model_card import CardFacts, Quality, license_of, model_card
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder


@dataclass(frozen=True)
class Layer:
    module: str
    scheme: str = "W4 g128 sym"
    weights: int = 1_000_000
    bytes: int = 520_000
    relative_error: float = 0.1
    log: dict[str, Any] = field(default_factory=dict)


LAYERS = tuple(Layer(f"model.layers.{i}.mlp.up_proj", log={"loss": 0.001 * i}) for i in range(7))
RECORD = {
    "source": CALIBRATION_TEXT.name,
    "samples": 100,
    "asked": 128,
    "seq_len": 512,
    "seed": 3,
    "tokens_sha256": "ab" * 32,
}
FACTS = CardFacts(
    model="org/model",
    recipe=load_recipe("gptq-w4g128"),
    format="gptq",
    source_bytes=30_420_000,
    bytes=11_100_000,
    layers=LAYERS,
    kept=(),
    engines=tuple(verdicts(Layers({"model.layers.0.mlp.up_proj": Gptq(bits=3)}))),
    calibration=RECORD,
    quality=Quality(15.915, 16.488, 0.0321, 133, 1024, "heldout.txt"),
)


def front_matter(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    values = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(values, dict)
    return values


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n")[1].split("\n## ")[0]


def test_front_matter_is_what_hugging_face_reads() -> None:
    values = front_matter(model_card(replace(FACTS, license={"license": "apache-2.0"})))
    assert values == {
        "base_model": "org/model",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["quantized", "gptq", "quantkit"],
    }


def test_numbers_stand_where_they_belong() -> None:
    card = model_card(FACTS)
    assert "4.16 bits per weight" in card
    assert "30.42 MB to 11.10 MB" in card
    assert "15.915" in section(card, "Quality")
    assert "+3.60 %" in section(card, "Quality")
    assert "0.03210 nats" in section(card, "Quality")
    assert "133 windows of 1024 tokens that do not overlap" in section(card, "Quality")
    assert "| vLLM | no | GPTQ only symmetric at 4 or 8 bits, not W3 g128 sym" in section(card, "Who loads it")
    assert "| W4 g128 sym | 7 | 7.0 M | 4.16 |" in section(card, "Layers")
    assert "ab" * 32 in section(card, "Calibration")


def test_the_choices_of_blocks_are_counted() -> None:
    assert "candidate" not in section(model_card(FACTS), "Layers")
    names = ["awq", "gptq", "awq"]
    layers = tuple(
        Layer(f"model.layers.{block}.mlp.{linear}_proj", log={"chosen": name, "block_errors": {}})
        for block, name in enumerate(names)
        for linear in ("up", "down")
    )
    text = section(model_card(replace(FACTS, layers=layers)), "Layers")
    assert "held back: 2 by `awq`, 1 by `gptq`." in text


def test_worst_layers_come_by_loss() -> None:
    text = section(model_card(FACTS), "Worst layers")
    named = [line.split("`")[1] for line in text.splitlines() if "`" in line]
    assert named == [f"model.layers.{i}.mlp.up_proj" for i in (6, 5, 4, 3, 2)]
    errors = tuple(replace(layer, log={}, relative_error=0.1 * i) for i, layer in enumerate(reversed(LAYERS)))
    text = section(model_card(replace(FACTS, layers=errors)), "Worst layers")
    assert next(line.split("`")[1] for line in text.splitlines() if "`" in line) == "model.layers.0.mlp.up_proj"
    assert "weight error" in text


def test_what_is_unknown_is_said_so() -> None:
    card = model_card(replace(FACTS, quality=None, calibration=None, recipe=load_recipe("rtn-w4g128")))
    assert "Not measured" in section(card, "Quality")
    assert "no data" in section(card, "Calibration")
    assert "--samples" not in card


def test_the_command_repeats_the_run() -> None:
    text = section(model_card(FACTS), "How to make it again")
    command = "quantkit quantize org/model -r gptq-w4g128 -o model-gptq-w4g128 --samples 128 --seq-len 512 --seed 3\n"
    assert command in text
    assert "yaml" not in text


def test_a_recipe_of_ones_own_is_shown_whole(tmp_path: Path) -> None:
    changed = load_recipe("gptq-w4g128", ["format.bits=3", f"calibration.source={tmp_path}/notes.txt"])
    record = RECORD | {"source": "my notes.txt"}
    text = section(model_card(replace(FACTS, recipe=changed, calibration=record)), "How to make it again")
    assert "-r gptq-w4g128.yaml" in text
    assert "'my notes.txt'" in text
    file = tmp_path / "gptq-w4g128.yaml"
    file.write_text(text.split("```yaml\n")[1].split("```")[0])
    loaded = load_recipe(str(file))
    assert loaded.format == changed.format
    assert loaded.calibration.source == "notes.txt"


def test_a_mix_in_a_recipe_names_files_and_no_paths(tmp_path: Path) -> None:
    mixed = load_recipe("gptq-w4g128", [f"calibration.source={{{tmp_path}/notes.txt: 2, bundled: 1}}"])
    card = model_card(replace(FACTS, recipe=mixed))
    assert str(tmp_path) not in card
    assert "notes.txt: 2.0" in card


def test_cards_do_not_depend_on_where_the_run_happened(tmp_path: Path) -> None:
    cards = []
    for name in ("a", "b"):
        folder = tmp_path / name / "model"
        folder.mkdir(parents=True)
        cards.append(model_card(replace(FACTS, model=folder)))
    assert cards[0] == cards[1]
    assert str(tmp_path) not in cards[0]
    assert front_matter(cards[0])["base_model"] == "model"


def test_models_from_the_hub_cache_keep_their_hub_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model-1.5b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert front_matter(model_card(replace(FACTS, model=snapshot)))["base_model"] == "org/model-1.5b"


def test_names_cannot_break_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "a: 'model' | with `ticks`"
    folder.mkdir()
    card = model_card(replace(FACTS, model=folder, layers=(Layer("m", scheme="a | b\n# c"),)))
    assert front_matter(card)["base_model"] == folder.name
    assert "| a \\| b # c | 1 |" in card


def test_license_is_that_of_the_original() -> None:
    assert license_of(model_folder("demo")) == {"license": "apache-2.0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: other\nlicense_name: x\nlicense_link: LICENSE\ntags: [a]\n---\n# T", "other"),
        ("---\nlicense: [mit]\n---\n", None),
        ("# No front matter\n---\nlicense: mit\n---\n", None),
        ("---\nlicense: mit\n", None),
        ("---\n: : [\n---\n", None),
        ("---\n- license\n---\n", None),
        ("", None),
    ],
)
def test_readmes_of_all_kinds(text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert license_of(tmp_path).get("license") == expected


def test_missing_and_binary_readmes(tmp_path: Path) -> None:
    assert license_of(tmp_path) == {}
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert license_of(tmp_path) == {}


BITSANDBYTES = "--quantization bitsandbytes --load-format bitsandbytes"
# Recipe -> what transformers needs beside itself, what is typed for vLLM and SGLang; None: it does not load it.
LOADING: dict[str, tuple[str, str | None, str | None]] = {
    "gptq-w4g128": ("gptqmodel optimum", "pip install vllm\nvllm serve {name}", ""),
    "awq-w4g128": ("gptqmodel", "pip install vllm\nvllm serve {name}", ""),
    "nf4": (
        "bitsandbytes",
        f"pip install vllm vllm-bnb-plugin\nvllm serve {{name}} {BITSANDBYTES}",
        " --load-format bitsandbytes",
    ),
    "llm-int8": (
        "bitsandbytes",
        f"pip install vllm vllm-bnb-plugin\nvllm serve {{name}} {BITSANDBYTES}",
        " --load-format bitsandbytes",
    ),
    "rtn-w4g128-ct": ("compressed-tensors", "pip install vllm\nvllm serve {name}", ""),
    "rtn-w3g128": ("compressed-tensors", "pip install vllm\nvllm serve {name}", None),
    "rtn-w2g64": ("compressed-tensors", None, None),
    "fp8": ("compressed-tensors", "pip install vllm\nvllm serve {name}", ""),
}


def card_of(recipe_name: str) -> str:
    """A card as `quantize` writes it for a recipe, without quantizing."""
    recipe = load_recipe(recipe_name)
    fmt = build(recipe.format.name, recipe.format.options, "bfloat16")
    engines = tuple(verdicts(Layers({"model.layers.0.mlp.up_proj": fmt})))
    return model_card(replace(FACTS, recipe=recipe, format=fmt.name, engines=engines))


def ways_to_load(card: str) -> dict[str, str]:
    """Engine -> its part of the section."""
    _, *parts = section(card, "How to load it").split("### ")
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}


def snippets(text: str, language: str = "") -> list[str]:
    """The code blocks of a language; without one, what is typed into a shell."""
    blocks = re.findall(r"^```(\w*)\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    return [code for spoken, code in blocks if spoken == language]


@pytest.mark.parametrize("recipe", LOADING)
def test_every_engine_has_its_command_or_the_reason(recipe: str) -> None:
    packages, vllm, sglang = LOADING[recipe]
    ways, name = ways_to_load(card_of(recipe)), f"model-{recipe}"
    assert list(ways) == ["quantkit", "transformers", "vLLM", "SGLang"]
    assert f"quantkit serve {name}\nquantkit generate {name} " in ways["quantkit"]
    assert snippets(ways["transformers"]) == [f"pip install transformers accelerate {packages}"]
    for engine, typed in (("vLLM", vllm), ("SGLang", sglang)):
        if typed is None:
            assert ways[engine].strip().startswith(f"{engine} does not load it: ")
            assert "```" not in ways[engine]
    if vllm is not None:
        assert snippets(ways["vLLM"]) == [vllm.format(name=name)]
    if sglang is not None:
        command = f"python -m sglang.launch_server --model-path {name}{sglang}"
        assert snippets(ways["SGLang"]) == [f"pip install sglang\n{command}"]


def test_reasons_are_those_of_the_verdict() -> None:
    ways = ways_to_load(model_card(FACTS))  # GPTQ at three bits
    assert "GPTQ only symmetric at 4 or 8 bits, not W3 g128 sym" in ways["vLLM"]
    assert "vllm serve" not in ways["vLLM"]
    assert "sglang.launch_server" in ways["SGLang"]


@pytest.mark.parametrize("folder", ["plain", 'it\'s "quoted" {braces} and \\spaces'])
def test_snippets_are_python_whatever_the_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    ways = ways_to_load(model_card(replace(FACTS, model=tmp_path / folder)))
    for engine in ("quantkit", "transformers"):
        (code,) = snippets(ways[engine], "python")
        compile(code, engine, "exec")
        named = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
        assert f"{folder}-gptq-w4g128" in named
    (typed,) = snippets(ways["quantkit"])
    assert shlex.split(typed.splitlines()[0]) == ["quantkit", "serve", f"{folder}-gptq-w4g128"]


@pytest.mark.parametrize("recipe", ["rtn-w4g128", "nf4"])
def test_snippets_run_on_the_checkpoint_that_carries_them(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """quantkit's always; transformers' where the packages that the card names are installed."""
    monkeypatch.chdir(tmp_path)
    quantize("demo-draft", recipe, f"demo-draft-{recipe}", quality_windows=0)
    ways = ways_to_load((tmp_path / f"demo-draft-{recipe}" / "README.md").read_text())
    runnable = ["quantkit"]
    wanted = snippets(ways["transformers"])[0].removeprefix("pip install ").split()
    if all(importlib.util.find_spec(package.replace("-", "_")) for package in wanted):
        runnable.append("transformers")
    for engine in runnable:
        (code,) = snippets(ways[engine], "python")
        exec(compile(code, engine, "exec"), {})
        assert len(capsys.readouterr().out.split()) > 5, engine
