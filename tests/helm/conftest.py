"""The Helms that the chart is rendered with."""

from __future__ import annotations

import pytest

from tests.helm.chart import CACHE, Helm

HOW = "`make test-helm` fetches it"


def helm_named(name: str) -> Helm:
    path = CACHE / name
    if not path.exists():
        pytest.skip(f"{name} is not here: {HOW}")
    return Helm(path)


@pytest.fixture(params=["helm3", "helm4"])
def each_helm(request: pytest.FixtureRequest) -> Helm:
    """Both majors, one after the other."""
    return helm_named(request.param)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Return the newer one: for what does not depend on it."""
    return helm_named("helm4")
