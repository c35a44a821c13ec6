"""``/_sim/*``: what a test asks a worker about itself, and how it changes its faults and models."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from extproc.sim.api_errors import ApiError
from extproc.sim.exchange import Exchange, Replies, Route, Routes
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.faults import merge
from extproc.sim.recorder import Recorder
from extproc.sim.served_models import ServedModels
from extproc.sim.wire import parse_body

PREFIX = "/_sim/"


class Models(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /_sim/models``."""

    models: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]


class Control:
    """Handlers of the control routes; none of them is recorded or spoilt."""

    def __init__(
        self,
        recorder: Recorder,
        faults: FaultSwitch,
        models: ServedModels,
        replies: Replies,
        *,
        state: Callable[[], Mapping[str, object]],
    ) -> None:
        self._recorder = recorder
        self._faults = faults
        self._models = models
        self._replies = replies
        self._state = state

    def routes(self) -> Routes:
        """Return the routes."""
        return {
            ("GET", "/_sim/requests"): Route(self._list_requests),
            ("DELETE", "/_sim/requests"): Route(self._clear_requests),
            ("GET", "/_sim/state"): Route(self._show_state),
            ("GET", "/_sim/faults"): Route(self._show_faults),
            ("POST", "/_sim/faults"): Route(self._change_faults),
            ("POST", "/_sim/models"): Route(self._change_models),
        }

    async def _list_requests(self, exchange: Exchange) -> web.StreamResponse:
        return self._json({"requests": [arrival.as_json() for arrival in self._recorder]})

    async def _clear_requests(self, exchange: Exchange) -> web.StreamResponse:
        self._recorder.clear()
        return self._replies.plain(b"", status=HTTPStatus.NO_CONTENT)

    async def _show_state(self, exchange: Exchange) -> web.StreamResponse:
        return self._json(self._state())

    async def _show_faults(self, exchange: Exchange) -> web.StreamResponse:
        return self._json(self._faults.faults)

    async def _change_faults(self, exchange: Exchange) -> web.StreamResponse:
        try:
            faults = merge(self._faults.faults, exchange.body)
        except msgspec.DecodeError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._faults.set(faults)
        return self._json(faults)

    async def _change_models(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_body(exchange.body, Models)
        self._models.replace(asked.models)
        return self._json(asked)

    def _json(self, document: object) -> web.Response:
        return self._replies.json(msgspec.json.encode(document))
