"""The long tests in four parts of equal time: `PART=2 make test-long` runs one, `.ci/run` the one of the day.

Files are dealt, not tests, since the tests of a file share what is expensive to make: the longest first, each to the
part that has least so far. A test that shares nothing and takes long may have an entry of its own in the table
(`file::test[parameter]`); the others belong to their file. What is not in the table counts as UNKNOWN seconds. The
table is in seconds of one process; Ray's tests have the machine to themselves, all others run two at a time, so one of
Ray's seconds weighs two.

Every run with `--part` ends with the seconds of its entries, in the form of the table, to be copied here.
`python tests/support/long_parts.py 2` prints the files of a part that need Ray, so that no run begins for none.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

PARTS = 4
UNKNOWN = 60
SECONDS = {  # of one process on a small ARM server; some were taken while it was busy
    "tests/eval/peers/test_peers.py": 19,
    "tests/eval/report/test_report_files.py": 13,
    "tests/eval/test_behaviour_docs.py": 25,
    "tests/eval/test_bench_batching.py": 15,
    "tests/eval/test_compare.py": 130,
    "tests/eval/test_plan_parallel.py": 4,
    "tests/eval/test_quality_backends.py": 37,
    "tests/eval/test_quality_layers.py": 10,
    "tests/eval/test_quality_measure.py": 36,
    "tests/eval/test_serve_bench.py": 8,
    "tests/eval/test_tasks.py": 56,
    "tests/eval/test_tasks_input.py": 27,
    "tests/eval/test_watermark.py": 400,
    "tests/kernels/test_attention_decode.py": 5,
    "tests/kernels/test_attention_prefill.py": 60,
    "tests/kernels/test_compile_matrix.py": 5,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[1]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[2]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[3]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[4]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[5]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[6]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[7]": 420,
    "tests/kernels/test_compile_matrix.py::test_the_matrix_assembles_and_fits[8]": 420,
    "tests/kernels/test_cpu_language.py": 8,
    "tests/kernels/test_grouped.py": 8,
    "tests/kernels/test_linear_eight_bit.py": 16,
    "tests/kernels/test_linear_joining.py": 5,
    "tests/kernels/test_linear_weight_only.py": 8,
    "tests/kernels/test_sampling.py": 4,
    "tests/long/test_damaged_checkpoints.py": 97,
    "tests/long/test_demo.py": 72,
    "tests/long/test_deploy.py": 300,
    "tests/long/test_deploy_ranks.py": 90,
    "tests/long/test_deploy_refused.py": 30,
    "tests/long/test_killed_runs.py": 532,
    "tests/long/test_killed_runs.py::test_killed_while_it_chooses[best]": 96,
    "tests/long/test_killed_runs.py::test_killed_while_it_chooses[tuned]": 96,
    "tests/long/test_memory.py": 800,
    "tests/long/test_scheduler_machine_long.py": 190,
    "tests/long/test_server_fuzz.py": 184,
    "tests/long/test_server_load.py": 115,
    "tests/long/test_soak.py": 443,
    "tests/long/test_tasks_items.py": 1,
    "tests/medusa/test_medusa_command.py": 14,
    "tests/medusa/test_medusa_training.py": 10,
    "tests/notebooks/test_notebooks.py": 75,
    "tests/quantkit/methods/test_gptq.py": 4,
    "tests/quantkit/methods/test_tuned.py": 40,
    "tests/quantkit/mixed_layers/test_mixed_plan.py": 6,
    "tests/quantkit/passes/test_calibrated.py": 7,
    "tests/quantkit/passes/test_choice.py": 167,
    "tests/quantkit/test_auto_bits_quality.py": 107,
    "tests/quantkit/test_tuned_auto_bits.py": 28,
    "tests/quantkit/test_calibrated_quality.py": 200,
    "tests/quantkit/test_convert.py": 6,
    "tests/quantkit/test_docs_guides.py": 700,
    "tests/quantkit/test_docs_guides.py::test_every_block_runs_as_it_stands[docs/start/report.md]": 300,
    "tests/quantkit/test_experts.py": 12,
    "tests/quantkit/test_experts_quality.py": 120,
    "tests/quantkit/test_extras.py": 13,
    "tests/quantkit/test_pipeline.py": 6,
    "tests/quantkit/test_sensitivity.py": 23,
    "tests/quantkit/test_transcripts.py": 420,
    "tests/quantkit/test_warm_up_command.py": 60,
    "tests/runtime/parallel/test_cut.py": 6,
    "tests/runtime/parallel/test_cut_kernels.py": 5,
    "tests/runtime/parallel/test_engine_parallel.py": 208,
    "tests/runtime/parallel/test_engine_parallel_failures.py": 36,
    "tests/runtime/parallel/test_parallel_decoder.py": 16,
    "tests/runtime/parallel/test_parallel_processes.py": 115,
    "tests/runtime/server/test_docs_several_models.py": 26,
    "tests/runtime/server/test_engine_client.py": 9,
    "tests/runtime/server/test_engine_death.py": 5,
    "tests/runtime/server/test_json_schemas.py": 11,
    "tests/runtime/server/test_memory_split.py": 6,
    "tests/runtime/server/test_model_list.py": 3,
    "tests/runtime/server/test_serve_process.py": 16,
    "tests/runtime/server/test_several_models.py": 40,
    "tests/runtime/server/test_shadow.py": 8,
    "tests/runtime/server/test_tool_parsers.py": 15,
    "tests/runtime/test_eagle.py": 15,
    "tests/runtime/test_engine_equality.py": 115,
    "tests/runtime/test_engine_formats.py": 35,
    "tests/runtime/test_engine_guides.py": 4,
    "tests/runtime/test_engine_sharing.py": 18,
    "tests/runtime/test_gguf_engine.py": 9,
    "tests/runtime/test_grouped_experts.py": 4,
    "tests/runtime/test_integer_cache.py": 11,
    "tests/runtime/test_latent_kernels.py": 4,
    "tests/runtime/test_paper_engine.py": 20,
    "tests/runtime/test_self_draft.py": 10,
    "tests/runtime/test_speculation_floor.py": 55,
    "tests/runtime/test_speculative.py": 36,
    "tests/runtime/test_speculative_sampling.py": 262,
}
RAY = frozenset(entry for entry in SECONDS if entry.startswith("tests/long/test_deploy"))


def deal(entries: Iterable[str] = ()) -> list[list[str]]:
    """The entries of every part: those of the table, and further ones."""
    parts: list[list[str]] = [[] for _ in range(PARTS)]
    for entry in sorted({*SECONDS, *entries}, key=lambda entry: (-weight(entry), entry)):
        min(parts, key=lambda part: sum(map(weight, part))).append(entry)
    return parts


def weight(entry: str) -> int:
    """Processor seconds that nothing else can use."""
    return SECONDS.get(entry, UNKNOWN) * (2 if entry in RAY else 1)


def entry_of(item_id: str) -> str:
    """A test's own, or its file."""
    test = item_id.partition("@")[0]  # with xdist's group behind it
    return test if test in SECONDS else test.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("all", *map(str, range(1, PARTS + 1))), help="which of the long tests to run")


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out, so that all runs with one part deal the same
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("part") not in (None, "all"):
        items[:] = in_part(items, int(config.getoption("part")))


def in_part(items: list[Any], part: int) -> list[Any]:
    """The long tests among `items` that belong to a part, what takes longest first: else two processes may end with
    one that has two long tests before it and one that has none. (The Makefile asks xdist to keep this order.)"""
    long = [item for item in items if item.get_closest_marker("long")]
    entries = deal(entry_of(item.nodeid) for item in long)[part - 1]
    chosen = [item for item in long if entry_of(item.nodeid) in entries]
    return sorted(chosen, key=lambda item: -weight(entry_of(item.nodeid)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("part") is None:
        return
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[entry_of(report.nodeid)] += report.duration
    terminalreporter.section("seconds of the table's entries")
    for entry, spent in sorted(seconds.items()):
        terminalreporter.write_line(f'    "{entry}": {spent:.0f},')


def main(part: str) -> None:
    parts = deal() if part == "all" else [deal()[int(part) - 1]]
    print(*(entry for part in parts for entry in part if entry in RAY))


if __name__ == "__main__":
    main(sys.argv[1])
