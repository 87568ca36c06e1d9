"""Ranks 1 and up: `run_worker` loads its part of the model and does what rank 0 says, until it says stop.

`python -m quantkit.runtime.parallel.rank_process` reads its job from stdin. A worker holds no tokens and knows no
requests. It ends by itself when the connection to rank 0 closes, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from quantkit.checkpoint import Checkpoint
from quantkit.devices import on_device
from quantkit.errors import QuantkitError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.build import check_kernels, make_part
from quantkit.runtime.device.decode_graphs import Key
from quantkit.runtime.device.keep_path import keep_path
from quantkit.runtime.device.key_centres import measured_centres
from quantkit.runtime.device.memory import AGREED, plan_memory, refine_plan
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.step_inputs import Step
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.lm_head import more_bytes
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ops import import_ahead
from quantkit.runtime.model.ranks import Ranks, local_config
from quantkit.runtime.parallel.channel import Channel, Kind, Lists, Talk, unpack, unpack_talk
from quantkit.runtime.parallel.door import greet
from quantkit.runtime.parallel.launcher import Address, Job
from quantkit.runtime.parallel.pipeline import Pipeline, ReceivedRows, make_store
from quantkit.runtime.parallel.rank_memory import available_to_rank, rank_weight_bytes, resident_bytes
from quantkit.runtime.parallel.step_message import batch_from_lists, moves_from_lists, step_from_lists
from quantkit.sources import model_folder

_OF_ANOTHER = ("gloo", "nccl", "connection", "socket", "store")  # in errors that another rank's end has caused
_CONNECT_SECONDS = 30.0
Frame = tuple[Kind, bytes]


def run_worker(ranks: Ranks, address: Address, model: str, options: EngineOptions) -> None:
    """Serves as one rank; `options` name its own device. Raises what it also tells rank 0."""
    connection = socket.create_connection((address.host, address.port), timeout=_CONNECT_SECONDS)
    connection.settimeout(None)
    greet(connection, ranks.rank, address.token)
    channel = Channel(connection)
    inbox: queue.Queue[Frame] = queue.Queue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
    try:
        wait_for_kernels = import_ahead(options.torch_device)
        with on_device(options.torch_device):
            wait_for_kernels()
            Worker(ranks, channel, inbox, *_load(ranks, address, model, options, channel, inbox)).run()
    except BaseException as error:
        channel.say(_describe(error))
        raise


def _describe(error: BaseException) -> Talk:
    """One line, and whether another rank's end has caused it."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, QuantkitError):
        return {"failed": first, "lost": False, "code": error.exit_code}
    lost = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_ANOTHER)
    return {"failed": f"{type(error).__name__}: {first}", "lost": lost, "code": QuantkitError.exit_code}


def _load(
    ranks: Ranks,
    address: Address,
    model: str,
    options: EngineOptions,
    channel: Channel,
    inbox: queue.Queue[Frame],
) -> tuple[ModelPart, Pipeline]:
    device = options.torch_device
    checkpoint = Checkpoint(model_folder(model))
    config = read_model_config(checkpoint.config)
    local, dtype = local_config(config, ranks), options.torch_dtype(checkpoint.dtype)
    check_kernels(local, dtype, options)
    size = rank_weight_bytes(checkpoint, config, dtype, ranks, options.arithmetic)
    size += more_bytes(config, dtype, options.head_bits, ranks)
    plan = plan_memory(local, size, dtype, options, available_to_rank(options, ranks))
    weights = load_weights(
        checkpoint, config, dtype, device, ranks=ranks, head_bits=options.head_bits, kv_dtype=options.kv_dtype,
        arithmetic=options.arithmetic,
    )  # fmt: skip
    plan = refine_plan(plan, local, dtype, options)
    loaded = {name: getattr(plan, name) for name in AGREED} | {"weights": resident_bytes(weights)}
    channel.say({"loaded": loaded})
    agreed: Talk = unpack_talk(inbox.get()[1])["agreed"]
    plan = replace(plan, **{name: agreed[name] for name in AGREED})
    store = make_store(address.host, agreed["store"], first=False)
    pipeline = Pipeline(ranks, store, channel.own_host, device, config.hidden, dtype)
    part = make_part(checkpoint.config, local, weights, plan, dtype, options, group=pipeline.group, ranks=ranks)
    channel.say({"ready": True})
    return part, pipeline


class Worker:
    """A loaded rank."""

    def __init__(
        self, ranks: Ranks, channel: Channel, inbox: queue.Queue[Frame], part: ModelPart, pipeline: Pipeline
    ) -> None:
        self._ranks = ranks
        self._channel = channel
        self._inbox = inbox
        self._part = part
        self._pipeline = pipeline
        self._steps: queue.SimpleQueue[tuple[Step, ReceivedRows]] = queue.SimpleQueue()  # whose rows come back

    @torch.inference_mode()
    def run(self) -> None:
        """Until rank 0 says stop."""
        does: dict[Kind, Callable[[Lists], None]] = {
            Kind.MOVES: lambda lists: self._part.move(moves_from_lists(lists)),
            Kind.STEP: lambda lists: self._step(step_from_lists(lists)),
            Kind.ROWS: lambda lists: self._rows(),
            Kind.BATCH: lambda lists: self._batch(batch_from_lists(lists, self._part.device), self._part.cache),
            Kind.CENTRE: lambda lists: self._centre(),
            Kind.LOGITS: self._logits,
            Kind.EMBED: self._embed,
            Kind.KEEP: self._keep,
            Kind.CAPTURE: self._capture,
            Kind.REPORT: lambda lists: self._channel.say({"busy": self._part.clock.take()}),
        }
        while (frame := self._inbox.get())[0] != Kind.STOP:
            does[frame[0]](unpack(frame[1]))

    def _step(self, step: Step) -> None:
        self._part.device_rows.update_table(step.table_index, step.table_pages)
        received = None if self._ranks.first_stage else self._pipeline.receive(len(step.inputs.ids))
        with self._part.clock:
            every, answered = self._part.run(step.inputs, received)
            if self._ranks.pipeline == 1 and step.inputs.logits_rows and not step.all_tokens:
                self._part.decoder.logits(answered.hidden)
        if self._ranks.pipeline == 1:
            return
        assert every is not None
        if self._ranks.first_stage and step.wanted:
            self._steps.put((step, self._pipeline.expect(len(step.wanted))))
        if not self._ranks.last_stage:
            self._pipeline.send_on(every)
        elif step.wanted:
            self._pipeline.send_back(every if step.all_tokens else answered.hidden)

    def _rows(self) -> None:
        """The rows of the oldest step that is on its way: this rank's part of their logits."""
        step, rows = self._steps.get_nowait()
        hidden = rows.wait()
        if not step.all_tokens:  # else rank 0 says which
            with self._part.clock:
                self._part.decoder.logits(hidden)

    def _centre(self) -> None:
        batch = batch_from_lists(unpack(self._inbox.get()[1]), self._part.device)
        with measured_centres(self._part, batch) as full:
            self._batch(batch, full)

    def _batch(self, batch: Batch, cache: KvCache) -> None:
        received = None if self._ranks.first_stage else self._pipeline.receive(len(batch.ids))
        hidden = self._part.decoder.hidden_states(batch, cache, received)
        if self._ranks.pipeline == 1:
            return
        rows = self._pipeline.expect(len(batch.ids)) if self._ranks.first_stage else None
        if self._ranks.last_stage:
            self._pipeline.send_back(hidden)
        else:
            self._pipeline.send_on(hidden)
        if rows is not None:
            rows.wait()

    def _logits(self, lists: Lists) -> None:
        weights = self._part.decoder.weights
        hidden = weights.embedding.new_empty(lists[0][0], weights.embedding.shape[1], dtype=weights.dtype)
        self._part.decoder.logits(self._pipeline.group.broadcast(hidden))

    def _embed(self, lists: Lists) -> None:
        ids = torch.empty(lists[0][0], dtype=torch.int64, device=self._part.device)
        self._part.decoder.embeddings(self._pipeline.group.broadcast(ids))

    def _keep(self, lists: Lists) -> None:
        sources, targets = (self._part.device_rows.to_device(kv_slots) for kv_slots in lists)
        keep_path(self._part.cache.planes, sources, targets)

    def _capture(self, lists: Lists) -> None:
        sequences, new, tree = lists[0]
        assert self._part.graphs is not None
        self._part.graphs.capture(Key(sequences, new, bool(tree)))


def _read(channel: Channel, inbox: queue.Queue[Frame]) -> None:
    while (frame := channel.read()) is not None:
        inbox.put(frame)
        if frame[0] == Kind.STOP:
            return
    os._exit(1)  # rank 0 is gone; the main thread may be waiting for it


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach the whole group: rank 0 decides when to end
        signal.signal(number, signal.SIG_IGN)
    job = Job.from_json(sys.stdin.read())
    try:
        run_worker(job.ranks, job.address, job.model, job.options)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # threads of libraries may not want to end


if __name__ == "__main__":
    main()
