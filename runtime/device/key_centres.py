"""What all keys of a head have in common, which small caches keep them without.

Softmax does not change when one vector c is taken from every key that a query sees: q·(k - c) is q·k less q·c, the same
for all of them. Keys have large constant parts; without these, what is rounded is smaller, and so is the error.

A centre is measured at the start, once for all: one prompt of tokens drawn with a fixed seed goes through the model,
over a cache in full. Its keys are turned back to where they were before rope, and their mean is turned by what rope
does on average over the positions that are served: what turns fast comes to nothing, what turns slowly stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quantkit.devices import on_device
from quantkit.kernels.reference.elementwise import turn_pairs
from quantkit.runtime.core.kv_dtypes import KvKind
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.peers import Alone, Peers
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.rope import RopeTable

SAMPLE_TOKENS = 128  # of `demo`: 512, and text instead of drawn tokens, gave centres that are as good
_NEAR = 256.0  # positions below weigh about alike; beyond, each doubling of a context counts as the one before
_log = logging.getLogger("quantkit.runtime")


def why_uncentred(config: ModelConfig, kind: KvKind) -> str | None:
    """Why a model's keys are kept as they are; None: they are kept less their centres."""
    if kind.dtype.itemsize > 1:
        return "a cache in full rounds nothing that matters"
    if config.latent is not None:
        return "latents are keys and values in one"
    if config.attention_cap is not None:
        return "scores are capped, which a common shift changes"
    if config.family.sinks:
        return "attention sinks are scores that a shift of all keys does not reach"
    return None


def centre_keys(part: ModelPart, peers: Peers = Alone()) -> None:  # noqa: B008  (has no state)
    """Measures centres and puts them where the cache has some, on all ranks. Any step has room for so few tokens."""
    cache, config = part.cache, part.decoder.config
    if cache.key_centres is None:
        _log.debug("keys are kept without centres: %s", why_uncentred(config, cache.kind))
        return
    batch = _sample(config.vocab, min(SAMPLE_TOKENS, len(part.decoder.tables[0].cos)), cache)
    peers.tell_centring()
    with on_device(part.device), measured_centres(part, batch) as full:
        peers.coordinated(part.decoder).hidden_states(batch, full)


@contextmanager
def measured_centres(part: ModelPart, batch: Batch) -> Iterator[KvCache]:
    """Within it, the batch is computed over the cache that it gives; then this rank has the centres of its keys."""
    config, centres = part.decoder.config, part.cache.key_centres
    assert centres is not None
    pages, size = batch.page_table.shape[1], part.cache.page_size
    shape = (config.layers, 2, pages, config.kv_heads, size, config.head_dim)
    full = KvCache(torch.zeros(shape, dtype=part.decoder.weights.dtype, device=part.device))
    yield full
    for layer, table in enumerate(part.decoder.tables):
        keys = full.pages[layer, 0].transpose(1, 2).flatten(0, 1)[: len(batch.ids)]
        centres[layer] = centre_of(keys.float(), table)
    if part.cache.scales is not None:  # they are of whole keys: without this some could be cut
        part.cache.scales[:, 0] += centres.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max


def centre_of(keys: Tensor, table: RopeTable) -> Tensor:
    """[kv_heads, head_dim] of keys after rope, float32 [tokens, kv_heads, head_dim], at the first positions."""
    cos, sin = table.cos[: len(keys)], table.sin[: len(keys)]
    length = cos.square() + sin.square()  # some kinds of rope also make keys longer
    mean = turn_pairs(keys, cos / length, -sin / length).mean(0, keepdim=True)
    weight = 1.0 / (_NEAR + torch.arange(len(table.cos), device=keys.device))
    weight = (weight / weight.sum())[:, None]
    return turn_pairs(mean, *((weight * part).sum(0, keepdim=True) for part in (table.cos, table.sin)))[0]


def _sample(vocab: int, count: int, cache: KvCache) -> Batch:
    """One prompt at the beginning of a cache of its own."""
    device, size = cache.pages.device, cache.page_size
    ids = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(count, device=device)
    return Batch(
        ids=ids.to(device),
        positions=positions,
        kv_slots=positions,
        page_table=torch.arange(-(-count // size), dtype=torch.int32, device=device)[None],
        context_lengths=torch.tensor([count], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        max_queries=count,
        host_lengths=([0, count], [count]),
    )
