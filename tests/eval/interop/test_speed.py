"""Side by side: loads, rows and their table; our side for real on a CPU; the other side's arguments."""

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import click
import pytest

from quantkit.cli import cli
from quantkit.errors import InputError
from quantkit.eval import scale
from quantkit.eval.engine.run import Load, random_prompts
from quantkit.eval.interop import rows, speed_rows
from quantkit.eval.interop.speed_folders import RECIPES, check_formats, make_folders, name_every_token
from quantkit.eval.interop.speed_rows import LOADS, Timed, counted_tokens, load_name, longest, parse_loads, speed_table
from quantkit.eval.interop.speed_serve import server_command
from quantkit.eval.peers.vllm_bench import Job, answer_arguments, bench_arguments, engine_version, main, work
from quantkit.formats import Awq, CtFloat8, Gptq
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

KNOWN = {"model": "llama-3.1-8b", "format": "w4", "protocol": "offline", "command": "python"}
SMALL = (Load(2, 8, 4), Load(2, 16, 1))


def test_loads_are_those_of_the_engine_bench_and_prompts() -> None:
    assert [load_name(load) for load in LOADS] == ["1x128+256", "8x128+256", "32x128+256", "256x512+256", "16x2048+1"]
    assert parse_loads(",".join(map(load_name, LOADS))) == LOADS
    assert longest(LOADS) == 2050
    assert counted_tokens(LOADS[3]) == 256 * 256
    assert counted_tokens(LOADS[4]) == 16 * 2048
    for wrong in ("8", "8x128", "0x1+1", "axb+c", ""):
        with pytest.raises(InputError, match="such as 8x128"):
            parse_loads(wrong)


def test_no_prompt_begins_like_one_of_another_load() -> None:
    """It would be found in the cache of the engine that remembers prompts, and cost nothing there."""
    beginnings = [tuple(row[:8]) for load in LOADS for row in random_prompts(load, 1000, 0)]
    assert len(set(beginnings)) == len(beginnings) == sum(load.batch for load in LOADS)
    assert random_prompts(LOADS[1], 1000, 0) == random_prompts(LOADS[1], 1000, 0) != random_prompts(LOADS[1], 1000, 1)


def keep(file: Path, engine: str, speed: float, **changes: str) -> None:
    timed = Timed(Load(8, 128, 256), 2.0, 61.234, speed)
    speed_rows.append(file, timed, **(KNOWN | {"engine": engine, "version": "1.2"} | changes))


def test_the_table_has_ratios_of_rows_of_one_day(tmp_path: Path) -> None:
    file = tmp_path / "side_by_side.csv"
    assert speed_table(speed_rows.read(file)) == "Not run yet."
    keep(file, "quantkit", 2000.0)
    keep(file, "vLLM", 1000.0, format="awq")
    assert speed_table(speed_rows.read(file)) == "Not run yet."
    keep(file, "vLLM", 1600.0)
    keep(file, "quantkit", 900.0, protocol="served")
    keep(file, "vLLM", 1000.0, protocol="served")
    known = speed_rows.read(file)
    lines = speed_table(known).splitlines()
    assert len(lines) == 4
    machine, day = rows.machine(), known[0]["date"]
    assert lines[2] == f"| llama-3.1-8b | w4 | 8 x (128 + 256) | 2,000 | 1,600 (vLLM 1.2) | 1.25 | {machine} | {day} |"
    assert "8 x (128 + 256) over HTTP | 900 | 1,000 (vLLM 1.2) | 0.90" in lines[3]
    assert speed_rows.done(known, engine="vLLM", version="1.2", format="w4", protocol="offline") == {Load(8, 128, 256)}
    assert not speed_rows.done(known, engine="vLLM", version="1.3", format="w4", protocol="offline")


def test_our_side_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    work(Job("quantkit", model_folder("demo-draft"), "bf16", SMALL, "cpu", file, "python -m this", "offline"))
    first, prompts = speed_rows.read(file)
    assert (first["engine"], first["model"], first["version"]) == ("quantkit", "demo-draft", engine_version("quantkit"))
    for row, tokens in ((first, 2 * 4), (prompts, 2 * 16)):
        seconds = tokens / float(row["tokens_per_second"])
        assert seconds == pytest.approx(float(row["seconds"]), rel=0.01, abs=0.001)  # it is written in milliseconds
    assert float(first["start_seconds"]) > 0


def test_arguments_of_the_other_side() -> None:
    """By vLLM's documentation; nothing of vLLM runs here."""
    given = bench_arguments(Path("folder"), LOADS)
    assert given["max_num_seqs"] == 256
    assert given["max_model_len"] == 4096
    assert bench_arguments(Path("folder"), [Load(1, 5000, 1)])["max_model_len"] == 5002
    assert not given["enable_prefix_caching"]
    assert "enforce_eager" not in given
    assert answer_arguments(Load(8, 128, 256)) == {
        "temperature": 0.0, "max_tokens": 256, "ignore_eos": True, "detokenize": False
    }  # fmt: skip


def test_servers_get_the_same_context_and_places() -> None:
    ours, theirs = (server_command(engine, Path("model"), 8123, LOADS, "cuda") for engine in ("quantkit", "vLLM"))
    place = ours.index("serve")
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    params = command.make_context(shlex.join(ours), ["--device", "cpu", *ours[place + 1 :]]).params
    assert (params["max_context"], params["max_sequences"], params["port"]) == (2050, 256, 8123)
    flags = dict(pairwise(theirs))
    assert (flags["--max-model-len"], flags["--max-num-seqs"], flags["--port"]) == ("2050", "256", "8123")
    assert "--no-enable-prefix-caching" in theirs


def test_formats_are_layouts_that_both_read() -> None:
    made = {name: load_recipe(recipe).format.name for name, recipe in RECIPES.items()}
    assert made == {"w4": Gptq.name, "awq": Awq.name, "fp8": CtFloat8.name}
    assert all(load_recipe(recipe).method.name == "rtn" for recipe in RECIPES.values())
    with pytest.raises(InputError, match="Known: awq, bf16, fp8, w4"):
        check_formats(["w5"])


def test_folders_of_a_small_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4100, "tie_word_embeddings": False}
    monkeypatch.setitem(scale.SHAPES, "small", small)
    said: list[str] = []
    for _ in range(2):
        found = make_folders("small", tmp_path, ["awq", "fp8"], device="cpu", say=said.append)
    assert [Path(line).name for line in said] == ["small-bf16", "small-awq", "small-fp8"]
    assert {path.name for path in found.values()} == {"small-awq", "small-fp8"}
    assert load_tokenizer(found["fp8"]).convert_ids_to_tokens(4099) == "word4099"


def test_every_id_has_a_name(tmp_path: Path) -> None:
    for file in model_folder("demo").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    name_every_token(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    named = tokenizer.convert_ids_to_tokens(list(range(5000)))
    assert len(set(named)) == 5000
    text = "The function returns a list of words."
    assert tokenizer(text)["input_ids"] == load_tokenizer("demo")(text)["input_ids"]
    assert "word4999" in tokenizer.decode([4999])


def test_wrong_choices_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for wrong in (["--formats", "w5"], ["--engines", "llama"], ["--loads", "8"]):
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path), "--engines", "quantkit", "--device", "cpu", *wrong])
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert wrong[1] in said
        assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
