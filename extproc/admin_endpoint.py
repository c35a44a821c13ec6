"""What an endpoint of the admin API is made of: its declaration, what its handler gets, how it answers.

The routes of the server and the documentation are both made from the declarations, so they cannot differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from extproc.config import Config
from extproc.errors import error_body
from extproc.fleet import Fleet
from extproc.generation_check import GenerationCheck
from extproc.readiness import Readiness
from extproc.worker_client import WorkerClient
from policies.base import Policy

MAX_TIMEOUT_S = 31_536_000.0
TRUE = frozenset({"1", "true", "yes"})

JSON = "application/json"
TEXT = "text/plain"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """What handlers work with."""

    readiness: Readiness
    fleet: Fleet
    client: WorkerClient
    running: Callable[[], Config]
    """Returns the configuration in force."""

    policies: Callable[[], Iterable[Policy]]
    """Returns the policies in force, one per pool."""

    generation: GenerationCheck

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.running()


Handler = Callable[[Admin, web.Request], Awaitable[web.Response]]


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a path or a query."""

    name: str
    meaning: str
    kind: str = "string"
    """Its JSON type."""

    where: str = "query"
    required: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """One possible answer."""

    status: int
    when: str
    content: Any = None
    """Type of the JSON body; None when it is text or has no fixed shape."""

    media_type: str = JSON


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Method and path with their handler, and what there is to know of them."""

    method: str
    path: str
    handler: Handler
    summary: str
    replies: tuple[Reply, ...]
    curl: str
    """Arguments of curl; ``$ROUTER`` stands for the router's URL."""

    sample: str = ""
    """What curl then prints."""

    notes: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    """Type of the JSON body of the request."""

    is_open: bool = False
    """Whether clients may use it who are no administrators."""


class ErrorAnswer(msgspec.Struct):
    """Why a request was not carried out."""

    error: str
    code: str


class ApiError(Exception):
    """The request is not carried out; the text says why."""

    def __init__(
        self, status: int, code: str, message: str, extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.extra = extra or {}
        """What the answer has beside text and code."""


def json_answer(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    """Return *value* as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type=JSON)


def error_answer(
    status: int,
    code: str,
    message: str,
    *,
    extra: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return an error in vLLM Router's shape."""
    # Unlike msgspec this also writes half of a character, which may stand in a path.
    body = json.dumps({"error": message, "code": code, **msgspec.to_builtins(extra or {})})
    return web.Response(status=status, text=body, content_type=JSON, headers=headers)


def openai_error(
    status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error in OpenAI's shape, for what clients use that are no administrators."""
    body = error_body(status, code, message)
    return web.Response(status=status, text=body, content_type=JSON, headers=headers)


def is_on(request: web.Request, name: str) -> bool:
    """Tell whether the switch *name* of the query is on."""
    return request.query.get(name, "").lower() in TRUE


def seconds(request: web.Request, name: str, default: float) -> float:
    """Return the number of seconds that the query has under *name*."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_TIMEOUT_S:
        raise ApiError(
            400, "INVALID_REQUEST", f"{name}: expected seconds from 0 to {MAX_TIMEOUT_S:.0f}"
        )
    return value


async def read_json(request: web.Request) -> Any:
    """Return the JSON body of *request*."""
    try:
        return msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "INVALID_REQUEST", f"the body is not JSON: {error}") from error
