"""Scales of an FP8 cache, from their measurement to the cache of an engine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.arch import family_of
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.convert import convert
from quantkit.errors import InputError, StorageError
from quantkit.formats.kv_scheme import LARGEST, kv_cache_scheme, kv_strategy, scale_tensors, summary_of
from quantkit.kernels.reference.compare import relative_error
from quantkit.passes.kv_range import measure_kv_scales
from quantkit.pipeline import quantize
from quantkit.recipe import load_recipe
from quantkit.reference import load_reference
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.kv_cache import allocate_draft_cache
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.batch import KvCache
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.kv_scales import read_kv_scales
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine

CPU = torch.device("cpu")
DATA = Calibration(samples=2, seq_len=64)
RECIPE = ("rtn-w4g128-ct", "format.group_size=64")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`demo-draft` in 4 bits with scales of a strategy, made once."""
    made: dict[str, Path] = {}

    def make(strategy: str) -> Path:
        if strategy not in made:
            made[strategy] = tmp_path_factory.mktemp("scaled") / strategy
            recipe = load_recipe(RECIPE[0], (RECIPE[1], f"kv_scales={strategy}"))
            quantize("demo-draft", recipe, made[strategy], calibration=DATA, device="cpu", quality_windows=0)
        return made[strategy]

    return make


def start(folder: Path | str, kv_dtype: str, **more: Any) -> Engine:
    options = EngineOptions(device="cpu", dtype="float32", kv_dtype=kv_dtype, max_context=64, max_sequences=1, **more)
    return start_engine(folder, options)


def tokens_of(folder: Path) -> torch.Tensor:
    from quantkit.reference import load_tokenizer

    return DATA.tokens(load_tokenizer(folder), 64)


def largest_in_cache(folder: Path) -> torch.Tensor:
    """[layers, 2, kv_heads] of the calibration tokens, as the runtime keeps keys and values in full."""
    found = []
    for ids in tokens_of(folder):
        engine = start(folder, "auto")
        score_tokens(engine, ids)
        pages = engine.runner.cache.pages[:, :, 1:5]  # an engine's first pages, behind the one that pads
        found.append(pages.abs().amax(dim=(2, 4, 5)))
    return torch.stack(found).amax(0)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_are_of_what_the_quantized_model_keeps(strategy: str, scaled: Callable[[str], Path]) -> None:
    folder = scaled(strategy)
    checkpoint = Checkpoint(folder)
    expected = largest_in_cache(folder)
    if strategy == "tensor":
        expected = expected.amax(2, keepdim=True).expand_as(expected)
    found = read_kv_scales(checkpoint, read_model_config(checkpoint.config), CPU)
    assert found is not None
    torch.testing.assert_close(found * LARGEST, expected, rtol=2e-3, atol=0)
    assert checkpoint.config["quantization_config"]["kv_cache_scheme"] == kv_cache_scheme(strategy)
    shapes = {tuple(checkpoint.tensor(name).shape) for name in checkpoint.cache_names()}
    assert shapes == {(1,) if strategy == "tensor" else (found.shape[2], 1, 1)}


def test_the_engine_keeps_values_by_these_scales(scaled: Callable[[str], Path]) -> None:
    engine = start(scaled("attn_head"), "fp8")
    cache = engine.runner.cache
    ids = tokens_of(scaled("attn_head"))[0]
    logits = score_tokens(engine, ids, 16)
    assert cache.scales is not None
    assert cache.scales.unique().numel() > 4
    largest = cache.pages[:, :, 1:5].float().abs().amax(dim=(2, 4, 5))
    assert largest.max() == LARGEST  # what calibration saw uses all of the range, and nothing was cut
    other = start(scaled("attn_head"), "auto")
    full = score_tokens(other, ids, 16)
    assert_nothing_was_cut(cache, other.runner.cache)
    lost = (logits - full).norm()
    assert 0 < lost < 0.05 * full.norm()
    cache.scales.mul_(2.0**20)  # and what computes looks at them: all is rounded to zero
    assert (score_tokens(engine, ids, 16) - full).norm() > 4 * lost
    given = allocate_draft_cache(engine.config, cache, cache.scales).scales
    assert given is not None
    assert torch.equal(given, cache.scales)


def assert_nothing_was_cut(cache: KvCache, full: KvCache) -> None:
    """Keys are kept less their centres, by scales that were measured of whole keys."""
    assert cache.scales is not None
    assert cache.key_centres is not None
    largest = cache.pages[:, 0, 1:5].float().abs().amax(dim=(1, 3, 4))
    assert ((largest > 0.25 * LARGEST) & (largest < LARGEST)).all()
    kept = (
        cache.pages[:, 0, 1:5].float() * cache.scales[:, 0, None, :, None, None] + cache.key_centres[:, None, :, None]
    )
    assert relative_error(kept, full.pages[:, 0, 1:5]) < 0.05


def test_without_scales_they_are_one(quantized_draft: Callable[..., Path]) -> None:
    cache = start(quantized_draft(*RECIPE), "fp8").runner.cache
    assert cache.scales is not None
    assert (cache.scales[:, 1] == 1).all()
    assert (cache.scales[:, 0] >= 1).all()  # of keys, which their centres may make larger
    assert start(quantized_draft(*RECIPE), "auto").runner.cache.scales is None


def test_a_rank_reads_those_of_its_heads_and_blocks(scaled: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(scaled("attn_head"))
    config = read_model_config(checkpoint.config)
    whole = read_kv_scales(checkpoint, config, CPU)
    assert whole is not None
    by_heads = [read_kv_scales(checkpoint, config, CPU, Ranks(tensor=2, rank=rank)) for rank in range(2)]
    assert torch.equal(torch.cat([part for part in by_heads if part is not None], 2), whole)
    by_blocks = [read_kv_scales(checkpoint, config, CPU, Ranks(pipeline=2, rank=rank)) for rank in range(2)]
    assert torch.equal(torch.cat([part for part in by_blocks if part is not None]), whole)


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if name.endswith("self_attn.v_scale"))


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (torch.ones(3), "float32 [3], but scales of a cache are one float for a layer, or one for each of its"),
        (torch.ones(1, dtype=torch.int32), "int32 [1], but scales"),
        (torch.zeros(1), "not positive numbers"),
        (torch.tensor([float("nan")]), "not positive numbers"),
        (None, "is missing"),
    ],
)
def test_damaged_scales_are_refused_where_they_are_needed(
    scale: torch.Tensor | None, says: str, scaled: Callable[[str], Path], tmp_path: Path
) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        name = first(tensors)
        del tensors[name]
        if scale is not None:
            tensors[name] = scale

    folder = changed(scaled("tensor"), tmp_path / "damaged", damage)
    with pytest.raises(StorageError, match="v_scale") as refused:
        start(folder, "fp8")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    start(folder, "auto")


def test_others_spell_them_otherwise_and_bring_zero_points(scaled: Callable[[str], Path], tmp_path: Path) -> None:
    def respell(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            old = name.replace("_scale", "_proj.output_scale")
            tensors[old] = tensors.pop(name).bfloat16().reshape(())
            tensors[old.replace("output_scale", "output_zero_point")] = torch.zeros(1)

    folder = changed(scaled("tensor"), tmp_path / "older", respell)
    config = read_model_config(Checkpoint(folder).config)
    expected, found = (read_kv_scales(Checkpoint(path), config, CPU) for path in (scaled("tensor"), folder))
    assert expected is not None
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)
    load_reference(folder)
    measure_kv_scales(
        Checkpoint(folder), family_of(Checkpoint(folder).config), tokens_of(folder)[:1], "tensor", "cpu", tmp_path
    )


@pytest.mark.parametrize(
    "change", [{"num_bits": 4}, {"type": "int"}, {"dynamic": True}, {"symmetric": False}, {"strategy": "channel"}]
)
def test_other_schemes_of_a_cache_leave_scales_at_one(
    change: dict[str, Any], scaled: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(scaled("tensor"), tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= change
    assert kv_strategy(config) is None
    (folder / "config.json").write_text(json.dumps(config))
    assert read_kv_scales(Checkpoint(folder), read_model_config(config), CPU) is None
    assert "kv_cache_scheme" in caplog.text


def test_a_head_that_holds_nothing_has_scale_one() -> None:
    largest = torch.tensor([[0.0, 448.0], [0.0, 0.0]])
    by_head = scale_tensors("a.self_attn", largest, "attn_head")
    assert by_head["a.self_attn.k_scale"].flatten().tolist() == [1.0, 1.0]
    assert scale_tensors("a.self_attn", largest, "tensor")["a.self_attn.v_scale"].tolist() == [1.0]
    assert summary_of(by_head) == {"keys": [1.0, 1.0], "values": [1.0, 1.0]}


def test_conversion_measures_keeps_or_leaves_them_out(
    scaled: Callable[[str], Path], quantized_draft: Callable[..., Path], tmp_path: Path
) -> None:
    plain = quantized_draft(*RECIPE)
    convert(plain, "compressed-tensors", tmp_path / "measured", kv_scales="tensor", calibration=DATA)
    wanted = Checkpoint(scaled("tensor"))
    kept = convert(tmp_path / "measured", "compressed-tensors", tmp_path / "kept")
    for folder in ("measured", "kept"):
        found = Checkpoint(tmp_path / folder)
        assert kv_strategy(found.config) == "tensor"
        assert found.cache_names() == wanted.cache_names()
        for name in wanted.cache_names():
            assert torch.equal(found.tensor(name), wanted.tensor(name))
    assert not kept.notes
    report = convert(tmp_path / "kept", "gptq", tmp_path / "gptq")
    assert "left out" in report.notes[0]
    assert not Checkpoint(tmp_path / "gptq").cache_names()
    with pytest.raises(InputError, match="not by gptq; use --to compressed-tensors"):
        convert(plain, "gptq", tmp_path / "no", kv_scales="tensor")


def test_a_killed_run_ends_with_the_same_scales(
    scaled: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.pipeline import run

    recipe = load_recipe(RECIPE[0], (RECIPE[1], "kv_scales=tensor"))
    arguments: dict[str, Any] = {"calibration": DATA, "device": "cpu", "quality_windows": 0}
    with monkeypatch.context() as killed:
        killed.setattr(run, "write_checkpoint", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize("demo-draft", recipe, tmp_path / "out", **arguments)
    with monkeypatch.context() as again:
        again.setattr(run, "scale_cache", lambda *_: pytest.fail("measured twice"))
        report = quantize("demo-draft", recipe, tmp_path / "out", **arguments)
    assert report.kv_scales is not None
    for name in ("model.safetensors", "config.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (scaled("tensor") / name).read_bytes()
    log = json.loads((tmp_path / "out" / "quantization_log.jsonl").read_text().splitlines()[0])
    assert log["kv_scales"] == report.kv_scales


@pytest.mark.parametrize(
    ("recipe", "change", "says"),
    [
        ("rtn-w4g128", "kv_scales=tensor", "not beside format 'gptq'; use format.name: ct-packed"),
        ("rtn-w4g128-ct", "kv_scales=head", "'kv_scales' is 'head', but must be tensor"),
        ("rtn-w4g128-ct", "kv_scales=null", "'kv_scales' is empty"),
    ],
)
def test_recipes_that_have_no_place_for_them_are_refused(recipe: str, change: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_recipe(recipe, (change,))


def test_latents_have_none(family_model: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = load_recipe("rtn-w4g128-ct", ("format.group_size=32", "kv_scales=tensor"))
    with pytest.raises(InputError, match="latents"):
        quantize(family_model("deepseek_v3"), recipe, tmp_path / "out", device="cpu", calibration=DATA)


def test_inspect_and_the_plan_of_a_run_show_them(
    scaled: Callable[[str], Path], run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, shown, _ = run_cli("inspect", scaled("attn_head"))
    assert code == 0
    assert "scales of an FP8 cache: one for a head (attn_head), keys 0.0" in shown
    code, shown, _ = run_cli("inspect", scaled("tensor"), "--json")
    assert json.loads(shown)["kv_scales"]["strategy"] == "tensor"
    asked = ("quantize", "demo-draft", "-r", RECIPE[0], "--set", RECIPE[1], "--kv-scales", "tensor", "--dry-run")
    code, shown, _ = run_cli(*asked, "--samples", 2, "-o", tmp_path / "out")
    assert code == 0
    assert "scales for FP8, one for the keys of a layer" in shown
