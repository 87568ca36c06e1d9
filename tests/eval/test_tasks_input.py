"""Which tasks are found, what they look like on the command line, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from quantkit.cli.eval_tasks import evaluate_tasks
from quantkit.errors import InputError
from quantkit.eval.tasks import make_local
from quantkit.eval.tasks.catalog import LOCAL_TASKS, find_tasks, unknown_task
from quantkit.eval.tasks.generation import answer_text, generation_settings
from quantkit.eval.tasks.run import run_tasks
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

OWN_TASK = """
task: my_items
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
COMMAND: dict[str, Any] = {
    "limit": 2,
    "fewshot": None,
    "task_path": None,
    "chat_template": False,
    "device": "cpu",
    "dtype": "float32",
    "backend": "runtime",
}


@pytest.fixture(autouse=True)
def _no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval asks a dozen programs, pip among them, about the machine in every run: a second, and nobody reads it."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.mark.parametrize("file", make_local.FILES)
def test_the_items_that_ship_are_those_that_the_script_makes(file: str) -> None:
    assert (LOCAL_TASKS / file).read_text(encoding="utf-8") == make_local.lines(file)


def test_names_groups_and_patterns() -> None:
    assert find_tasks("local", None)[0] == ["local"]
    assert find_tasks(" local_rolling , local_last_word,", None)[0] == ["local_rolling", "local_last_word"]
    assert find_tasks("local_co*", None)[0] == ["local_completion", "local_continuation"]
    loaded = find_tasks("local", None)[1].load(["local"])
    assert list(loaded["tasks"]) == ["local_last_word", "local_continuation", "local_completion", "local_rolling"]


def test_what_an_unknown_task_is_told() -> None:
    told = unknown_task("arc_esy", ["arc_easy", "hellaswag", "local"])
    assert told.startswith("no task 'arc_esy' among lm-eval's 3 tasks and groups; did you mean 'arc_easy'? ")
    assert "'local' is the set that needs no network" in told
    assert "did you mean" not in unknown_task("zzz", ["arc_easy"])


def test_items_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = tmp_path / "items.jsonl", tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    items = [{"question": f"What is {number}?", "choices": ["a number", "a colour"], "answer": 0} for number in "123"]
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "my.yaml").write_text(OWN_TASK.replace("DATA", str(data)))
    found = run_tasks("demo-draft", "my_items", task_path=tmp_path, device="cpu", with_samples=True)
    assert [(score.task, score.metric, score.n) for score in found.scores] == [("my_items", "acc", 3)]
    assert found.samples is not None
    assert found.samples["my_items"][2]["doc"]["question"] == "What is 3?"


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate_tasks("demo-draft", "local_last_word,local_rolling", **COMMAND, as_json=False)
    table, errors = capsys.readouterr()
    assert errors == ""
    assert "perplexity" in table
    assert "bits_per_byte" in table
    assert "quantkit's engine, float32 on cpu" in table
    assert "origin of demo-draft: trained for quantkit" in table
    evaluate_tasks("demo-draft", "local_last_word", **COMMAND, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert {score["metric"]: score["n"] for score in found["scores"]} == {"acc": 2, "perplexity": 2}
    assert all(score["stderr"] >= 0 for score in found["scores"])
    assert found["task_versions"] == {"local_last_word": 1.0}
    assert found["provenance"]["calibration"]["kind"] == "not quantized"
    assert found["limit"] == 2
    assert found["packages"]["lm_eval"]


def refused(words: str, tasks: str = "local_last_word", **how: Any) -> None:
    with pytest.raises(InputError, match=words) as error:
        run_tasks("demo-draft", tasks, device="cpu", **how)
    assert "\n" not in str(error.value)


def test_wrong_input_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("no task is named", tasks=" ,")
    refused("no folder '.*nowhere'", task_path=tmp_path / "nowhere")
    refused("limit is 0, but must be", limit=0)
    refused("fewshot is -1, but must be", fewshot=-1)
    refused("backend", backend="vllm")
    (tmp_path / "my.yaml").write_text(OWN_TASK.replace("DATA", str(tmp_path / "gone.jsonl")))
    refused("'my_items' cannot be loaded: .*gone.jsonl", tasks="my_items", task_path=tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(r"pip install 'quantkit\[tasks\]'")


@pytest.mark.long  # lm-eval reads thousands of files to know its tasks
def test_an_unknown_task_names_near_ones() -> None:
    refused("no task 'arc_esy' among .* did you mean 'arc_easy'", tasks="local,arc_esy")
    refused("no task 'local_last_wrd' among .* did you mean 'local_last_word'", tasks="local_last_wrd")


def test_without_a_network_the_local_set_is_named(tmp_path: Path) -> None:
    """The way of data that the hub does not give, through lm-eval's own loader."""
    (tmp_path / "data.py").write_text("def load(**_):\n    raise ConnectionError('cannot reach the hub')\n")
    task = OWN_TASK.replace("dataset_path: json", "custom_dataset: !function data.load").replace("DATA", "x.jsonl")
    (tmp_path / "my.yaml").write_text(task)
    refused("'my_items' are not on this machine.*cannot reach the hub; use the task set 'local'", "my_items",
            task_path=tmp_path)  # fmt: skip


def test_a_model_without_tokenizer_or_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        run_tasks(tiny_model, "local_last_word", device="cpu")
    for file in model_folder("demo").iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    with pytest.raises(InputError, match="no chat template"):
        run_tasks(tmp_path, "local_last_word", device="cpu", chat_template=True)


def test_generation_settings() -> None:
    tokenizer = load_tokenizer("demo")
    params, stops = generation_settings(
        {"until": ["\n", "", "<|end|>"], "do_sample": False, "top_p": 0.5}, tokenizer, 9
    )
    assert (params.max_tokens, params.top_p, params.temperature) == (9, 1.0, 0.0)
    assert params.stop == ("\n",)
    assert sorted(params.stop_token_ids) == [0, 4], "special tokens have no text to look for"
    assert stops == ("\n", "<|end|>", "<|endoftext|>")
    sampled, _ = generation_settings({"temperature": 0.5, "top_k": 3, "max_tokens": 4, "until": "x"}, tokenizer, 9)
    assert (sampled.max_tokens, sampled.temperature, sampled.top_k, sampled.stop) == (4, 0.5, 3, ("x",))
    assert answer_text("one. two\nthree", ("\n", ".")) == "one"
