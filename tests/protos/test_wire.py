"""Our subset of Envoy's protos, against envoy-data-plane: same numbers, same types, same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protos import access_log_pb2, core_pb2, discovery_pb2, endpoint_pb2, ext_proc_pb2

pytestmark = pytest.mark.slow

MODULES = (core_pb2, ext_proc_pb2, access_log_pb2, discovery_pb2, endpoint_pb2)
FILES = [module.DESCRIPTOR for module in MODULES]


def nested(messages):
    for message in messages:
        if not message.GetOptions().map_entry:
            yield message
            yield from nested(message.nested_types)


MESSAGES = [message for file in FILES for message in nested(file.message_types_by_name.values())]
FIELDS = [field.full_name for message in MESSAGES for field in message.fields]
ENUM_VALUES = [
    f"{enum.full_name}.{value.name}"
    for message in MESSAGES
    for enum in message.enum_types
    for value in enum.values
]
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
]


@pytest.fixture(scope="module")
def report():
    """Return what ``wire_report`` says, asked once for all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.protos.wire_report"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("field", FIELDS)
def test_field_is_the_same_on_the_wire(report, field):
    """Number, type and repetition; what either side writes, the other reads."""
    entry = report[field]

    assert entry["ours"] == entry["theirs"]


@pytest.mark.parametrize("value", ENUM_VALUES)
def test_enum_value_has_the_same_number(report, value):
    """A mode that is called otherwise, or numbered otherwise, is another mode."""
    entry = report[value]

    assert entry["ours"] == entry["theirs"]


@pytest.mark.parametrize("path", METHODS)
def test_method_has_the_same_path(report, path):
    """Package, service and method are what Envoy calls."""
    entry = report[path]

    assert entry["ours"] == entry["theirs"]


def test_report_leaves_nothing_out(report):
    """Every field, enum value and method of ours is in it, and each has been filled with something."""
    assert sorted(report) == sorted([*FIELDS, *ENUM_VALUES, *METHODS])
    assert [field for field in FIELDS if not report[field]["ours"]["read"]] == []
