"""The plan of a server with several models, made by a process of its own:

    python -m quantkit.runtime.server.models.memory_planning

Asking a GPU for its free memory takes some of it for as long as the process lives; this one ends before any engine
starts. It reads what is wanted from stdin and writes a line of JSON: the shares, or why there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.server.models.memory_split import MemoryNeed, MemoryShare, split_memory
from quantkit.runtime.server.settings import ServerSettings, parse_parts

_NO_END = 1 << 60  # bytes


@dataclass(frozen=True)
class EngineSpec:
    """An engine that should run; `options` are those of EngineOptions."""

    name: str
    model: str
    options: dict[str, Any]
    part: float = 1.0


def engine_specs(served: Sequence[ServerSettings]) -> list[EngineSpec]:
    """What a plan for these models must hold: an engine for each, and one for each reference."""
    parts = parse_parts(served[0].cache_split or "")
    wanted = []
    for settings in served:
        name = settings.names[0]
        part = parts.get(name, 1.0)
        wanted.append(EngineSpec(name, settings.model, settings.engine_options, part))
        if settings.shadow is not None:
            wanted.append(EngineSpec(shadow_name(name), settings.shadow, settings.shadow_engine_options, part))
    return wanted


def shadow_name(name: str) -> str:
    """Of a reference, in the plan."""
    return f"{name} (shadow)"


async def plan_engines(wanted: Sequence[EngineSpec]) -> list[MemoryShare]:
    """One share for each engine, in order; raises InputError where they do not fit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quantkit.runtime.server.models.memory_planning",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the server, which ends this
    )
    try:
        given = json.dumps([asdict(one) for one in wanted]).encode()
        written, _ = await process.communicate(given)
    except BaseException:  # a signal came
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    lines = written.decode().splitlines()
    if process.returncode or not lines:
        raise QuantkitError(f"the memory plan failed (exit code {process.returncode})")
    answer = json.loads(lines[-1])
    if "failed" in answer:
        raise (InputError if answer["code"] == InputError.exit_code else QuantkitError)(answer["failed"])
    return [MemoryShare(**share) for share in answer["shares"]]


def make_plan(wanted: Sequence[EngineSpec]) -> list[MemoryShare]:
    """The same in this process. Devices are planned one by one: what is free on one helps no other."""
    from quantkit.runtime.core.options import EngineOptions
    from quantkit.runtime.device.memory import available_memory

    needs = [_need(one) for one in wanted]
    shares: dict[str, MemoryShare] = {}
    for device in dict.fromkeys(need.device for need in needs):
        there = [(need, one) for need, one in zip(needs, wanted, strict=True) if need.device == device]
        options = EngineOptions(**there[0][1].options)
        available = available_memory(options.torch_device, options.memory_share)
        shares |= {share.name: share for share in split_memory([need for need, _ in there], available)}
    return [shares[one.name] for one in wanted]


def _need(one: EngineSpec) -> MemoryNeed:
    """From the headers of the files. What is wrong with a model alone is said here, with its name."""
    from quantkit.checkpoint import Checkpoint
    from quantkit.runtime.core.options import EngineOptions
    from quantkit.runtime.device.memory import plan_memory, weight_bytes
    from quantkit.runtime.drafters.setup import find_draft
    from quantkit.runtime.model.config import read_model_config
    from quantkit.runtime.model.lm_head import more_bytes
    from quantkit.runtime.parallel.peer_ranks import refuse_ranks
    from quantkit.sources import model_folder

    try:
        options = EngineOptions(**one.options)
        refuse_ranks(options, "one of several models")
        checkpoint = Checkpoint(model_folder(one.model))
        config = read_model_config(checkpoint.config)
        dtype = options.torch_dtype(checkpoint.dtype)
        draft = find_draft(checkpoint, config, options)
        size = weight_bytes(checkpoint, dtype, options.arithmetic) + more_bytes(config, dtype, options.head_bits)
        size += 0 if draft is None else draft.size
        beside = None if draft is None else draft.config
        most = plan_memory(config, size, dtype, options, available=_NO_END, draft=beside)
    except InputError as error:
        raise InputError(f"model '{one.name}': {error}") from error
    pages = 2
    if options.kv_tokens is not None:
        pages = most.pages
    elif options.max_context is not None:
        pages = -(-options.max_context // options.page_size) + 1
    return MemoryNeed(one.name, str(options.torch_device), most, min(pages, most.pages), one.part)


def main() -> None:
    wanted = [EngineSpec(**one) for one in json.load(sys.stdin)]
    try:
        answer: dict[str, Any] = {"shares": [asdict(share) for share in make_plan(wanted)]}
    except QuantkitError as error:
        answer = {"failed": str(error), "code": error.exit_code}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
