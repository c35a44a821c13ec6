"""A real API server of Kubernetes for the tests; ``make test-k8s`` builds it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import (  # noqa: F401  fixtures and hooks
    pytest_runtest_makereport,
    pytest_runtest_setup,
    start_router,
    start_sim,
)
from tests.k8s.api_server import ApiServer, api_server, missing

TEST_LIMIT_S = 300
_serial = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    why = missing()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.k8s)
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One API server for the session; a test that stops it starts it again."""
    with api_server(tmp_path_factory.mktemp("k8s")) as server:
        yield server


@pytest.fixture
def namespace(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a namespace of the test's own, whose Pods the router may list and watch."""
    words = request.node.name.partition("[")[0].replace("_", "-")
    name = f"{words[:50].strip('-')}-{next(_serial)}"
    server.start()  # a test that failed may have left it stopped
    server.namespace(name)
    server.allow("list", "watch", namespace=name)
    yield name
    pods = f"/api/v1/namespaces/{name}/pods"
    server.do("DELETE", f"{pods}?gracePeriodSeconds=0")


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> Path:
    """Return a kubeconfig of the router."""
    return server.kubeconfig(tmp_path / "kubeconfig")
