"""Every fact in quantkit/arch/ against small random models that transformers builds."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quantkit.arch import FAMILIES, GPT_OSS, Family, family_of
from quantkit.errors import InputError
from quantkit.expert_modules import file_name, module_name, separate_experts
from quantkit.stages import Stage

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
TOKENS = torch.tensor([[5, 17, 90, 3, 44, 8, 61, 29]])

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def config_class(family: Family) -> Any:
    return transformers.AutoConfig.for_model(family.model_type).__class__


def config_of(family: Family, **changes: Any) -> Any:
    """Eager attention: some versions of transformers leave out soft caps in their faster kinds."""
    sizes = SIZES | LATENTS if family.latent else SIZES
    return config_class(family)(**(sizes | {"attn_implementation": "eager"} | changes))


@cache
def cached_model(family: Family, changes: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, family.architecture)(config_of(family, **dict(changes))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # fresh norms are all alike and would hide mistakes
            nn.init.uniform_(parameter, 0.2, 0.8)
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.1)
    separate_experts(blocks_of(model, family), family, file_of(family, **dict(changes)))
    return model


def model_of(family: Family, **changes: Any) -> Any:
    """A model with random weights; tests that change it take a copy."""
    return cached_model(family, tuple(changes.items()))


def file_of(family: Family, **changes: Any) -> dict[str, Any]:
    """What config.json of such a model holds."""
    values: dict[str, Any] = config_of(family, **changes).to_dict()
    return values


def has_experts(family: Family) -> bool:
    return any(stage.experts for stage in family.stages(1, file_of(family)))


def blocks_of(model: Any, family: Family) -> Any:
    return model.get_submodule(family.blocks)


@every_family
def test_is_found_by_model_type_and_names_its_class(family: Family) -> None:
    assert family_of(file_of(family)) is family
    assert config_of(family).model_type == family.model_type
    assert type(model_of(family)).config_class is config_class(family)


@every_family
def test_linears_are_exactly_those_of_the_blocks(family: Family) -> None:
    model, config = model_of(family), file_of(family)
    inside = {file_name(family, name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inside -= {"lm_head", *(f"{family.blocks}.{layer}.{stage.gate}" for layer in range(2)
                            for stage in family.stages(layer, config))}  # fmt: skip
    linears = family.linears(config)
    assert set(linears) == inside
    assert len(linears) == len(inside)
    assert all(name.startswith(f"{family.blocks}.") for name in inside)


@every_family
def test_linears_come_in_forward_order_and_stages_share_their_input(family: Family) -> None:
    """Experts run one after the other, those that a token was sent to; what shares an input are the linears of one.

    Latent attention runs what makes queries before it comes to the next linear that reads hidden states.
    """
    model, config = model_of(family), file_of(family)
    seen: list[tuple[str, int]] = []
    hooks = [
        model.get_submodule(module_name(family, name)).register_forward_pre_hook(
            lambda _, args, name=name: seen.append((name, args[0].data_ptr()))
        )
        for name in family.linears(config)
    ]
    model(TOKENS)
    for hook in hooks:
        hook.remove()
    address = dict(seen)
    by_layer = family.linears_by_stage(config)
    assert len(by_layer) == SIZES["num_hidden_layers"]
    for layer in range(len(by_layer)):
        prefix = f"{family.blocks}.{layer}."
        stages = family.stages(layer, config)
        dense = [prefix + (stage.names[0] if family.latent else name)
                 for stage in stages if stage.part.kind == "attention" or not has_experts(family)
                 for name in stage.names]  # fmt: skip
        dense = list(dict.fromkeys(dense))
        assert [name for name, _ in seen if name in dense] == dense
        for group in (each.names for stage in stages for each in stage.by_expert):
            names = [prefix + name for name in group]
            reached = [name for name, _ in seen if name in names]
            assert reached == names or (has_experts(family) and not reached)
            assert len({address[name] for name in reached}) <= 1


@every_family
@pytest.mark.parametrize("asked", [False, True])
def test_biases(family: Family, asked: bool) -> None:
    changes: dict[str, Any] = {"attention_bias": asked, "mlp_bias": asked, "qkv_bias": asked}
    block = blocks_of(model_of(family, **changes), family)[0]
    biased = {
        file_name(family, name)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    }
    assert set(family.biased(0, file_of(family, **changes))) == biased


def test_norms_of_heads_where_config_json_decides() -> None:
    family = FAMILIES["glm4_moe"]
    for given in (True, False):
        names = dict(model_of(family, use_qk_norm=given).named_parameters())
        assert ("model.layers.0.self_attn.q_norm.weight" in names) == given
        assert family.has_qk_norm(file_of(family, use_qk_norm=given)) == given


@every_family
def test_norms(family: Family) -> None:
    model = model_of(family)
    block = blocks_of(model, family)[0]
    norms = {name for name, _ in block.named_modules() if "norm" in name}
    parts = {stage.part for stage in family.stages(0, file_of(family))}
    expected = {norm for part in parts for norm in (part.norm, part.post_norm) if norm}
    folds = [stage.fold for stage in family.stages(0, file_of(family)) if stage.fold]
    expected |= {fold.producer for fold in folds if fold.kind == "norm"}
    if family.has_qk_norm(file_of(family)):
        expected |= {"self_attn.q_norm", "self_attn.k_norm"}
        assert block.self_attn.q_norm.weight.numel() == family.size_of_head(file_of(family))
    assert norms == expected

    x = torch.randn(3, SIZES["hidden_size"])
    norm = block.input_layernorm
    unit = norm(x) / (norm.weight + family.norm_offset)
    torch.testing.assert_close(unit, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), rtol=1e-4, atol=1e-5)


@every_family
def test_what_a_silent_config_means(family: Family) -> None:
    silent = config_class(family)()
    assert getattr(silent, family.activation_key) == family.activation
    assert silent.rms_norm_eps == family.norm_eps
    rotated = silent.rope_parameters.get("partial_rotary_factor", 1.0)  # of layer types where these differ: 1
    assert rotated == family.partial_rotary_factor
    assert silent.tie_word_embeddings == family.tie_word_embeddings == family.tied({})
    assert family.tied({"tie_word_embeddings": not family.tie_word_embeddings}) != family.tie_word_embeddings
    assert getattr(silent, "query_pre_attn_scalar", None) == family.query_pre_attn_scalar
    assert getattr(silent, "attn_logit_softcapping", None) == family.attn_logit_softcapping
    assert getattr(silent, "final_logit_softcapping", None) == family.final_logit_softcapping
    sizes = {"hidden_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    assert family.size_of_head(sizes) == (getattr(config_class(family)(**sizes), "head_dim", None) or 4096 // 8)


@every_family
def test_attention_scale_and_embedding_scale(family: Family) -> None:
    changes = {} if family.query_pre_attn_scalar is None else {"query_pre_attn_scalar": 49}
    model = model_of(family, **changes)
    latent = family.latent_sizes(file_of(family))
    basis = 49 if changes else latent.query if latent else family.size_of_head(file_of(family))
    assert blocks_of(model, family)[0].self_attn.scaling == pytest.approx(basis**-0.5)

    embedding = model.model.embed_tokens
    factor = SIZES["hidden_size"] ** 0.5 if family.scaled_embedding else 1.0
    torch.testing.assert_close(embedding(TOKENS), embedding.weight[TOKENS] * factor)


@every_family
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_caps(family: Family, key: str) -> None:
    """Gemma 3 reads a cap of the final logits only; its attention never applies one."""
    applies = hasattr(config_class(family)(), key) and (
        key == "final_logit_softcapping" or family.attn_logit_softcapping is not None
    )
    sharp = {"query_pre_attn_scalar": 1} if family.query_pre_attn_scalar else {}
    plain = model_of(family, **sharp, **{key: None})(TOKENS).logits
    capped = model_of(family, **sharp, **{key: 0.01})(TOKENS).logits
    assert bool(torch.equal(plain, capped)) != applies


@every_family
def test_sliding_window_of_every_layer(family: Family) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 8, "sliding_window": 4, "max_window_layers": 5}
    for more in ({}, {"use_sliding_window": True}):
        config = config_of(family, **changes, **more)
        assert [family.window(config.to_dict(), layer) for layer in range(8)] == windows_in(config, family)
    file = config_of(family, **changes).to_dict()
    file.pop("layer_types", None)  # as in most published config.json files
    assert [family.window(file, i) for i in range(8)] == windows_in(config_of(family, **changes), family)
    for given in ({}, {"use_sliding_window": True, "max_window_layers": 0}):
        assert family.window(given, 0) == windows_in(config_class(family)(**given), family)[0]
    assert family.window({"sliding_window": None}, 0) is None


def windows_in(config: Any, family: Family) -> list[int | None]:
    known = config_class(family)()  # configs take any key; those that mean something are there without being given
    width = config.sliding_window if hasattr(known, "sliding_window") else None
    types = config.layer_types if hasattr(known, "layer_types") else ["sliding_attention"] * config.num_hidden_layers
    return [width if kind == "sliding_attention" else None for kind in types]


def layer_types(family: Family) -> list[str] | None:
    return ["sliding_attention"] * 2 if hasattr(config_class(family)(), "layer_types") else None


@every_family
def test_a_window_limits_what_a_layer_sees(family: Family) -> None:
    """Two layers with a window of 3 let token 7 see back to token 3; without windows it sees all."""
    config = config_of(family, sliding_window=3, use_sliding_window=True, layer_types=layer_types(family))
    torch.manual_seed(0)
    model = getattr(transformers, family.architecture)(config).eval()
    changed = TOKENS.clone()
    changed[0, 2] = 77
    # nearly: which tokens go to an expert with it changes how a token's sums are rounded
    same = torch.allclose(model(TOKENS).logits[0, 7], model(changed).logits[0, 7], rtol=0, atol=1e-6)
    assert same == (family.window(config.to_dict(), 0) == 3)


@every_family
def test_rope(family: Family) -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if family is GPT_OSS else {}
    config = config_of(family, partial_rotary_factor=0.5, **plain)  # YaRN, its default, heeds the factor
    rotary = getattr(transformers, family.architecture)(config).model.rotary_emb
    frequencies = {name: buffer for name, buffer in rotary.named_buffers() if "original" not in name}
    rotated = {2 * buffer.numel() for buffer in frequencies.values()}
    head = family.size_of_head(config.to_dict())
    assert rotated == {head // 2 if family.rope == "partial" else head}
    by_type = any("sliding_attention" in name for name in frequencies)
    assert by_type == (family.rope == "per-layer-type")


def fold_in(model: Any, family: Family, stages: list[Stage], config: dict[str, Any]) -> None:
    """Moves random input scales of stages into the producer that they have in common, as AWQ does."""
    stage = stages[0]
    block, fold = blocks_of(model, family)[1], stage.fold
    assert fold is not None
    producer = block.get_submodule(module_name(family, fold.producer))
    columns = block.get_submodule(module_name(family, stage.linears[0])).in_features
    scales = torch.rand(family.folded_outputs(fold, columns, config)) + 0.5
    if fold.kind == "norm":
        assert producer.weight.shape == scales.shape
        producer.weight.data = (producer.weight.data + family.norm_offset) / scales - family.norm_offset
    else:
        producer.weight.data[-len(scales) :] /= scales.unsqueeze(1)
        if producer.bias is not None:
            producer.bias.data[-len(scales) :] /= scales
    if fold.kind == "value":
        sharing = config["num_attention_heads"] // config["num_key_value_heads"]
        scales = scales.view(-1, 1, family.size_of_head(config)).expand(-1, sharing, -1).flatten()
    also = list(dict.fromkeys(name for each in stages if each.fold for name in each.fold.also))
    for name in [name for each in stages for name in each.linears] + also:
        consumer = block.get_submodule(module_name(family, name))
        assert consumer.weight.shape[1] == len(scales)
        consumer.weight.data *= scales


@every_family
def test_folds_cover_every_stage_and_leave_the_model_unchanged(family: Family) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    config = file_of(family, **biases)
    before = model_of(family, **biases)(TOKENS).logits
    stages = family.stages(1, config)
    unfolded = {stage.role for stage in stages if stage.fold is None}
    assert unfolded == ({"output"} if family.latent else {"down"} if family.clipped else set())
    producers: dict[str, list[Stage]] = {}
    for stage in stages:
        for each in stage.by_expert:
            if each.fold is not None:
                producers.setdefault(each.fold.producer, []).append(each)
    for kind in ("norm", "value", "up"):
        model = copy.deepcopy(model_of(family, **biases))
        for readers in producers.values():
            if readers[0].fold is not None and readers[0].fold.kind == kind:
                fold_in(model, family, readers, config)
        torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-4, atol=1e-4)


def test_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"'qwen22' is not supported; did you mean 'qwen2'\? Known: deepseek_v2, .*phi3"
    ):
        family_of({"model_type": "qwen22"})


def test_missing_model_type() -> None:
    with pytest.raises(InputError, match="no model_type; known families: deepseek_v2"):
        family_of({})


def test_models_with_images_are_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="'gemma3' takes more than text"):
        family_of({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})


@pytest.mark.parametrize("layers", [None, 0, True, "2"])
def test_wrong_layer_count(layers: object) -> None:
    with pytest.raises(InputError, match=r"'num_hidden_layers' is .*positive whole number"):
        FAMILIES["llama"].linears({"num_hidden_layers": layers})


def test_families_are_values() -> None:
    assert len(set(FAMILIES.values())) == len(FAMILIES)
