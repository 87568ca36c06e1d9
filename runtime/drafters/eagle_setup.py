"""An EAGLE head made ready: looked at before anything is loaded, loaded beside the model, tapped into its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.build import attention_scratch
from quantkit.runtime.device.decode_graphs import padded_guesses
from quantkit.runtime.device.device_rows import LONGEST_PADDING
from quantkit.runtime.device.kv_cache import allocate_draft_cache
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.drafters.draft_loop import MOST_SEQUENCES
from quantkit.runtime.drafters.eagle import EagleDrafter
from quantkit.runtime.drafters.eagle_decoder import EagleDecoder
from quantkit.runtime.drafters.eagle_folder import EagleFacts, read_eagle
from quantkit.runtime.drafters.eagle_loop import EagleLoop
from quantkit.runtime.drafters.eagle_weights import EagleWeights, load_eagle
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.layers import Weights
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.model.rope import rope_tables
from quantkit.runtime.model.taps import Taps


@dataclass(frozen=True)
class EagleHead:
    """A head that is not loaded yet; `config` and `size` as those of a `DraftModel`."""

    facts: EagleFacts
    load: Callable[[Weights, str], EagleWeights]  # given the model's, and the `kv_dtype` of both
    size: int  # bytes of its weights, and of hidden states that wait for it

    @property
    def config(self) -> ModelConfig:
        return self.facts.config


def find_eagle(named: str, target: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> EagleHead:
    if options.tensor_parallel > 1:
        raise InputError(
            f"speculative is 'eagle={named}', but the hidden states that an EAGLE head reads are not gathered from the "
            "ranks of tensor parallel; use draft=PATH, medusa=PATH or ngram, or leave --tensor-parallel out"
        )
    facts = read_eagle(named, target)
    assert options.speculation is not None
    waiting = _most_tokens(options) + MOST_SEQUENCES * (1 + padded_guesses(options.speculation.most))
    return EagleHead(
        facts,
        load=lambda whole, kv_dtype: load_eagle(facts, whole, dtype, options.torch_device),
        size=weight_bytes(facts.checkpoint, dtype) + waiting * facts.state * dtype.itemsize,
    )


def make_eagle(
    head: EagleHead, own: EagleWeights, runner: Runner, max_context: int, options: EngineOptions
) -> EagleDrafter:
    """With a cache beside the model's. Call before the runner's graphs are captured."""
    device, dtype, facts = runner.device, own.block.before_mlp.dtype, head.facts
    runner.part.tap(Taps(facts.tapped, facts.feature, _most_tokens(options), dtype, device))
    tables, ops = rope_tables(facts.raw, facts.config, max_context, device), ops_for(device, dtype)
    decoder = EagleDecoder(facts, own, runner.decoder, tables, ops, attention_scratch(facts.config, options))
    cache = allocate_draft_cache(facts.config, runner.cache)
    cache.pages.view(torch.uint8).zero_()  # what nobody reads must be numbers: guesses see it
    assert options.speculation is not None
    graphs = runner.graphs is not None
    loop = EagleLoop(decoder, cache, ops, runner.device_rows, most=options.speculation.most, graphs=graphs)
    return EagleDrafter(ModelPart(decoder, cache, runner.device_rows), loop)


def _most_tokens(options: EngineOptions) -> int:
    """Of a step, padding included."""
    return max(options.budget, options.sequences, LONGEST_PADDING)
