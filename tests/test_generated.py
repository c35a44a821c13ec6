"""The generated files are what the code makes now."""

from __future__ import annotations

import pytest
import yaml

from extproc.config import Config
from tests import generate


@pytest.mark.slow
@pytest.mark.parametrize("path", generate.GENERATED, ids=lambda path: path.name)
def test_generated_file_is_up_to_date(path):
    """When this fails: ``make docs``, and read what changed."""
    assert path.read_text() == generate.GENERATED[path]()


def test_every_option_has_a_row_with_its_default():
    """Flag, default, meaning; nothing is left out."""
    rows = [r for r in generate.options_table().splitlines() if r.startswith("| `")]

    assert len(rows) == len(Config.__struct_fields__)
    assert "| `--port` | `30000` | Port on which Envoy serves clients. |" in rows
    assert any(row.startswith("| `--worker-urls` | none | ") for row in rows)
    assert any(row.startswith("| `--fail-closed` | off | ") for row in rows)


def test_standalone_file_names_the_addresses_of_its_header():
    """Both example workers, the service and Envoy's own endpoint."""
    text = generate.STANDALONE.read_text()
    config = yaml.safe_load(text)

    found = yaml.safe_dump(config["static_resources"]["clusters"])
    for port in (8000, 8001, 9002, 9003):
        assert f"port_value: {port}\n" in found
    assert config["admin"]["address"]["socket_address"]["port_value"] == 9901
    assert "serve --worker-urls http://127.0.0.1:8000 http://127.0.0.1:8001" in text


def test_page_without_markers_is_refused(monkeypatch, tmp_path):
    """Nothing is written to a page that has no place for it."""
    page = tmp_path / "configuration.md"
    page.write_text("# Configuration\n")
    monkeypatch.setattr(generate, "CONFIGURATION", page)

    with pytest.raises(ValueError, match="has no <!-- generated: options -->"):
        generate.configuration()
