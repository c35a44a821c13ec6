"""What the chart makes of each preset, compared as values, for both majors of Helm."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helm.chart import NEW, OLD, PRESETS

pytestmark = pytest.mark.helm

GOLDEN = Path(__file__).parent / "golden"
CASES = [(case, NEW) for case in PRESETS] + [("everything", OLD)]


def golden_file(case, kube):
    return GOLDEN / f"{case}-{kube.rpartition('.')[0]}.yaml"


@pytest.mark.parametrize(("case", "kube"), CASES)
def test_rendered_objects_are_those_of_the_golden_file(each_helm, case, kube, update_golden):
    """When this fails: read the difference, then ``make golden``."""
    objects = each_helm.render(*PRESETS[case], kube=kube)
    for found in objects:
        # Both are copies of files that other tests compare.
        for name in {"envoy.yaml", "vllm-extproc.json"} & set(found.get("data", {})):
            found["data"][name] = "a file of the chart"

    path = golden_file(case, kube)
    if update_golden:
        path.write_text(yaml.safe_dump_all(objects, sort_keys=True, width=120))

    assert objects == list(yaml.safe_load_all(path.read_text()))


def test_no_golden_file_is_left_over():
    """A case that is gone takes its file along."""
    assert set(GOLDEN.iterdir()) == {golden_file(*case) for case in CASES}
