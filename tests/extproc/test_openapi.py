"""The description of the admin API says what the server does."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from extproc.admin import ENDPOINTS
from extproc.admin_workers import NewWorker
from extproc.config import Config
from extproc.discovery import spec
from extproc.openapi import build_document, render_page
from tests.extproc.admin_api import serve

DOCUMENT = build_document()
OPERATIONS = [
    (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
]


def name_of(endpoint):
    return f"{endpoint.method} {endpoint.path}"


def references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def test_what_is_documented_is_served_and_the_other_way_round():
    """Methods and paths are the same."""
    async with serve(config=Config()) as api:
        served = {
            (route.method, route.resource.canonical)
            for route in api.client.server.app.router.routes()
            if route.method != "HEAD"
        }

    assert served == set(OPERATIONS)
    assert len(OPERATIONS) == len(ENDPOINTS)


def test_document_is_plain_data_without_loose_ends():
    """JSON, and every reference has its target."""
    document = json.loads(json.dumps(DOCUMENT))

    names = {reference.rpartition("/")[2] for reference in references(document)}
    assert names <= document["components"]["schemas"].keys()
    assert document["openapi"] == "3.1.0"


def test_parameters_of_paths_are_described():
    """Those in braces, no others."""
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            described = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"]
            assert described == re.findall(r"{(\w+)}", path)


def test_open_endpoints_need_no_key_and_all_others_do():
    """As the guard does it."""
    opened = {
        path
        for path, methods in DOCUMENT["paths"].items()
        for operation in methods.values()
        if operation.get("security") == []
    }

    assert opened == {
        "/liveness",
        "/readiness",
        "/health",
        "/health_generate",
        "/v1/models",
        "/v1/models/{model}",
        "/finish_session",
    }
    assert DOCUMENT["security"] == [{"key": []}]


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.sample], ids=name_of)
def test_sample_has_the_shape_that_is_described(endpoint):
    """Of the first answer."""
    content = endpoint.replies[0].content
    if content is not None:
        value = msgspec.json.decode(endpoint.sample, type=content)
        assert msgspec.to_builtins(value) == json.loads(endpoint.sample)


def test_description_of_a_new_worker_has_the_fields_that_are_read():
    """Ignored ones included."""
    assert set(NewWorker.__struct_fields__) == {*spec._Item.__struct_fields__, *spec.IGNORED}


def test_page_has_a_section_for_each_endpoint_and_shape():
    """Links lead somewhere, and every section has a curl command that names its path."""
    page = render_page(DOCUMENT)

    headings = re.findall(r"^#+ `?(.+?)`?$", page, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in headings}
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= anchors
    for method, path in OPERATIONS:
        section = page.partition(f"## `{method} {path}`\n")[2].partition("\n## ")[0]
        command = re.search(r"^\$ curl (.+)$", section, re.MULTILINE)[1]
        assert path.partition("{")[0] in command
        assert (f"-X {method}" in command) == (method != "GET")
