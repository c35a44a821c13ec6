"""The file of options: what it may be, and where an error says that it is."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cli import main
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
        ("port: 1\nretry-max: 2\n", 2),  # unknown, with a hyphen
        ("port: 1\nworker_urls: [http://user:pw@h:1/]\n", 2),
        ("port: 1\nworker_urls: [http://h:1, http://h:1]\n", 2),
        ("port: 1\nworker_dns: [ftp://a]\n", 2),
        ("port: 1\napi_key: \x01\n", 2),  # no character of YAML
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
    """What is wrong concerns several options."""
    path = written(tmp_path, "jwt_jwks: /x\n")

    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load(path, {})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"retry_max_retries": 999}, "--retry-max-retries: Expected `int` <= 100"),
        (
            {"host": "nowhere"},
            "--host: expected an IP address such as 0.0.0.0 or ::, got 'nowhere'",
        ),
        (
            {"worker_weights": ["b=1"]},
            "--worker-weights: 'b=1' names no worker; expected URL=WEIGHT",
        ),
    ],
)
@pytest.mark.parametrize("text", [None, "port: 8080\nhost: 127.0.0.1\n"])
def test_error_of_a_flag_names_it(tmp_path, flags, said, text):
    """As it is written on the command line."""
    path = None if text is None else written(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load(path, flags)
    assert str(caught.value) == said


def test_file_that_cannot_be_read_is_named_with_the_line_that_names_it(tmp_path, capsys):
    """Unless a flag does."""
    path = written(tmp_path, "worker_urls: []\napi_keys_file: /nowhere\n")
    said = "--api-keys-file: cannot read /nowhere"

    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"vllm-extproc: {path}, line 2: {said}")

    assert main(["check", str(path), "--api-keys-file", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith(f"vllm-extproc: {said}")


@pytest.mark.parametrize(
    "text",
    [
        "api_key: CANARY CANARY\n",
        "api_key: [CANARY]\n",
        'api_key: "CANARY\n',
        "api_key: *CANARY\n",
        "api_key: *CANA'RY\n",
        "api_key: &CANARY x\nb: &CANARY y\n",
        "api_key: !CANARY x\n",
        "api_key: !CANARY!x y\n",
        "api_key: %CANARY\n",
        'api_key: "\\CANARY"\n',
        "api_key: @CANARY\n",
        "api_key: `CANARY\n",
        "api_key: |CANARY\n",
        "api_key: {CANARY\n",
        "%CANARY\n",
        "sk-CANARY: 1\nsk-CANARY: 2\n",
        "? [CANARY]\n: x\n",
        "CANARY: 1 2: x",
    ],
)
def test_error_shows_no_value(tmp_path, text):
    """It may be a secret."""
    path = written(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert "CANA" not in str(caught.value).replace(str(path), "")


@given(
    start=st.sampled_from([*"*&!%@`|>\"'{[?-#,", "!!", "!<", "\\", "%YAML ", '"\\', '"\\x']),
    end=st.text(alphabet="ab'\"<>,:;[]{}*&!%@ \n\\", max_size=8),
)
def test_error_of_yaml_shows_nothing_of_the_file(tmp_path_factory, start, end):
    """Whatever the mistake."""
    path = tmp_path_factory.mktemp("config") / "router.yaml"
    path.write_text(f"port: {start}CANARY{end}\n")

    try:
        read(path)
    except ConfigError as error:
        assert "CANA" not in str(error)  # noqa: PT017  most are none


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: *x\n", "found undefined alias in line 1, column 4"),
        ("a: [1\nb: 2\n", "expected ',' or ']', but got ':' in line 2, column 2"),
        ("a: b: c\n", "mapping values are not allowed here in line 1, column 5"),
        ("a: @b\n", "found character in line 1, column 4"),
    ],
)
def test_error_of_yaml_says_what_kind_it_is(tmp_path, text, said):
    """In the words of the library, as far as they quote nothing."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(written(tmp_path, text))


@pytest.mark.parametrize("text", ["", "\n", " \n\n", "\ufeff"])
def test_empty_file_is_refused(tmp_path, text):
    """It would take all workers away; who wants that says so."""
    with pytest.raises(ConfigError, match="is empty; a file without options"):
        load(written(tmp_path, text), {})


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
