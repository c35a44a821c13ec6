"""What workers say of their models: ``GET /v1/models`` and the gauges of ``GET /metrics``, read into values."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MAX_MODELS = 512
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 512
"""Longer texts of an entry are cut."""

MAX_MODELS_BYTES = 256 * 2**10
"""A longer answer of ``/v1/models`` is not read."""

MAX_METRICS_BYTES = 4 * 2**20
"""A longer answer of ``/metrics`` is not read."""

MAX_PARSED_BYTES = 2**20
"""What of it is looked at. The gauges come first, whatever the number of ranks."""

MAX_SERIES = 4096
MAX_COUNT = 2.0**53
"""Whoever claims more requests than this does not count."""

FIELDS = ("id", "object", "created", "owned_by", "root", "parent", "max_model_len")
"""What vLLM documents of an entry, but for ``permission``, which says nothing of a model."""

_INTEGERS = range(-(2**63), 2**63)
"""What every reader of JSON understands."""

_GAUGES = {
    b"\nvllm:num_requests_running": b"running",
    b"\nvllm:num_requests_waiting": b"waiting",
    b"\nvllm:kv_cache_usage_perc": b"kv",
    b"\nvllm:gpu_cache_usage_perc": b"kv",  # its name in older versions
}
# Possessive, so that no input makes them try again: each is one pass over a line.
_SAMPLE = re.compile(rb"(?:\{([^}\n]*+)\})?+ (\S{1,32}+)(?!\S)")
_ENGINE_LABEL = re.compile(rb'\bengine="(\d{1,4}+)"')


@dataclasses.dataclass(frozen=True, slots=True)
class ModelList:
    """The models of one worker."""

    base: frozenset[str]
    """Names of the base model; several when it has aliases."""

    adapters: frozenset[str] = frozenset()
    """LoRA adapters that are loaded."""

    entries: tuple[dict[str, Any], ...] = ()
    """The entries in the worker's order, with the fields that vLLM documents and no others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What a worker's metrics say of one rank, at the time of the reading."""

    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0
    """Share of the KV cache in use, 0 to 1; of several ranks the highest."""


def parse_models(body: bytes) -> ModelList:
    """Read the answer of ``/v1/models``. ``ValueError`` when it is none."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ValueError('expected {"data": [...]}')  # noqa: TRY004  bad input, not a bad call
    base: list[str] = []
    adapters: list[str] = []
    kept: list[dict[str, Any]] = []
    for entry in entries[:MAX_MODELS]:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not is_model_name(name):
            continue
        # vLLM names the base model as the parent of an adapter.
        (adapters if entry.get("parent") else base).append(name)
        kept.append(_kept(entry))
    if not base:
        raise ValueError("it names no base model")
    return ModelList(frozenset(base), frozenset(adapters), tuple(kept))


def is_model_name(text: str) -> bool:
    """Tell whether *text* can name a model: printable, and of a length that a person would give."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


def parse_metrics(body: bytes) -> tuple[dict[int | None, Load], tuple[int, ...]]:
    """Read vLLM's metrics: load by rank (the ``engine`` label; None without one), and the ranks, sorted.

    Takes one pass over each of a few names, and over no more than ``MAX_SERIES`` lines.
    """
    found: dict[int | None, dict[bytes, float]] = {}
    ranks: set[int] = set()
    for field, rank, text in _samples(body):
        if field == b"running" and rank is not None:
            ranks.add(rank)
        try:
            number = float(text)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        values = found.setdefault(rank, {})
        if field == b"kv":
            values[field] = max(values.get(field, 0.0), number)
        else:  # one series per model name: they add up
            values[field] = min(values.get(field, 0.0) + number, MAX_COUNT)
    loads = {
        rank: Load(
            running=int(values.get(b"running", 0)),
            waiting=int(values.get(b"waiting", 0)),
            kv_usage_ratio=values.get(b"kv", 0.0),
        )
        for rank, values in found.items()
    }
    return loads, tuple(sorted(ranks))


def _samples(body: bytes) -> Iterator[tuple[bytes, int | None, bytes]]:
    """Return what is measured, the rank and the value of each series that counts."""
    text = b"\n" + body[:MAX_PARSED_BYTES]
    end = len(text)
    if len(body) > MAX_PARSED_BYTES:  # half a number is another number
        end = text.rfind(b"\n")
    left = MAX_SERIES
    for name, field in _GAUGES.items():
        at = text.find(name, 0, end)
        while at >= 0 and left:
            left -= 1
            after = at + len(name)
            sample = _SAMPLE.match(text, after, end)
            if sample is not None:
                engine = _ENGINE_LABEL.search(sample[1] or b"")
                yield field, None if engine is None else int(engine[1]), sample[2]
            at = text.find(name, after, end)


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of an entry: documented fields with a value of sensible size."""
    kept: dict[str, Any] = {}
    for field in FIELDS:
        value = entry.get(field)
        if field in entry and _is_scalar(value):
            kept[field] = value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
    if isinstance(entry.get("permission"), list):
        kept["permission"] = []
    return kept


def _is_scalar(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return value in _INTEGERS
    return value is None or isinstance(value, str | bool | float)
