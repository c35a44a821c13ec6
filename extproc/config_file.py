"""The YAML file of options, with the lines in which its keys stand: an error says where to look.

Values are never shown: one of them may be a secret.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from extproc.errors import ConfigError

MAX_FILE_BYTES = 16 * 2**20

# What PyYAML raises for malformed input, beside its own errors: `!!int ""`, `!!bool x`, a date that there
# is not, brackets nested a thousand deep.
_FAULTS = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)

_PLACE = re.compile(r"`\$\.(\w+)[^`]*`|unknown field `([^`]+)`")
"""How msgspec names a field."""

_AT_FIELD = re.compile(r" - at `\$\.(\w+)`$")
_NAME = re.compile(r"[a-z_0-9]+")

_TOKEN = re.compile(r"'(?:<[a-z ]+>|[]\[{},:?-])'")
"""What YAML's grammar is made of, as PyYAML quotes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file holds."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    """By key, counted from 1."""

    def where(self, names: Iterable[str]) -> str:
        """Return where the first of *names* that is here stands, as the beginning of a sentence."""
        line = next((self.lines[name] for name in names if name in self.lines), None)
        return f"{self.path}: " if line is None else f"{self.path}, line {line}: "


def placed(reason: str, file: ConfigFile | None, flags: Collection[str]) -> str:
    """Return *reason* with the place of the option that it speaks of: one of the *flags*, or where it stands in *file*."""
    found = _PLACE.search(reason)
    names = [*(found.groups() if found else ()), *_NAME.findall(reason.partition(":")[0])]
    flag = next((name for name in names if name in flags), None)
    if flag is not None:
        told = _AT_FIELD.sub("", reason).removeprefix(f"{flag}: ")
        return f"{flag_name(flag)}: {told}"
    return reason if file is None else f"{file.where(filter(None, names))}{reason}"


def placed_later(reason: str, path: Path | None, flags: Collection[str]) -> str:
    """Return *reason*, of an option's file that cannot be used, with the line that names that file."""
    option = reason.partition(":")[0].removeprefix("--").replace("-", "_")
    if path is None or option in flags or not reason.startswith("--"):
        return reason
    try:
        file = read(path)
    except ConfigError:  # it has changed since
        return reason
    return f"{file.where([option])}{reason}" if option in file.lines else reason


def flag_name(option: str) -> str:
    """Return the flag that sets *option*."""
    return f"--{option.replace('_', '-')}"


def read(path: Path) -> ConfigFile:
    """Read a YAML mapping of options; ``ConfigError`` names the line."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    text = _text(path, content)
    try:
        lines = _lines(path, yaml.compose(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_reason(error)}") from None
    except ConfigError:
        raise
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{path} is not YAML: a character that may not be in line {line}"
        ) from None
    except (yaml.YAMLError, *_FAULTS) as error:
        # Its own text may hold a value.
        raise ConfigError(f"{path} is not YAML: {type(error).__name__}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected a mapping of options, got {type(values).__name__}")
    return ConfigFile(path, values, lines)


def _text(path: Path, content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not YAML: it is not UTF-8 text") from None
    if not text.strip():  # rather one that is being written than one that takes all workers away
        raise ConfigError(f"{path} is empty; a file without options holds {{}} or a comment")
    return text


def _lines(path: Path, root: yaml.Node | None) -> dict[str, int]:
    """Return the line of each key; ``ConfigError`` when one is there twice, which YAML would not tell."""
    lines: dict[str, int] = {}
    if isinstance(root, yaml.MappingNode):
        for key, _ in root.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                name = key.value if _NAME.fullmatch(key.value) else "a key"
                first = lines[key.value]
                raise ConfigError(
                    f"{path}, line {line}: {name} is given twice, first in line {first}"
                )
            lines[key.value] = line
    return lines


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Say what kind of mistake it is and where, without anything that stands there: it may be a secret."""
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    said = error.problem or error.context or type(error).__name__
    kind = "".join(_kept(said)).rstrip(" ,:;(") or type(error).__name__
    return f"{kind}{where}"


def _kept(said: str) -> Iterator[str]:
    """Yield *said* up to the first thing that it quotes of the file."""
    position = 0
    for token in _TOKEN.finditer(said):
        before = said[position : token.start()]
        if "'" in before or '"' in before:
            break
        yield before + token[0]
        position = token.end()
    yield re.split("['\"]", said[position:], maxsplit=1)[0]
