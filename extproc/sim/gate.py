"""What a request passes before its route: the base path, the key, and a model that still loads."""

import hmac

from aiohttp import web

from extproc.sim.control import PREFIX as CONTROL_PREFIX

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Beginnings of the paths that need the key; those of vLLM 0.32."""


class Gate:
    """The gate of one worker; *loading* is open to change."""

    def __init__(self, *, root_path: str, api_key: str | None, loading: bool) -> None:
        self.loading = loading
        """Whether health and inference are answered 503 because there is no model yet."""
        self._root_path = root_path
        self._api_key = api_key

    def inner_path(self, raw_path: str) -> str:
        """Return the path below the base path, without its query; empty when it is not below.

        Control paths are reachable with and without the base path.
        """
        path = raw_path.partition("?")[0]
        if path.startswith(f"{self._root_path}/"):
            return path.removeprefix(self._root_path)
        return path if path.startswith(CONTROL_PREFIX) else ""

    def admits(self, request: web.BaseRequest, path: str) -> bool:
        """Return whether *request* has the key that *path* needs."""
        if self._api_key is None or request.method == "OPTIONS" or not path.startswith(GUARDED):
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            key.encode("utf-8", "surrogateescape"), self._api_key.encode()
        )
