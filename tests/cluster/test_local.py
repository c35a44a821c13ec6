"""All scenarios, on a cluster made for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster import local, needs
from tests.cluster.cluster import ROOT

LIMIT_S = 1800


@pytest.mark.cluster
@pytest.mark.timeout(LIMIT_S)
def test_every_scenario_holds_on_a_cluster_of_one_node():
    """The same as `make e2e-local`."""
    if lacking := needs.tell(*needs.local(local.KUBERNETES / "bin")):
        pytest.skip(f"`make e2e-local` says what is missing: {lacking}")

    command = [sys.executable, "-m", "tests.cluster.local"]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT_S).returncode == 0
