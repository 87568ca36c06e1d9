"""Alert rules and the dashboard against what a live server exports; the rules' own unit tests where promtool is."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_nvml import FakeGpu, FakeNvml
from promql import Exported, exported_by, labels_of, selectors

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "runtime" / "server" / "grafana"
RULES = FOLDER / "quantkit-alerts.yaml"
PROMTOOL_TESTS = Path(__file__).with_name("alerts.promtool.yaml")
ALERTS = [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]
# These need other settings; test_metrics.py has their names.
ELSEWHERE = ("quantkit:routed_requests_total", "quantkit:spec_decode_", "quantkit:shadow")


@pytest.fixture(scope="module")
def exported(start_server: Callable[..., Any]) -> Exported:
    """Of a server that has answered, refused for want of room, and has a GPU by the looks of it."""
    server = start_server(gpus=FakeNvml(FakeGpu("GPU-0")), max_queue=1)
    server.app.state.models.request_refused(503)
    answer = server.ask("POST", "/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2})
    assert answer.status == 200
    end = time.monotonic() + 10
    while "quantkit:gpu_power_watts" not in (text := server.ask("GET", "/metrics").content.decode()):
        assert time.monotonic() < end
    return exported_by(text)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_a_live_server_exports(rule: dict[str, Any], exported: Exported) -> None:
    found = selectors(rule["expr"])
    assert found
    assert [one.fault(exported) for one in found] == [None] * len(found)
    told = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels_of(rule["expr"], exported)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_a_rule_says_how_bad_it_is_and_what_it_means(rule: dict[str, Any]) -> None:
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}


def test_the_dashboard_asks_for_what_a_live_server_exports(exported: Exported) -> None:
    dashboard = json.loads((FOLDER / "quantkit-dashboard.json").read_text("utf-8"))
    asked = [one for panel in dashboard["panels"] for target in panel["targets"] for one in selectors(target["expr"])]
    assert len(asked) > 40
    assert [fault for one in asked if not one.metric.startswith(ELSEWHERE) and (fault := one.fault(exported))] == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("quantkit:num_requests_waitng > 0", "no metric"),
        ('quantkit:request_refused_total{state="429"}', "no label"),
        ('quantkit:request_success_total{finished_reason="failed"}', "never has"),
        ('quantkit:request_success_total{model_name="demo", finished_reason=~"fail.*"}', "never has a"),
    ],
)
def test_a_query_that_asks_for_something_else_is_found(query: str, fault: str, exported: Exported) -> None:
    (selector,) = selectors(query)
    assert fault in str(selector.fault(exported))


def test_the_guide_lists_every_alert_and_promtool_tests_each() -> None:
    guide = (ROOT / "docs" / "reference" / "serving.md").read_text("utf-8")
    names = [rule["alert"] for rule in ALERTS]
    assert re.findall(r"^\| `(Quantkit\w+)`", guide, flags=re.MULTILINE) == names
    cases = [
        case for test in yaml.safe_load(PROMTOOL_TESTS.read_text("utf-8"))["tests"] for case in test["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(names)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(names)


def test_promtool_agrees() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    for command in (["check", "rules", RULES], ["test", "rules", PROMTOOL_TESTS]):
        run = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
