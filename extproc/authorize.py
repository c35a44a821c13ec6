"""``/authorize``: Envoy asks here whether a request may come in (its ext_authz filter).

It is no part of the admin API, and no route of Envoy leads to it. 200 lets the request in and names the
client, 401 and 503 turn it away; Envoy words the answer to the client itself.
"""

from __future__ import annotations

from aiohttp import web

from extproc.token_cache import Verdict
from extproc.token_validation import TokenValidator

PATH = "/authorize"
IDENTITY_HEADER = "x-router-client"
"""The client's name, as Envoy's other ways to authenticate set it; clients cannot send it themselves."""

ADDRESS_HEADER = "x-router-client-address"
"""The client's IP address, as Envoy sees it."""

_STATUSES = {Verdict.ACCEPTED: 200, Verdict.REJECTED: 401, Verdict.UNKNOWN: 503}


def add_authorize(app: web.Application, validator: TokenValidator) -> None:
    """Let *app* answer Envoy's questions."""

    async def authorize(request: web.Request) -> web.Response:
        token = bearer_token(request.headers.getall("Authorization", []))
        if not token:
            return web.Response(status=401)
        address = request.headers.get(ADDRESS_HEADER, "")
        verdict, name = await validator.validate(token, address)
        headers = {IDENTITY_HEADER: name} if verdict is Verdict.ACCEPTED else None
        return web.Response(status=_STATUSES[verdict], headers=headers)

    # Whatever the method of the request in question is.
    app.router.add_route("*", PATH, authorize)


def bearer_token(values: list[str]) -> str:
    """Return the token of the one ``Authorization`` header, "" when there is none or more than one."""
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""
