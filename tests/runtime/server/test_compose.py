"""The container files: every path, port, setting and name in them is one that exists on the other side."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.runtime.server.models.model_list import load_model_settings
from quantkit.runtime.server.routes import health
from quantkit.runtime.server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "runtime" / "server" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
CONTAINERFILE = (FOLDER / "Containerfile").read_text("utf-8")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# Of the compose specification, what stands here; a misspelt key is none of these.
KEYS = {"build", "image", "command", "environment", "ports", "volumes", "healthcheck", "restart", "stop_grace_period"}
KEYS |= {"depends_on", "deploy"}
ROUTES = {route.path for route in health.router.routes if hasattr(route, "path")}


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> what is there: a file beside the compose file, or a volume."""
    found = {}
    for line in SERVICES[service]["volumes"]:
        source, target = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line).removesuffix(":ro").split(":")
        found[target] = source
    return found


def port(service: str) -> int:
    (line,) = SERVICES[service]["ports"]
    host, outside, inside = line.split(":")
    assert (host, outside) == ("127.0.0.1", inside)  # open to this machine alone
    return int(inside)


def test_keys_are_those_of_compose() -> None:
    assert COMPOSE.keys() == {"name", "services", "volumes"}
    for name, service in [*SERVICES.items(), *read("compose.gpu.yaml")["services"].items()]:
        assert service.keys() <= KEYS, name
        assert name in SERVICES


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_exists(service: str) -> None:
    for target, source in mounts(service).items():
        assert target.startswith("/")
        if source == "./models":  # the user's own
            continue
        assert (FOLDER / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], source
    assert {one for each in SERVICES for one in mounts(each).values() if "/" not in one} == COMPOSE["volumes"].keys()


def test_the_server_reads_its_settings_and_listens_where_others_look() -> None:
    command = re.findall(r'"([^"]+)"', CONTAINERFILE.split("CMD ")[1])
    assert command[0] == "--config"
    assert mounts("server")[command[1]] == "./server.yaml"
    (settings,) = load_model_settings([], {}, FOLDER / "server.yaml", {})
    assert (settings.host, settings.port) == ("0.0.0.0", port("server"))
    assert f"EXPOSE {settings.port}" in CONTAINERFILE
    checked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", " ".join(SERVICES["server"]["healthcheck"]["test"]))
    assert checked is not None
    assert int(checked[1]) == settings.port
    assert checked[2] in ROUTES
    grace = int(SERVICES["server"]["stop_grace_period"].removesuffix("s"))
    assert grace > ServerSettings.model_fields["drain_seconds"].default


def test_prometheus_scrapes_the_server_as_its_rules_expect() -> None:
    config = read("prometheus.yml")
    (scrape,) = config["scrape_configs"]
    assert scrape["metrics_path"] in ROUTES
    assert scrape["static_configs"] == [{"targets": [f"server:{port('server')}"]}]
    (rules,) = config["rule_files"]
    file = (FOLDER / mounts("prometheus")[rules]).resolve()
    assert set(re.findall(r'job="(\w+)"', file.read_text("utf-8"))) == {scrape["job_name"]}
    assert "/etc/prometheus/prometheus.yml" in mounts("prometheus")  # where the image looks


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = read("grafana/datasource.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", f"http://prometheus:{port('prometheus')}")
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    (dashboard,) = [source for source in mounts("grafana").values() if source.endswith("dashboard.json")]
    assert mounts("grafana")[f"{provider['options']['path']}/{Path(dashboard).name}"] == dashboard
    provisioned = [target for target in mounts("grafana") if target.startswith("/etc/grafana/provisioning/")]
    assert {Path(target).parent.name for target in provisioned} == {"datasources", "dashboards"}


def test_the_image_copies_what_the_package_is_made_of() -> None:
    assert (FOLDER / SERVICES["server"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / SERVICES["server"]["build"]["dockerfile"]).is_file()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", CONTAINERFILE, re.MULTILINE) for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    linked = {entry.name for entry in (ROOT / "quantkit").iterdir() if entry.is_symlink()}
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "quantkit", *linked} == set(copied)
    extras = re.search(r"'\.\[([\w,]+)\]'", CONTAINERFILE)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))
    kept = re.findall(r"(/var/cache/quantkit)[/\s]", CONTAINERFILE)
    assert len(kept) >= 3
    assert kept[0] in mounts("server")


def test_promtool_agrees(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    (rules,) = read("prometheus.yml")["rule_files"]
    here = str((FOLDER / mounts("prometheus")[rules]).resolve())
    config = tmp_path / "prometheus.yml"
    config.write_text((FOLDER / "prometheus.yml").read_text("utf-8").replace(rules, here), "utf-8")
    run = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
