"""Workers as users write them, in a worker file or in a request to the admin interface.

A worker is a URL, or a mapping with a URL and what else is known:

    workers:
      - http://10.0.0.5:8000
      - url: https://10.0.0.6:8443
        weight: 2
        model: Qwen/Qwen3-8B
        labels: {zone: a}
        tls_name: worker.example

Whatever is not understood is refused, since a misspelt key would be a setting without effect.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from extproc.address import WorkerUrl, is_host_name, is_ip
from extproc.discovery.updates import WorkerSpec, WorkerType

MAX_WORKERS = 10_000
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
MAX_LABELS = 32

IGNORED = frozenset({"priority", "cost"})
"""Keys of vLLM Router without a meaning here; bodies written for it are understood."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_Model = Annotated[str, Meta(min_length=1, max_length=256)]
_LabelKey = Annotated[str, Meta(min_length=1, max_length=63)]
_LabelValue = Annotated[str, Meta(max_length=256)]


class _Item(msgspec.Struct):
    # Optional fields of vLLM Router may be null, as clients write what they do not know.
    url: str
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    model: _Model | None = None
    model_id: _Model | None = None
    worker_type: WorkerType | None = None
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    labels: Annotated[dict[_LabelKey, _LabelValue], Meta(max_length=MAX_LABELS)] = {}
    tls_name: Annotated[str, Meta(min_length=1)] | None = None


def parse_workers(value: object) -> tuple[WorkerSpec, ...]:
    """Read a list of workers, bare or as the only entry ``workers`` of a mapping.

    ``ValueError`` says which item is wrong, what is wrong with it and what is expected.
    """
    if isinstance(value, dict):
        _check_keys(value, {"workers"})
        value = value.get("workers")
    if not isinstance(value, list | tuple):
        raise ValueError(  # noqa: TRY004 - a fault of the user's data, not of the caller
            f"expected a list of workers, or a mapping with the list 'workers', got {_kind(value)}"
        )
    if len(value) > MAX_WORKERS:
        raise ValueError(f"{len(value)} workers: expected at most {MAX_WORKERS}")
    specs: list[WorkerSpec] = []
    by_key: dict[str, int] = {}
    by_url: dict[str, int] = {}
    for index, item in enumerate(value):
        try:
            spec = parse_worker(item)
        except ValueError as error:
            raise ValueError(f"workers[{index}]: {error}") from error
        url, rank = spec.url.url, spec.url.rank
        if (earlier := by_key.get(spec.key)) is not None:
            raise ValueError(f"workers[{index}]: {spec.key} is workers[{earlier}] already")
        # The whole engine meets any of its ranks; ranks meet only the whole engine.
        earlier = by_url.get(url) if rank is None else by_key.get(url)
        if earlier is not None:
            raise ValueError(
                f"workers[{index}]: {spec.key} overlaps with workers[{earlier}], {specs[earlier].key};"
                " expected an engine either as a whole or by its ranks"
            )
        by_key[spec.key] = index
        by_url.setdefault(url, index)
        specs.append(spec)
    return tuple(specs)


def parse_worker(value: object) -> WorkerSpec:
    """Read one worker: a URL, or a mapping as in ``parse_workers``."""
    if isinstance(value, str):
        return WorkerSpec(WorkerUrl.parse(value))
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 - as above
            f"expected a URL or a mapping with one, got {_kind(value)}"
        )
    _check_keys(value, {*_Item.__struct_fields__, *IGNORED})
    known = {key: field for key, field in value.items() if key not in IGNORED}
    try:
        item = msgspec.convert(known, _Item)
    except UnicodeEncodeError as error:
        raise ValueError("a text with half a character, a lone surrogate") from error
    except msgspec.ValidationError as error:  # a ValueError; its path starts with a dollar sign
        raise ValueError(str(error).replace("`$.", "`")) from error
    url = WorkerUrl.parse(item.url)
    worker_type = item.worker_type or WorkerType.REGULAR
    if item.bootstrap_port is not None and worker_type is not WorkerType.PREFILL:
        raise ValueError("bootstrap_port: expected only with worker_type 'prefill'")
    return WorkerSpec(
        url=url,
        weight=item.weight,
        model=_model(item),
        worker_type=worker_type,
        bootstrap_port=item.bootstrap_port,
        labels=_labels(item),
        tls_name="" if item.tls_name is None else _tls_name(item.tls_name, url),
    )


def _check_keys(value: dict[Any, Any], expected: set[str]) -> None:
    for key in value:
        if key not in expected:
            # A URL with a password may stand where a key should: only what looks like one is repeated.
            plain = isinstance(key, str) and _PLAIN_KEY.fullmatch(key)
            what = f"unknown key {key!r}" if plain else "a key that is none"
            raise ValueError(f"{what}: expected {', '.join(sorted(expected - IGNORED))}")


def _model(item: _Item) -> str:
    if item.model and item.model_id and item.model != item.model_id:
        raise ValueError("model and model_id differ: expected one of them")
    model = item.model or item.model_id or ""
    if not model.isprintable():
        raise ValueError(f"model: expected printable characters, got {model!a}")
    return model


def _labels(item: _Item) -> tuple[tuple[str, str], ...]:
    for key, text in item.labels.items():
        if not key.isprintable() or not text.isprintable():
            raise ValueError(f"labels: expected printable characters, got others in {key!a}")
    return tuple(sorted(item.labels.items()))


def _tls_name(text: str, url: WorkerUrl) -> str:
    if url.scheme != "https":
        raise ValueError("tls_name: expected only with an https URL")
    name = text.lower().removesuffix(".")  # no certificate carries the dot of the root
    if not text.isascii() or "%" in name or not (is_ip(name) or is_host_name(name)):
        raise ValueError("tls_name: expected a host name or an IP address, without port")
    return name


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
