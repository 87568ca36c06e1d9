"""The README.md of a written checkpoint: what it is, how it was made, what was lost, who loads it.

The same run writes the same bytes: no date, no path of this machine, nothing that depends on when or where it ran.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import yaml

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.calibration_mix import describe_mix, recorded_words
from quantkit.engines import Verdict
from quantkit.formats import dialect_with
from quantkit.formats.kv_scheme import describe_summary
from quantkit.pipeline.choices import describe_choices
from quantkit.pipeline.coverage import coverage_of
from quantkit.pipeline.markdown import cell, code, section, table
from quantkit.pipeline.quality import Quality
from quantkit.recipe import Recipe, is_bundled
from quantkit.wording import human_bytes, human_count, model_name

WORST = 5  # layers named by their loss
_PACKAGES = ("quantkit", "torch", "transformers", "safetensors")
_SOURCE_OPTION = "--text"  # of `quantkit quantize`
_LICENSE_KEYS = ("license", "license_name", "license_link")
_PROMPT = "Once upon a time"
# Engine -> what to install beside the packages that its verdict names, what to type, what to write.
_WAYS_TO_LOAD: dict[str, tuple[str, str, str]] = {
    "quantkit": (
        "",
        f'quantkit serve {{shell}}\nquantkit generate {{shell}} "{_PROMPT}"',
        f'''import quantkit

llm = quantkit.LLM({{python}})
print(llm.generate("{_PROMPT}", quantkit.SamplingParams(max_tokens=32))[0].text)''',
    ),
    "transformers": (
        "transformers accelerate",
        "",
        f'''from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{python}})
model = AutoModelForCausalLM.from_pretrained({{python}}, device_map="auto")
inputs = tokenizer("{_PROMPT}", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0], skip_special_tokens=True))''',
    ),
    "vLLM": ("vllm", "vllm serve {shell}", ""),
    "SGLang": ("sglang", "python -m sglang.launch_server --model-path {shell}", ""),
}


class Layer(Protocol):
    """What the card says about one quantized layer."""

    @property
    def module(self) -> str: ...
    @property
    def scheme(self) -> str: ...
    @property
    def weights(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def relative_error(self) -> float: ...
    @property
    def log(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class CardFacts:
    """Everything that a card is made of. The original may be given by a path; only its name appears."""

    model: str | Path  # hub name, `demo` or folder of the original
    recipe: Recipe
    format: str
    source_bytes: int
    bytes: int
    layers: Sequence[Layer]
    kept: Sequence[str]  # linears of the blocks that stayed as they were
    engines: Sequence[Verdict]
    calibration: Mapping[str, Any] | None = None  # `Calibration.record`; None: the method saw no data
    quality: Quality | None = None
    license: Mapping[str, Any] | None = None  # `license_of` the original's folder
    kv_scales: Mapping[str, Any] | None = None  # `QuantizeReport.kv_scales`

    @property
    def title(self) -> str:
        """Not the name of the output folder: the same run into another folder writes the same card."""
        return f"{model_name(self.model).rpartition('/')[2]}-{self.recipe.name}"

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(layer.bytes for layer in self.layers) / sum(layer.weights for layer in self.layers)


def model_card(facts: CardFacts) -> str:
    """The text of README.md."""
    sections = [
        f"---\n{_front_matter(facts)}---",
        f"# {facts.title}",
        _introduction(facts),
        section("Quality", _quality(facts.quality)),
        section("Who loads it", _engines(facts.engines)),
        section("How to load it", _loading(facts)),
        section("Layers", _schemes(facts)),
        *([] if facts.kv_scales is None else [section("Cache", _cache(facts.kv_scales))]),
        section("Worst layers", _worst(facts.layers)),
        section("Calibration", _calibration(facts)),
        section("How to make it again", _again(facts)),
    ]
    return "\n\n".join(sections) + "\n"


def license_of(folder: Path) -> dict[str, Any]:
    """What a model's own README.md says about its license, in its front matter; empty where it says nothing."""
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
        if not lines or lines[0].strip() != "---":
            return {}
        end = next(index for index, line in enumerate(lines) if index and line.strip() == "---")
        found = yaml.safe_load("\n".join(lines[1:end]))
    except (OSError, ValueError, StopIteration, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in _LICENSE_KEYS if isinstance(found.get(key), str)}


def _front_matter(facts: CardFacts) -> str:
    """What Hugging Face reads."""
    method = facts.recipe.method.name
    values = {
        "base_model": model_name(facts.model),
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **(facts.license or {}),
        "tags": ["quantized", method, "quantkit"],
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _introduction(facts: CardFacts) -> str:
    recipe = facts.recipe
    options = ", ".join(f"{name} {value}" for name, value in asdict(recipe.method.build()).items())
    kept = f" Of the linear layers in its blocks, {len(facts.kept)} stayed as they were." if facts.kept else ""
    return (
        f"{code(model_name(facts.model))}, quantized with quantkit by the recipe {code(recipe.name)}: "
        f"method {code(recipe.method.name)}{f' ({options})' if options else ''}, format {code(facts.format)}. "
        f"The quantized layers take {facts.bits_per_weight:.2f} bits per weight, scales and all; the weights went from "
        f"{human_bytes(facts.source_bytes)} to {human_bytes(facts.bytes)}. `lm_head`, embeddings and norms are not "
        f"quantized.{kept}"
    )


def _quality(quality: Quality | None) -> str:
    if quality is None:
        return "Not measured when this was written. `quantkit eval` on this folder and on the original tells."
    change = 100 * (quality.perplexity / quality.base_perplexity - 1)
    rows = [
        ("perplexity, original", f"{quality.base_perplexity:.3f}"),
        ("perplexity, quantized", f"{quality.perplexity:.3f} ({change:+.2f} %)"),
    ]
    rows.append(("KL(original \\|\\| quantized) for a token", f"{quality.kl:.5f} nats"))
    source = f"Text: {code(_name_only(quality.text))}; {quality.protocol.rstrip('.')}."
    return f"{table(('measure', 'value'), rows)}\n\n{source}"


def _engines(engines: Iterable[Verdict]) -> str:
    rows = [(verdict.engine, verdict.answer, cell(verdict.remark), cell(verdict.evidence)) for verdict in engines]
    return table(("engine", "loads", "remark", "evidence"), rows)


def _loading(facts: CardFacts) -> str:
    """For every engine, what to type or the reason why it is of no use."""
    known = [verdict for verdict in facts.engines if verdict.engine in _WAYS_TO_LOAD]
    ways = [f"### {verdict.engine}\n\n{_way_to_load(verdict, facts)}" for verdict in known]
    return "\n\n".join([f"{code(facts.title)} stands for this folder, or for its name on the hub.", *ways])


def _way_to_load(verdict: Verdict, facts: CardFacts) -> str:
    if verdict.loads is None:
        return f"Whether {verdict.engine} loads it is not known: {cell(verdict.remark)}."
    if not verdict.loads:
        return f"{verdict.engine} does not load it: {cell(verdict.remark)}."
    installed, command, python = _WAYS_TO_LOAD[verdict.engine]
    flags = dialect_with(facts.format).serve_flags.get(verdict.engine, "")
    install = " ".join(("pip install", installed, *verdict.packages)) if installed else ""
    start = f"{command.format(shell=shlex.quote(facts.title))} {flags}".rstrip()
    typed = "\n".join(filter(None, (install, start)))
    shown = [f"```\n{typed}\n```"] if typed else []
    if verdict.advice:
        shown.append(f"{cell(verdict.advice)}.")
    if python:
        shown.append(f"```python\n{python.format(python=json.dumps(facts.title, ensure_ascii=False))}\n```")
    return "\n\n".join(shown)


def _schemes(facts: CardFacts) -> str:
    rows = []
    for scheme in dict.fromkeys(layer.scheme for layer in facts.layers):
        layers = [layer for layer in facts.layers if layer.scheme == scheme]
        weights = sum(layer.weights for layer in layers)
        bits = 8 * sum(layer.bytes for layer in layers) / weights
        rows.append((cell(scheme), len(layers), human_count(weights), f"{bits:.2f}"))
    if facts.kept:
        rows.append(("kept", len(facts.kept), "", ""))
    schemes = table(("scheme", "layers", "weights", "bits per weight"), rows)
    return f"{schemes}\n\n{describe_choices(facts.layers)}".strip()


def _cache(kv_scales: Mapping[str, Any]) -> str:
    return (
        f"It brings scales for a cache of keys and values in FP8: {describe_summary(kv_scales)}. "
        "`quantkit serve --kv-dtype fp8` uses them."
    )


def _worst(layers: Sequence[Layer]) -> str:
    """By the loss of their outputs where the method measured one, else by the error of their weights."""
    measured = all("loss" in layer.log for layer in layers)
    losses = {layer.module: float(layer.log["loss"]) if measured else layer.relative_error for layer in layers}
    ranked = sorted(layers, key=lambda layer: (-losses[layer.module], layer.module))[:WORST]
    what = "loss" if measured else "weight error"
    rows = [(code(layer.module), cell(layer.scheme), f"{losses[layer.module]:.3g}") for layer in ranked]
    meaning = (
        "Squared error of a layer's outputs on the calibration inputs, relative to their square."
        if measured
        else "Norm of the difference to the original weights, relative to their norm; it says little about quality."
    )
    return f"{table(('layer', 'scheme', what), rows)}\n\n{meaning}"


def _calibration(facts: CardFacts) -> str:
    if facts.calibration is None:
        return "None: the method looks at no data."
    mix = describe_mix(facts.calibration.get("mix", ()))
    rows = [(cell(key), code(_name_only(mix if key == "mix" else value))) for key, value in facts.calibration.items()]
    experts = coverage_of(facts.layers)
    if experts is not None:
        rows.append(("experts", cell(experts.describe())))
    return table(("setting", "value"), rows)


def _again(facts: CardFacts) -> str:
    """The command; a recipe that does not come with quantkit stands beside it."""
    bundled = is_bundled(facts.recipe)
    file = facts.recipe.name if bundled else f"{facts.recipe.name}.yaml"
    words = ["quantkit", "quantize", model_name(facts.model), "-r", file, "-o", facts.title]
    text = f"```\n{shlex.join(words + _calibration_words(facts.calibration))}\n```"
    if not bundled:
        contents = {key: value for key, value in facts.recipe.to_dict().items() if key != "name"}
        written = yaml.safe_dump(_names_only(contents), sort_keys=False, allow_unicode=True, width=1000)
        text += f"\n\nwith this as {code(file)}:\n\n```yaml\n{written}```"
    return f"{text}\n\nMade with {', '.join(_versions())}."


def _calibration_words(record: Mapping[str, Any] | None) -> list[str]:
    """The options that choose the same calibration data."""
    if record is None:
        return []
    options = {"--samples": record.get("asked"), "--seq-len": record.get("seq_len"), "--seed": record.get("seed")}
    words = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    source = _name_only(record.get("source"))
    if "mix" in record:
        sources = recorded_words(record["mix"])
    else:
        sources = [] if record.get("default", source == CALIBRATION_TEXT.name) else [source]
    return words + [word for source in sources for word in (_SOURCE_OPTION, str(source))]


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # run from a source tree that was never installed
            continue
    return found


def _names_only(value: Any) -> Any:
    """Plain values with every absolute path shortened to its last name."""
    if isinstance(value, dict):
        return {_name_only(key): _names_only(item) for key, item in value.items()}  # keys of a mix are files
    if isinstance(value, list):
        return [_names_only(item) for item in value]
    return _name_only(value)


def _name_only(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
