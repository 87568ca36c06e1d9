"""quantkit inspect"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quantkit.cli.common import json_option, print_json, print_table
from quantkit.errors import InputError
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.eval.plan.on_gpu import OnGpu
    from quantkit.formats.engine_rules import EngineName
    from quantkit.inspection import Inspection
    from quantkit.launch import Target, Wishes


_LAUNCH = (
    "Print the command that serves it with an engine (vllm, sglang, tensorrt-llm, tgi, llama.cpp, ollama, "
    "transformers, quantkit), without a name with every one; `kubernetes`: a manifest for Ray."
)


@click.command("inspect", short_help="Show what is in a checkpoint and which engines load it.")
@click.argument("checkpoint", required=False)
@click.option("--gpu", metavar="NAME", help="What the runtime would do on this GPU, here or not: l4, a100-80, h100.")
@click.option("--launch", is_flag=False, flag_value="commands", metavar="[ENGINE|kubernetes]", help=_LAUNCH)
@click.option("--tensor-parallel", default=1, metavar="N", help="With --launch: GPUs that share every layer.")
@click.option("--pipeline-parallel", default=1, metavar="N", help="With --launch: stages of consecutive layers.")
@click.option("--max-context", type=int, metavar="N", help="With --launch: tokens of a request; default: the model's.")
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="With --launch: where the server listens.")
@click.option("--kv-dtype", type=click.Choice(("fp8", "int8", "int4")), help="With --launch: of the KV cache.")
@click.option("--chat-template", metavar="FILE", help="With --launch: Jinja; TGI: a tokenizer config, Ollama: Go.")
@click.option("--replicas", default="1,2", show_default=True, metavar="MIN,MAX", help="With --launch kubernetes.")
@click.option("--image", metavar="NAME", help="With --launch kubernetes: one with quantkit and Ray in it.")
@json_option
def command(
    checkpoint: str | None,
    gpu: str | None,
    launch: str | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    max_context: int | None,
    port: int | None,
    kv_dtype: str | None,
    chat_template: str | None,
    replicas: str,
    image: str | None,
    as_json: bool,
) -> None:
    """Show format, bits, groups, bytes per part and per layer of CHECKPOINT, and which engines load it.

    \b
    quantkit inspect demo
    quantkit inspect demo-nf4 --json
    quantkit inspect org/model-fp8 --gpu a100-80
    quantkit inspect org/model --launch --tensor-parallel 2
    quantkit inspect model.gguf --launch ollama
    quantkit inspect org/model --launch kubernetes --replicas 1,4 > service.yaml
    """
    if launch is not None and checkpoint is None:
        checkpoint, launch = launch, "commands"  # `inspect --launch PATH`
    if checkpoint is None:
        raise InputError("which checkpoint? Give a folder, a hub name or 'demo'")
    if launch is not None:
        if gpu is not None:
            raise InputError("--gpu and --launch print different things; give one of them")
        from quantkit.launch import Wishes, read_target

        engines = _engines(launch)
        target = read_target(checkpoint, tensor=tensor_parallel, pipeline=pipeline_parallel, max_context=max_context)
        if engines:
            _print_commands(target, Wishes(port, kv_dtype, chat_template), engines, as_json=as_json)
        else:
            _print_manifest(target, _replicas(replicas), image, as_json=as_json)
        return
    from quantkit.inspection import inspect_checkpoint

    there = None if gpu is None else _look(checkpoint, gpu)
    found = inspect_checkpoint(checkpoint)
    if as_json:
        print_json(found.to_dict() | ({} if there is None else {"gpu": there.to_dict()}))
        return
    _print(found)
    if there is not None:
        print_table(there.title, ("what", "answer"), there.rows())
        click.echo(there.footer())


def _look(checkpoint: str, gpu: str) -> OnGpu:
    from quantkit.eval.plan.on_gpu import look_on_gpu

    return look_on_gpu(checkpoint, gpu)


def _engines(launch: str) -> tuple[EngineName, ...]:
    """Those whose commands are asked for; none where it is the manifest."""
    from quantkit.launch.commands import ORDER

    by_name = {engine.lower(): (engine,) for engine in ORDER} | {"commands": ORDER, "kubernetes": ()}
    if launch.lower() not in by_name:
        names = ", ".join((*(engine.lower() for engine in ORDER), "kubernetes"))
        raise InputError(f"--launch is '{launch}', but must be one of {names}, or nothing for every engine")
    return by_name[launch.lower()]


def _print_commands(target: Target, wishes: Wishes, engines: tuple[EngineName, ...], *, as_json: bool) -> None:
    from quantkit.launch import launches

    found = launches(target, wishes, engines)
    if as_json:
        print_json({"checkpoint": target.given, "launch": [one.to_dict() for one in found]})
    else:
        click.echo("\n".join(line for one in found for line in one.lines()))


def _print_manifest(target: Target, replicas: tuple[int, int], image: str | None, *, as_json: bool) -> None:
    from quantkit.launch import IMAGE, manifest, manifest_text

    made = manifest(target, replicas=replicas, image=image or IMAGE)
    if as_json:
        print_json({"checkpoint": target.given, "manifest": made})
    else:
        click.echo(manifest_text(target, made), nl=False)


def _replicas(text: str) -> tuple[int, int]:
    low, comma, high = text.partition(",")
    try:
        return int(low), int(high if comma else low)
    except ValueError:
        raise InputError(f"--replicas is '{text}', but must be the fewest and the most of them, such as 1,4") from None


def _print(found: Inspection) -> None:
    from quantkit.formats.kv_scheme import describe_summary

    method = found.quant_method or "not quantized"
    click.echo(f"{found.folder}: {found.model_type}, {found.dtype}, {method}")
    click.echo(
        f"{found.parameters:,} parameters in {human_bytes(found.bytes)}: {found.bits_per_weight:.2f} bits each"
        + (f", {found.quantized_bits_per_weight:.2f} in quantized layers" if found.quantized_bits_per_weight else "")
    )
    if found.kv_scales:
        click.echo(f"scales of an FP8 cache: {describe_summary(found.kv_scales)}")
    if found.gguf_types:
        types = [(kind, count.tensors, f"{count.bits_per_weight:.2f}") for kind, count in found.gguf_types.items()]
        print_table("Types in the file", ("type", "tensors", "bits per weight"), types)
    elif found.schemes:
        print_table("Schemes", ("scheme", "modules"), list(found.schemes.items()))
    _sizes("Bytes per part", "part", found.part_bytes, found.bytes)
    _sizes("Bytes per layer", "layer", found.layer_bytes, found.bytes)
    rows = [(verdict.engine, verdict.answer, verdict.remark, verdict.evidence) for verdict in found.engines]
    print_table("Engines", ("engine", "loads", "remark", "evidence"), rows)


def _sizes(title: str, what: str, sizes: dict[str, int], total: int) -> None:
    rows = [(name, human_bytes(size), f"{100 * size / total:.1f} %") for name, size in sizes.items()]
    print_table(title, (what, "bytes", "share"), rows)
