"""quantkit eval"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import device_option, json_option, print_json, print_provenance, print_table, progress_bar
from quantkit.defaults import COMPARED_WINDOWS, WINDOW

if TYPE_CHECKING:
    from quantkit.eval.quality.layer_errors import LayerErrors
    from quantkit.eval.quality.measure import QualityResult

_WORST = 8  # linears printed; JSON has all
_COUNT = click.IntRange(min=1)
_HOW = (
    *("backend", "window", "max_windows", "dtype", "device", "step_tokens", "head_bits", "kv_dtype", "arithmetic"),
    "seed",
)
_RANKS = ("tensor_parallel", "expert_parallel", "pipeline_parallel")
_TASK_OPTIONS = ("limit", "fewshot", "task_path")
_BEHAVIOUR_OPTIONS = ("behaviour_prompts", "behaviour_samples", "behaviour_tokens", "behaviour_gate")
_PERPLEXITY_OPTIONS = (
    *("text", "max_windows", "no_start_token", "kl_windows", "null_kl", "layers", "step_tokens", "kv_dtype"),
    "exact_activations",
)


@click.command("eval", short_help="Measure what a model knows, and what quantization changed.")
@click.argument("model")
@click.option(
    "--text",
    metavar="FILE",
    help="A UTF-8 text, .jsonl file or folder, wikitext2 or c4; default: the held-out text that ships.",
)
@click.option("--window", default=WINDOW, show_default=True, metavar="N", help="Tokens per window.")
@click.option("--max-windows", type=_COUNT, metavar="N", help="Stop after N windows; default: all.")
@click.option("--no-start-token", is_flag=True,
              help="Windows without the token that some tokenizers put before every text, as many papers have "
              "them.")  # fmt: skip
@click.option("--base", metavar="MODEL", help="Also measure how far MODEL's predictions are from this one's.")
@click.option(
    "--kl-windows", type=_COUNT, metavar="N", help=f"Windows compared with --base; default: {COMPARED_WINDOWS}."
)
@click.option("--null-kl", is_flag=True,
              help="Also how far --base is from itself in float32: what the arithmetic alone adds.")  # fmt: skip
@click.option("--layers", is_flag=True, help="Also find the layers that lose most against --base.")
@click.option("--backend", type=click.Choice(["reference", "runtime"]),
              help="transformers with decoded weights (the default), or our runtime with its kernels (for --tasks the "
              "default, for --behaviour the only one).")  # fmt: skip
@click.option("--step-tokens", type=_COUNT, metavar="N",
              help="Runtime: feed windows in steps of N tokens; 1 takes the kernels of decoding.")  # fmt: skip
@click.option("--head-bits", type=int, metavar="8|4",
              help="Runtime: MODEL with its output layer rounded, as serve does it; --base keeps its own.")  # fmt: skip
@click.option("--kv-dtype", type=click.Choice(["auto", "bf16", "fp8", "int8", "int4"]),
              help="MODEL on our runtime with this KV cache, as serve keeps it; --base keeps its own.")  # fmt: skip
@click.option("--arithmetic", type=click.Choice(["16-bit", "fp8", "fp8-copy"]),
              help="MODEL on our runtime with packed weights multiplied so, as serve does; not --base's.")  # fmt: skip
@click.option("--exact-activations", is_flag=True,
              help="Round weights only, even where the format rounds activations too.")  # fmt: skip
@click.option("--dtype", help="float32, bfloat16 or float16; default: float32, for the runtime on a GPU the model's.")
@device_option
@click.option("--tensor-parallel", default=1, show_default=True, metavar="N",
              help="Runtime: GPUs among which every layer is divided.")  # fmt: skip
@click.option("--expert-parallel", is_flag=True,
              help="Runtime, with --tensor-parallel: divide the experts of a layer among the GPUs.")  # fmt: skip
@click.option("--pipeline-parallel", default=1, show_default=True, metavar="N",
              help="Runtime: stages of consecutive blocks, each on GPUs of its own.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the intervals' resampling.")
@click.option("--tasks", metavar="NAMES", help="Run these lm-eval tasks instead, separated by commas.")
@click.option("--limit", type=_COUNT, metavar="N", help="Tasks: the first N items of each.")
@click.option("--fewshot", type=click.IntRange(min=0), metavar="N", help="Tasks: examples before each question.")
@click.option("--task-path", type=Path, metavar="DIR", help="Tasks: a folder with more task files.")
@click.option("--chat-template", is_flag=True,
              help="Tasks: ask through the model's chat template. Behaviour: refuse a model without one.")  # fmt: skip
@click.option("--behaviour", is_flag=True,
              help="Instead: how many answers end, repeat themselves, are valid JSON or valid tool calls.")  # fmt: skip
@click.option("--behaviour-prompts", type=Path, metavar="FILE",
              help="Behaviour: JSON lines with messages, and a schema or tools; default: 80 that ship.")  # fmt: skip
@click.option("--behaviour-samples", type=_COUNT, metavar="N",
              help="Behaviour: N answers to each prompt, drawn at temperature 0.7; default: one, greedy.")  # fmt: skip
@click.option("--behaviour-tokens", type=_COUNT, metavar="N",
              help="Behaviour: the longest answer, 24 or more; default: 256.")  # fmt: skip
@click.option("--behaviour-gate", is_flag=True, help="Behaviour: exit code 1 where a measure is worse than --base's.")
@json_option
def command(model: str, base: str | None, tasks: str | None, behaviour: bool, as_json: bool, **options: Any) -> None:
    """Perplexity of MODEL, quantized or not, with 95 % confidence intervals; its distance from --base; or task scores;
    or how its answers behave.

    \b
    quantkit eval demo
    quantkit eval demo-w4 --base demo --layers
    quantkit eval demo-w4 --base demo --backend runtime --device cuda
    quantkit eval demo --base demo --kv-dtype int8
    quantkit eval demo-w4 --base demo-w4 --arithmetic fp8
    quantkit eval org/model --text wikitext2 --window 2048 --json
    quantkit eval demo-w4 --tasks arc_easy,hellaswag --limit 100
    quantkit eval demo-w4 --base demo --behaviour --behaviour-gate

    Protocol: text as it is, no special tokens but the start token of tokenizers that add one, windows do not overlap,
    the first token of a window is not scored.
    docs/reference/eval.md says which number to look at.
    """
    from quantkit.devices import resolve_device
    from quantkit.provenance import provenance_of

    of_tasks = {name: options.pop(name) for name in _TASK_OPTIONS}
    of_behaviour = {name: options.pop(name) for name in _BEHAVIOUR_OPTIONS}
    template = {"chat_template": options.pop("chat_template")}
    if tasks is None:
        _refuse(of_tasks if behaviour else of_tasks | template, "is about tasks; name them with --tasks")
    if not behaviour:
        _refuse(of_behaviour, "is about behaviour; add --behaviour")
    options["device"] = resolve_device(options["device"])
    if tasks is not None:
        _refuse({"behaviour": behaviour}, "and --tasks are two measurements; run one after the other")
        _evaluate_tasks(model, tasks, of_tasks | template, options | {"base": base}, as_json)
        return
    if behaviour:
        _evaluate_behaviour(model, base, of_behaviour | template, options, as_json)
        return
    on_runtime = options["kv_dtype"] or options["arithmetic"]
    options["backend"] = options["backend"] or ("runtime" if on_runtime else "reference")
    _check_options(base, options)
    result, layers = _measure(model, base, options)
    provenance = provenance_of(model, base)
    if as_json:
        more = {"layers": layers.to_dict()} if layers else {}
        print_json({"model": model, "base": base} | result.to_dict() | {"provenance": provenance.to_dict()} | more)
    else:
        _print(result, layers, base)
        print_provenance(model, base, provenance)


def _evaluate_tasks(model: str, tasks: str, asked: dict[str, Any], options: dict[str, Any], as_json: bool) -> None:
    of_perplexity = _of_perplexity(options) | {name: options[name] for name in ("base", "head_bits", "arithmetic")}
    _refuse(of_perplexity, "is about perplexity, which --tasks does not measure; leave one out")
    from quantkit.cli.eval_tasks import evaluate_tasks

    device, backend = options["device"], options["backend"] or "runtime"
    dtype = options["dtype"] or ("bfloat16" if backend == "runtime" and device != "cpu" else "float32")
    ranks = {name: options[name] for name in _RANKS}
    evaluate_tasks(model, tasks, **asked, device=device, dtype=dtype, backend=backend, ranks=ranks, as_json=as_json)


def _evaluate_behaviour(
    model: str, base: str | None, asked: dict[str, Any], options: dict[str, Any], as_json: bool
) -> None:
    _refuse(_of_perplexity(options), "is about perplexity, which --behaviour does not measure; leave one out")
    if options["backend"] == "reference":
        raise click.UsageError("--behaviour runs on the engine; leave --backend reference out")
    if asked["behaviour_gate"] and not base:
        raise click.UsageError("--behaviour-gate compares with another model; name it with --base")
    from quantkit.cli.eval_behaviour import evaluate_behaviour

    engine = {name: options[name] for name in ("device", "dtype", "head_bits", "arithmetic", *_RANKS)}
    evaluate_behaviour(model, base, **asked, engine=engine, as_json=as_json)


def _of_perplexity(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _PERPLEXITY_OPTIONS} | {"seed": options["seed"] or None}  # 0: not given


def _refuse(given: dict[str, Any], why: str) -> None:
    """Refuses the first of the options that was given: it would have no effect."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise click.UsageError(f"{_flag(name)} {why}")


def _check_options(base: str | None, options: dict[str, Any]) -> None:
    """Refuses options that would have no effect."""
    for name in ("kl_windows", "null_kl", "layers"):
        if options[name] and not base:
            raise click.UsageError(f"{_flag(name)} compares with another model; name it with --base")
    for name in ("step_tokens", "head_bits", "kv_dtype", "arithmetic"):
        if options[name] and options["backend"] != "runtime":
            raise click.UsageError(f"{_flag(name)} is about the runtime; add --backend runtime")
    for name in _RANKS:
        if (options[name] is True or options[name] > 1) and options["backend"] != "runtime":
            raise click.UsageError(f"{_flag(name)} is about the runtime; add --backend runtime")
    if options["exact_activations"] and options["backend"] == "runtime":
        raise click.UsageError("--exact-activations needs --backend reference; the runtime rounds as the format says")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _measure(model: str, base: str | None, options: dict[str, Any]) -> tuple[QualityResult, LayerErrors | None]:
    from quantkit.bundled import HELDOUT_TEXT
    from quantkit.eval.quality.evaluate import evaluate
    from quantkit.eval.quality.layer_errors import layer_errors
    from quantkit.eval.quality.windows import read_windows
    from quantkit.reference import load_tokenizer

    text, compared = options["text"] or HELDOUT_TEXT, options["kl_windows"] or COMPARED_WINDOWS
    how = {name: options[name] for name in (*_HOW, *_RANKS)}
    how["activations"] = "exact" if options["exact_activations"] else "served"
    begin = not options["no_start_token"]
    how |= {"start_token": begin, "null_kl": options["null_kl"]}
    result = evaluate(model, base, text=text, compared_windows=compared, watch=progress_bar, **how)
    if not (base and options["layers"]):
        return result, None
    asked = {"window": options["window"], "max_windows": compared, "begin": begin}
    windows = read_windows(load_tokenizer(model), text, **asked)
    with progress_bar("layers") as advance:
        return result, layer_errors(base, model, windows.ids[: result.compared_windows], options["device"], advance)


def _print(result: QualityResult, layers: LayerErrors | None, base: str | None) -> None:
    click.echo(f"perplexity {result.perplexity.text('.4f')}, {result.bits_per_byte.text('.4f')} bits per byte")
    if result.kl and result.kl_p99 and result.top1_agreement and result.perplexity_ratio:
        click.echo(f"against {base} on the first {result.compared_windows} of the windows:")
        worst = f"99 of 100 tokens up to {result.kl_p99.text('.4f')}"
        click.echo(f"  KL divergence {result.kl.text('.5f')} nats per token, {worst}")
        if result.null_kl:
            click.echo(f"  {base} itself, computed so, has {result.null_kl.text('.5f')} against its own float32")
        click.echo(f"  first choice the same for {result.top1_agreement.text('.2%')} of tokens")
        click.echo(f"  perplexity times {result.perplexity_ratio.text('.4f')}")
    if layers:
        rows = [
            (str(one.layer), one.linear, f"{one.error:.4f}", f"{layers.blocks[one.layer]:.4f}")
            for one in layers.worst(_WORST)
        ]
        columns = ("layer", "linear", "its own relative error", "accumulated after the block")
        print_table("Where most is lost", columns, rows)
    meaning = "one window: not enough windows for intervals"
    if result.windows > 1:
        meaning = "[ ]: 95 % confidence interval, bootstrap over windows"
    click.echo(f"{meaning}\n{result.protocol}\n{result.arithmetic}")
