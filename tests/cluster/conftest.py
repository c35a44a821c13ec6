"""Fixtures of the chart that some of these tests need as well."""

from __future__ import annotations

import pytest

from tests.helm.chart import Helm
from tests.helm.conftest import helm_named


@pytest.fixture(scope="session")
def helm() -> Helm:
    return helm_named("helm4")
