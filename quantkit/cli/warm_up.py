"""quantkit warm-up"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import json_option, print_json, progress_bar
from quantkit.cli.engine_options import engine_options
from quantkit.errors import InputError, QuantkitError

if TYPE_CHECKING:
    from quantkit.kernels.card import Card


@click.command("warm-up", short_help="Compile the kernels of a model ahead.")
@click.argument("model", required=False)
@click.option("--gpu", metavar="NAME", help="Compile for this GPU, here or not: l4, a100-80, h100; default: this one.")
@click.option("--to", "archive", metavar="FILE", help="Write the kernels into one file.")
@click.option("--from", "given", metavar="FILE", help="Install the kernels of such a file first.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Default: one for each core.")
@engine_options
@json_option
def command(
    model: str | None,
    gpu: str | None,
    archive: str | None,
    given: str | None,
    processes: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile every kernel that an engine for MODEL needs into Triton's cache, in parallel and without loading weights.

    \b
    quantkit warm-up org/model
    quantkit warm-up org/model --gpu h100 --to h100.kernels
    quantkit warm-up --from h100.kernels
    quantkit warm-up org/model --from h100.kernels --kv-dtype fp8 --json

    Give the options that the engine will have: some of them change its kernels. With --gpu no GPU is needed. A file is
    for machines with the same Triton and the same quantkit; install files of people you trust, kernels are programs.
    """
    if model is None and given is None:
        raise InputError("which model? Give a folder, a hub name or 'demo', or a file with --from")
    if model is None and archive is not None:
        raise InputError("--to writes the kernels of a model; name it")
    if find_spec("triton") is None:
        raise InputError("kernels are compiled by Triton, which is not installed; pip install triton")
    began = time.perf_counter()
    found: dict[str, Any] = {}
    card, available = _card(gpu, float(options["memory_share"]), needed=model is not None)
    if given is not None:
        found["installed"] = _install(given, card)
    if model is not None:
        assert card is not None
        found |= _compile(model, options, card, available, processes, archive)
    found["seconds"] = round(time.perf_counter() - began, 1)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(_lines(found)))


def _card(gpu: str | None, share: float, *, needed: bool) -> tuple[Card | None, int]:
    """The card, and the bytes of it that quantkit may use."""
    if gpu is not None:
        from quantkit.eval.plan.gpus import find_card, find_gpu

        return find_card(gpu), int(find_gpu(gpu).memory * share)
    import torch

    if not torch.cuda.is_available():
        if needed:
            raise InputError("there is no GPU here; name the one to compile for with --gpu, such as --gpu h100")
        return None, 0
    from quantkit.kernels.card import card_of
    from quantkit.runtime.device.memory import available_memory

    device = torch.device("cuda", torch.cuda.current_device())
    return card_of(device), available_memory(device, share)


def _install(file: str, card: Card | None) -> dict[str, Any]:
    from quantkit.kernels.compiling.archive import install_archive

    return vars(install_archive(file, None if card is None else card.target))


def _compile(
    model: str, given: dict[str, Any], card: Card, available: int, processes: int | None, archive: str | None
) -> dict[str, Any]:
    from quantkit.kernels.compiling.pool import compile_all
    from quantkit.runtime.core.options import EngineOptions
    from quantkit.runtime.paper.launches import kernels_of

    began = time.perf_counter()
    with progress_bar("listing") as advance:
        kernels = kernels_of(model, EngineOptions(**given | {"device": "cpu"}), card, available, advance)
    listed = time.perf_counter()
    with progress_bar("compiling") as advance:
        compiled = compile_all(kernels, processes, advance)
    refused = [one for one in compiled if one.error]
    if len(refused) == len(compiled):
        raise QuantkitError(f"none of {len(compiled)} kernels compiles here: {refused[0].name}: {refused[0].error}")
    found: dict[str, Any] = {
        "model": model,
        "gpu": card.name,
        "target": card.target,
        "kernels": len({one.entry for one in compiled if one.entry}),
        "refused": [f"{one.name}: {one.error}" for one in refused],
        "listing_seconds": round(listed - began, 1),
        "compiling_seconds": round(time.perf_counter() - listed, 1),
    }
    if archive is not None:
        from quantkit.kernels.compiling.archive import write_archive

        found["written"] = vars(write_archive(archive, kernels, compiled)) | {"file": archive}
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    from quantkit.wording import human_bytes

    lines = []
    if "installed" in found:
        one = found["installed"]
        lines.append(f"installed {one['new']} of {one['kernels']} kernels for {one['target']}; the others were here")
    if "model" in found:
        lines.append(
            f"{found['kernels']} kernels for {found['gpu']} ({found['target']}) are compiled: "
            f"listed in {found['listing_seconds']} s, compiled in {found['compiling_seconds']} s"
        )
        lines += [f"refused by the compiler: {line}" for line in found["refused"]]
    if "written" in found:
        one = found["written"]
        lines.append(f"wrote {one['kernels']} kernels to {one['file']}: {human_bytes(one['bytes'])} before compression")
    return lines
