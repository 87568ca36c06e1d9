"""Options of the commands that start an engine: one definition, one meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from quantkit.cli.common import device_option, progress_bar

_Command = Callable[..., Any]

# As `runtime/core/kv_dtypes.py` has them, without importing torch for --help.
KV_DTYPE = "KV cache: bf16, fp8, int8, int4; auto: as activations, 8 bits if --max-context would not fit."

ARITHMETIC = "16-bit, fp8 or fp8-copy: of packed weights in steps of many tokens; default: as the checkpoint says."

_ENGINE = (
    device_option,
    click.option("--dtype", help="Dtype of activations; default: the checkpoint's, on a CPU float32."),
    click.option("--max-context", type=int, metavar="N", help="Tokens of prompt and answer; default: the model's."),
    click.option("--max-sequences", type=int, metavar="N", help="Most concurrent answers; default: 256, on a CPU 16."),
    click.option("--step-tokens", type=int, metavar="N", help="Most tokens in one step; default: 8192, on a CPU 512."),
    click.option("--kv-dtype", default="auto", show_default=True, help=KV_DTYPE),
    click.option("--arithmetic", metavar="HOW", help=ARITHMETIC),
    click.option(
        "--head-bits", type=int, metavar="8|4", help="Round the output layer to this many bits while loading."
    ),
    click.option("--kv-tokens", type=int, metavar="N", help="Tokens in the cache; default: what memory allows."),
    click.option(
        "--speculative",
        metavar="HOW",
        help="Speculative decoding: ngram,k=8, draft=PATH,k=4, self=RECIPE, medusa=PATH or eagle=PATH,k=4.",
    ),
    click.option(
        "--tensor-parallel", default=1, show_default=True, metavar="N", help="GPUs among which every layer is divided."
    ),
    click.option(
        "--expert-parallel",
        is_flag=True,
        help="With --tensor-parallel: divide the experts of a layer among the GPUs; models with experts need it.",
    ),
    click.option(
        "--pipeline-parallel",
        default=1,
        show_default=True,
        metavar="N",
        help="Stages of consecutive blocks, each on GPUs of its own.",
    ),
    click.option(
        "--micro-batches",
        type=int,
        metavar="N",
        help="Steps in flight through the stages; default: one for each stage.",
    ),
    click.option("--memory-share", default=0.9, show_default=True, help="Share of the GPU's memory to use."),
)
_SAMPLING = (
    click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(min=1), help="New tokens at most."),
    click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
    click.option(
        "--top-p", default=1.0, show_default=True, help="Sample from the most probable tokens up to this total."
    ),
    click.option("--top-k", default=0, show_default=True, help="Sample from the k most probable tokens; 0: all."),
    click.option(
        "--min-p", default=0.0, show_default=True, help="Sample from tokens this probable, relative to the best."
    ),
    click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1: fewer repetitions."),
    click.option("--seed", default=0, show_default=True, help="For sampling."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
)


def engine_options(command: _Command) -> _Command:
    """--device, --max-context and so on; the function gets them as `**options`, ready for `LLM`."""
    for option in reversed(_ENGINE):
        command = option(command)
    return command


def sampling_options(command: _Command) -> _Command:
    """--max-tokens, --temperature and so on; `sampling_params` takes them out of the options."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def sampling_params(options: dict[str, Any]) -> Any:
    """SamplingParams from the options of the command line, which are removed from `options`."""
    from quantkit.runtime.core.sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
    return SamplingParams(**{name: options.pop(name) for name in names})


def load_llm(model: str, options: dict[str, Any]) -> Any:
    """An LLM, with a progress bar while it loads."""
    from quantkit.runtime.llm import LLM

    with progress_bar("loading") as advance:
        return LLM(model, on_block=advance, **options)
