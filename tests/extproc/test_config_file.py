"""The file of options: what it may be, and where an error says that it is."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import load
from extproc.config_file import MAX_FILE_BYTES, read
from extproc.errors import ConfigError


def written(tmp_path, text):
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port: 8080\nhost: 127.0.0.1\nretry_max_retries: many\n", 3),  # wrong type
        ("# comment\n\nport: 0\n", 3),  # out of range
        ("port: 8080\nprot: 1\n", 2),  # unknown
        ("port: 8080\nhost: nowhere\n", 2),  # refused by a check of our own
        ("port: 8080\n\npolicy: best\n", 3),  # no such policy
        ("policy:\n  name: round_robin\n  params: {x: 1}\n", 1),  # no such parameter
        ("worker_urls:\n  - http://a:1\n  - 7\n", 1),  # within a list
        ("session_headers: [a b]\n", 1),
        ("port: 1\nport: 2\n", 2),  # given twice
        ("a: [\n", 2),  # not YAML
    ],
)
def test_error_names_the_line(tmp_path, text, line):
    """Whoever reads it need not search."""
    path = written(tmp_path, text)

    with pytest.raises(ConfigError, match=rf"line {line}\b") as caught:
        load(path, {})
    assert str(path) in str(caught.value)


def test_error_of_a_flag_does_not_blame_the_file(tmp_path):
    """The flag has replaced what stands there."""
    path = written(tmp_path, "port: 8080\n")

    with pytest.raises(ConfigError) as caught:
        load(path, {"port": 0})
    assert str(path) not in str(caught.value)


def test_error_without_a_place_names_the_file(tmp_path):
    """A worker URL may come from anywhere."""
    path = written(tmp_path, "worker_urls: [ftp://a]\n")

    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load(path, {})


@pytest.mark.parametrize(
    "text",
    ["api_key: CANARY CANARY\n", "api_key: [CANARY]\n", 'api_key: "CANARY\n', "CANARY: 1 2: x"],
)
def test_error_shows_no_value(tmp_path, text):
    """It may be a secret."""
    path = written(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert text.startswith("CANARY") or "CANARY" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_empty_file_is_no_options(tmp_path, text):
    """As if there were none."""
    assert load(written(tmp_path, text), {}) == load(None, {})


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"- 1\n", b"text", b"1: 2\n", b"a: !!int ''\n", b"a: 2026-99-99", b"[" * 5000],
)
def test_content_that_is_no_mapping_of_options_is_refused(tmp_path, content):
    """Whatever the YAML library makes of it."""
    path = tmp_path / "router.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError):
        load(path, {})


@given(content=st.binary(max_size=200))
def test_any_bytes_are_options_or_an_error(tmp_path_factory, content):
    """Nothing else comes out."""
    path = tmp_path_factory.mktemp("config") / "router.yaml"
    path.write_bytes(content)

    with contextlib.suppress(ConfigError):
        read(path)


def test_file_without_end_is_refused(tmp_path):
    """As a device may be."""
    path = tmp_path / "router.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)

    with pytest.raises(ConfigError, match="larger than"):
        read(path)
