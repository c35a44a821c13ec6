"""The YAML file of options, with the lines in which its keys stand: an error says where to look.

Values are never shown: one of them may be a secret.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from extproc.errors import ConfigError

MAX_FILE_BYTES = 16 * 2**20

# What PyYAML raises for malformed input, beside its own errors: `!!int ""`, `!!bool x`, a date that there
# is not, brackets nested a thousand deep.
_FAULTS = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)

_PLACE = re.compile(r"`\$\.(\w+)[^`]*`|unknown field `(\w+)`")
"""How msgspec names a field."""

_NAME = re.compile(r"[a-z_0-9]+")


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file holds."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    """By key, counted from 1."""

    def where(self, reason: str, flags: Collection[str]) -> str:
        """Return where the option stands that *reason* speaks of, as the beginning of a sentence.

        That is the file and the line; nothing when the option came from one of the *flags*.
        """
        found = _PLACE.search(reason)
        names = [*(found.groups() if found else ()), *_NAME.findall(reason.partition(":")[0])]
        for name in names:
            if name in flags:
                return ""
            if name in self.lines:
                return f"{self.path}, line {self.lines[name]}: "
        return f"{self.path}: "


def read(path: Path) -> ConfigFile:
    """Read a YAML mapping of options; ``ConfigError`` names the line."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
        lines = _lines(path, yaml.compose(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_reason(error)}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, *_FAULTS) as error:
        # Its own text may hold a value.
        raise ConfigError(f"{path} is not YAML: {type(error).__name__}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected a mapping of options, got {type(values).__name__}")
    return ConfigFile(path, values, lines)


def _lines(path: Path, root: yaml.Node | None) -> dict[str, int]:
    """Return the line of each key; ``ConfigError`` when one is there twice, which YAML would not tell."""
    lines: dict[str, int] = {}
    if isinstance(root, yaml.MappingNode):
        for key, _ in root.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{path}, line {line}: {key.value} is given twice, first in line {lines[key.value]}"
                )
            lines[key.value] = line
    return lines


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Say what is wrong and where, without the line itself: it may hold a secret."""
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    return f"{error.problem or error.context}{where}"
