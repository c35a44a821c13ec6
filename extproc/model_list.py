"""The models that clients are told of: ``/v1/models`` over all healthy workers.

An entry is what the first healthy worker with that model says of it, as far as ``models`` keeps it. Aliases are entries of their own,
as clients use them like models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from extproc.engine import Engine


def list_models(engines: Iterable[Engine], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one entry for each model of *engines*, and of *aliases* whose model is among them."""
    found: dict[str, dict[str, Any]] = {}
    for engine in engines:
        for entry in engine.models.entries if engine.models is not None else ():
            found.setdefault(entry["id"], entry)
        if engine.spec.model:
            found.setdefault(engine.spec.model, _declared(engine))
    # The name of an alias is replaced in requests, even when a model has the same.
    return list((found | _aliases(found, aliases)).values())


def _aliases(
    found: Mapping[str, dict[str, Any]], aliases: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    return {
        alias: {**found[model], "id": alias, "root": model}
        for alias, model in aliases.items()
        if model in found
    }


def _declared(engine: Engine) -> dict[str, Any]:
    """Return an entry for a model that a worker is declared to serve, but does not name."""
    return {
        "id": engine.spec.model,
        "object": "model",
        "created": int(engine.added_at),
        "owned_by": "vllm",
    }
