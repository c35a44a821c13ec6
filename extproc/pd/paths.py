"""Which requests have a prefill phase of their own."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """An endpoint whose requests can be split into a prefill and a decode leg."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    GENERATE = "/inference/v1/generate"


_ENDPOINTS = {str(endpoint): endpoint for endpoint in Endpoint}


def phase_of(path: str) -> Endpoint | None:
    """Return the endpoint that *path* names; None when its requests are not split.

    A query string and one trailing slash do not matter.
    """
    return _ENDPOINTS.get(path.partition("?")[0].removesuffix("/"))


_WITHOUT_ENGINE = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/render",
        "/v1/completions/render",
    }
)


def reaches_engine(method: str, path: str) -> bool:
    """Tell whether a request may be one that the engine itself serves, not only the HTTP server before it."""
    return method == "POST" and path.partition("?")[0].removesuffix("/") not in _WITHOUT_ENGINE
