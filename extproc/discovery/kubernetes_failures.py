"""What it means when a request to the API server of Kubernetes fails: for metrics, and in words."""

from __future__ import annotations

from typing import Literal

import aiohttp

from extproc.discovery.pod_watch import DENIED, GONE, TOO_MANY, RefusedError, UnreadableError
from extproc.errors import ConfigError
from extproc.kubernetes_options import KubernetesOptions

Result = Literal["ok", "gone", "denied", "stalled", "failed"]

REQUEST_TIMEOUT = 408


class SlowCredentialsError(TimeoutError):
    """What a kubeconfig says was not there in time."""


FORESEEN = (
    *(RefusedError, UnreadableError, ConfigError),
    *(aiohttp.ClientError, OSError, TimeoutError),
)
"""All that may go wrong without a mistake in this program."""


def result_of(error: Exception, verb: str) -> Result:
    """Return what to count a request as."""
    match error:
        case RefusedError(code=code) if code in DENIED:
            return "denied"
        case RefusedError(code=code) if code == GONE:
            return "gone"
        case aiohttp.ConnectionTimeoutError() | SlowCredentialsError():
            return "failed"
        case TimeoutError() if verb == "watch":
            return "stalled"
        case _:
            return "failed"


def is_hopeless(error: Exception) -> bool:
    """Tell whether the server will not answer otherwise until a person has done something."""
    return (
        isinstance(error, RefusedError)
        and 400 <= error.code < 500
        and error.code not in (REQUEST_TIMEOUT, GONE, TOO_MANY)
    )


def explain(error: Exception, verb: str, options: KubernetesOptions) -> str:
    """Say what was tried in vain, and why."""
    namespace = options.service_discovery_namespace
    where = f"namespace {namespace!r}" if namespace else "all namespaces"
    what = f"{verb} pods in {where}"
    if isinstance(error, RefusedError) and error.code == 403:
        return (
            f"not allowed to {what}: {error}; the router needs a role with the verbs list and watch on pods"
            " there"
        )
    return f"cannot {what}: {_why(error, verb)}"


def _why(error: Exception, verb: str) -> str:
    match error:
        case RefusedError(code=401):
            return f"the API server does not know who this router is: {error}"
        case aiohttp.ConnectionTimeoutError():
            return "no connection to the API server in time"
        case TimeoutError() if not isinstance(error, SlowCredentialsError):
            stalled = "the connection has stalled"
            return stalled if verb == "watch" else "the API server did not answer in time"
        case _ if isinstance(error, FORESEEN):
            return str(error) or type(error).__name__
        case _:
            return f"{type(error).__name__}: {error}"
