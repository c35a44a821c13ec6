"""The routes around inference: tokens, health, load, metrics, cache, audio uploads, realtime."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from extproc.sim.api_errors import ApiError, invalid
from extproc.sim.config import SimConfig
from extproc.sim.exchange import Exchange, Replies, Route, Routes, parse_json
from extproc.sim.exposition import Exposition
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.gate import Gate
from extproc.sim.generation import token_ids
from extproc.sim.kv_connector import KvConnector
from extproc.sim.kv_exposition import KvCollector
from extproc.sim.ranks import Ranks
from extproc.sim.served_models import ServedModels
from extproc.sim.server_info import VERSION, describe
from extproc.sim.tokens import detokenize, tokenize, tokenize_chat


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /tokenize``: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class ServiceRoutes:
    """Handlers that need no step of the engine."""

    def __init__(
        self,
        config: SimConfig,
        faults: FaultSwitch,
        replies: Replies,
        *,
        models: ServedModels,
        ranks: Ranks,
        kv: KvConnector,
        gate: Gate,
        max_model_len: int,
        load: Callable[[], int],
    ) -> None:
        self._config = config
        self._models = models
        self._ranks = ranks
        self._gate = gate
        self._faults = faults
        self._replies = replies
        self._max_model_len = max_model_len
        self._load = load
        engines = {str(rank.number): rank.engine for rank in ranks}
        transfers = KvCollector(kv, ranks, model_name=lambda: models.bases[0])
        self._exposition = Exposition(engines, model_name=lambda: models.bases[0], more=[transfers])
        self.prefix_cache_resets = 0
        """Requests to ``/reset_prefix_cache`` so far."""

    def routes(self) -> Routes:
        """Return the routes."""
        transcribe = Route(self._transcribe, inference=True, keep_body=False)
        return {
            ("GET", "/health"): Route(self._health),
            ("GET", "/ping"): Route(self._ping),
            ("POST", "/ping"): Route(self._ping),
            ("GET", "/version"): Route(self._version),
            ("GET", "/load"): Route(self._server_load),
            ("GET", "/metrics"): Route(self._metrics),
            ("GET", "/server_info"): Route(self._server_info),
            ("GET", "/v1/realtime"): Route(self._realtime, inference=True),
            ("POST", "/tokenize"): Route(self._tokenize),
            ("POST", "/detokenize"): Route(self._detokenize),
            ("POST", "/reset_prefix_cache"): Route(self._reset_prefix_cache),
            ("POST", "/v1/audio/transcriptions"): transcribe,
            ("POST", "/v1/audio/translations"): transcribe,
        }

    async def _health(self, exchange: Exchange) -> web.StreamResponse:
        await self._faults.hold_health()
        return await self._ping(exchange)

    async def _ping(self, exchange: Exchange) -> web.StreamResponse:
        if self._gate.loading:
            return self._replies.plain(b"", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return self._replies.plain(b"", status=self._faults.faults.health_status)

    async def _version(self, exchange: Exchange) -> web.StreamResponse:
        return self._json({"version": VERSION})

    async def _server_load(self, exchange: Exchange) -> web.StreamResponse:
        return self._json({"server_load": self._load()})

    async def _metrics(self, exchange: Exchange) -> web.StreamResponse:
        return self._replies.plain(
            self._exposition.render(), content_type=self._exposition.content_type
        )

    async def _server_info(self, exchange: Exchange) -> web.StreamResponse:
        document = describe(
            self._config,
            self._models,
            as_json=exchange.request.query.get("config_format") == "json",
            max_model_len=self._max_model_len,
            kv_blocks=next(iter(self._ranks)).engine.cache.capacity_blocks,
        )
        return self._json(document)

    async def _tokenize(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, TokenizeRequest)
        self._models.resolve(asked.model)
        if asked.messages is not None:
            tokens = tokenize_chat(asked.messages, asked.tools)
        elif asked.prompt is not None:
            tokens = tokenize(asked.prompt)
        else:
            raise invalid("prompt or messages is required", param="prompt")
        return self._json(
            {
                "count": len(tokens),
                "max_model_len": self._max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _detokenize(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, DetokenizeRequest)
        self._models.resolve(asked.model)
        return self._json({"prompt": detokenize(token_ids(asked.tokens, param="tokens"))})

    async def _reset_prefix_cache(self, exchange: Exchange) -> web.StreamResponse:
        self.prefix_cache_resets += 1
        for rank in self._ranks:
            rank.engine.cache.reset()
        return self._replies.plain(b"")

    async def _transcribe(self, exchange: Exchange) -> web.StreamResponse:
        if not exchange.request.content_type.startswith("multipart/"):
            raise ApiError(HTTPStatus.BAD_REQUEST, "file: Field required")
        self._ranks.choose(exchange).served += 1
        text = f"Hello from {self._config.name}. The upload had {exchange.body_bytes} bytes."
        return self._json({"text": text})

    async def _realtime(self, exchange: Exchange) -> web.StreamResponse:
        """Echo every message of a WebSocket."""
        asked = exchange.request.headers.get("Sec-WebSocket-Protocol", "")
        protocols = [name.strip() for name in asked.split(",") if name.strip()]
        socket = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
        if not socket.can_prepare(exchange.request).ok:
            return self._replies.json(b'{"detail":"Not Found"}', status=HTTPStatus.NOT_FOUND)
        self._ranks.choose(exchange).served += 1
        socket.headers.update(self._replies.headers)
        await socket.prepare(exchange.request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        return socket

    def _json(self, document: object) -> web.Response:
        return self._replies.json(msgspec.json.encode(document))
