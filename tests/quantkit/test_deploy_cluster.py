"""What people read when Ray gives up. Real clusters: tests/long/test_deploy.py."""

import warnings
from types import ModuleType

import pytest

from quantkit.errors import QuantkitError


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    """Ray's own imports warn of what will change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from quantkit.deploy import cluster
    return cluster


@pytest.mark.parametrize("from_ray", [True, False], ids=["ray's error", "python's error"])
@pytest.mark.parametrize("stops", [True, False], ids=["stop", "status"])
def test_one_line_where_ray_gives_up(
    cluster: ModuleType, from_ray: bool, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up() -> None:
        raise (cluster.ray.exceptions.GetTimeoutError if from_ray else TimeoutError)(
            "no answer in 60 s\nand a page more"
        )

    monkeypatch.setattr(cluster.serve, "status", give_up)
    with pytest.raises(QuantkitError, match=r"^Ray gave up: no answer in 60 s \(is this machine busy") as caught:
        cluster.stop(0.0, print) if stops else cluster.status()
    assert "\n" not in str(caught.value)
