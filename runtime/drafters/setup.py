"""What `--speculative` asks for, made ready: checked before anything is loaded, loaded beside the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.kernels.attention.decode_plan import MOST_NODES
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.drafters.draft_model import DraftModel, ModelDrafter
from quantkit.runtime.drafters.eagle import EagleDrafter
from quantkit.runtime.drafters.eagle_setup import EagleHead, find_eagle
from quantkit.runtime.drafters.medusa import MedusaDrafter
from quantkit.runtime.drafters.medusa_heads import MedusaHeads, Target, load_heads
from quantkit.runtime.drafters.ngram import NgramDrafter
from quantkit.runtime.drafters.published_heads import PublishedHeads, find_published, load_published
from quantkit.runtime.drafters.self_draft import make_self_draft
from quantkit.runtime.drafters.shared_tokens import UNKNOWN, Renumbered, match_tokens
from quantkit.runtime.engine.speculation import Speculation
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs
from quantkit.runtime.model.config import ModelConfig, read_model_config
from quantkit.runtime.model.loading import load_weights
from quantkit.sources import model_folder

_TREE_ROWS = 64  # of a tree in attention, new tokens times query heads of a KV head (`kernels/attention/decode.py`)
_HEADS_SHARE = 0.01  # of a step, for each guess: heads are small

Draft = DraftModel | EagleHead  # what has a cache of its own beside the model's
MakeDrafter = Callable[[Draft], ModelDrafter | EagleDrafter]


def find_draft(target: Checkpoint, config: ModelConfig, options: EngineOptions) -> Draft | None:
    """The draft model or EAGLE head that the options name, after a look at whether it speaks the target's language."""
    asked = options.speculation
    if asked is None:
        return None
    dtype = options.torch_dtype(target.dtype)
    if asked.kind == "self":
        return make_self_draft(target, config, asked.what, dtype, options.torch_device)
    if asked.kind == "eagle":
        return find_eagle(asked.what, config, dtype, options)
    if asked.kind != "draft":
        return None
    checkpoint = Checkpoint(model_folder(asked.what))
    draft = read_model_config(checkpoint.config)
    numbers = match_tokens(target.folder, config.vocab, checkpoint.folder, draft.vocab, asked.what)
    if numbers is not None:
        checkpoint, draft = Renumbered(checkpoint, numbers), replace(draft, vocab=config.vocab)
    return DraftModel(
        raw=checkpoint.config,
        config=draft,
        load=lambda whole, kv_dtype: load_weights(checkpoint, draft, dtype, options.torch_device, kv_dtype=kv_dtype),
        size=weight_bytes(checkpoint, dtype),
        unknown=tuple(number for number, row in enumerate(numbers or ()) if row == UNKNOWN),
    )


def find_medusa(target: Checkpoint, options: EngineOptions) -> MedusaHeads | PublishedHeads | None:
    """The heads that the options name, loaded, our own or published ones; those of another model are refused."""
    asked = options.speculation
    if asked is None or asked.kind != "medusa":
        return None
    published, device, dtype = find_published(asked.what), options.torch_device, options.torch_dtype(target.dtype)
    if published is not None:
        return load_published(published, Target.of(target), device, dtype)
    return load_heads(asked.what, Target.of(target), device, dtype)


def make_speculation(
    options: EngineOptions,
    draft: Draft | None,
    make_drafter: MakeDrafter,
    heads: MedusaHeads | PublishedHeads | None,
    runner: Runner,
) -> Speculation:
    """For an engine whose memory is planned; `make_drafter` gives a draft model its cache."""
    asked = options.speculation
    if asked is None:
        return Speculation()
    seconds = runner.graphs.seconds if runner.graphs is not None else None
    if heads is not None:
        runner.keeps_hidden = True
        most = min(asked.most, most_nodes(runner.decoder.config) - 1)
        guesser = MedusaDrafter(heads, runner.decoder, runner.device_rows, most)
        costs = Costs(seconds, draft_share=_HEADS_SHARE)
        policy = Policy(guesser.most, costs, asked.adaptive, alike=bool(guesser.tree), deepest=heads.tree.depth)
        return Speculation(guesser, policy, device=guesser, tree=guesser.tree, overlaps=options.overlaps)
    if draft is not None:
        drafter = make_drafter(draft)
        costs = Costs(seconds, drafter.loop.seconds)
        policy = Policy(asked.most, costs, asked.adaptive, alike=runner.graphs is not None, unread=drafter.unread)
        early = drafter if options.overlaps or isinstance(drafter, EagleDrafter) else None
        return Speculation(
            drafter, policy, device=drafter, early=early, capture=drafter.capture, overlaps=options.overlaps
        )
    if asked.kind != "ngram":
        raise InputError(f"speculative is '{options.speculative}', but a shape has no such draft; use ngram")
    costs = Costs(seconds, draft_share=0.0)
    policy = Policy(asked.most, costs, asked.adaptive, alike=runner.graphs is not None)
    return Speculation(NgramDrafter(), policy, overlaps=options.overlaps)


def most_nodes(config: ModelConfig) -> int:
    """New tokens of a sequence that attention takes as a tree. Over latents heads are cut into blocks, too."""
    return MOST_NODES if config.latent is not None else _TREE_ROWS // (config.heads // config.kv_heads)


def check_draft_context(draft: Draft | None, max_context: int) -> None:
    if draft is not None and draft.config.max_positions < max_context:
        raise InputError(
            f"the draft was made for {draft.config.max_positions} positions, but contexts go up to {max_context}; "
            f"use --max-context {draft.config.max_positions}, or another draft"
        )
