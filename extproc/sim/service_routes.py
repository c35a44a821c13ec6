"""The routes around inference: models, tokens, health, load, metrics, audio uploads, realtime."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from extproc.sim.api_errors import ApiError, invalid
from extproc.sim.config import SimConfig
from extproc.sim.engine import Engine
from extproc.sim.exchange import Exchange, Replies, Route, Routes, parse_json
from extproc.sim.exposition import Exposition
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.generation import token_ids
from extproc.sim.tokens import detokenize, tokenize, tokenize_chat

VERSION = "0.32.0+sim"
"""The vLLM release whose surface is imitated."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /tokenize``: a prompt or a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /detokenize``."""

    tokens: list[int]


class ServiceRoutes:
    """Handlers that need no step of the engine."""

    def __init__(
        self,
        config: SimConfig,
        engine: Engine,
        faults: FaultSwitch,
        replies: Replies,
        *,
        max_model_len: int,
        load: Callable[[], int],
    ) -> None:
        self._config = config
        self._engine = engine
        self._faults = faults
        self._replies = replies
        self._max_model_len = max_model_len
        self._load = load
        self._exposition = Exposition(engine, config.models[0])
        self._started = int(time.time())

    def routes(self) -> Routes:
        """Return the routes."""
        transcribe = Route(self._transcribe, inference=True, keep_body=False)
        return {
            ("GET", "/health"): Route(self._health),
            ("GET", "/ping"): Route(self._health),
            ("POST", "/ping"): Route(self._health),
            ("GET", "/version"): Route(self._version),
            ("GET", "/load"): Route(self._server_load),
            ("GET", "/metrics"): Route(self._metrics),
            ("GET", "/v1/models"): Route(self._models),
            ("GET", "/v1/realtime"): Route(self._realtime, inference=True),
            ("POST", "/tokenize"): Route(self._tokenize),
            ("POST", "/detokenize"): Route(self._detokenize),
            ("POST", "/reset_prefix_cache"): Route(self._reset_prefix_cache),
            ("POST", "/v1/audio/transcriptions"): transcribe,
            ("POST", "/v1/audio/translations"): transcribe,
        }

    async def _health(self, exchange: Exchange) -> web.StreamResponse:
        return self._replies.plain(b"", status=self._faults.faults.health_status)

    async def _version(self, exchange: Exchange) -> web.StreamResponse:
        return self._json({"version": VERSION})

    async def _server_load(self, exchange: Exchange) -> web.StreamResponse:
        return self._json({"server_load": self._load()})

    async def _metrics(self, exchange: Exchange) -> web.StreamResponse:
        return self._replies.plain(
            self._exposition.render(), content_type=self._exposition.content_type
        )

    async def _models(self, exchange: Exchange) -> web.StreamResponse:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": self._config.models[0],
                "parent": None,
                "max_model_len": self._max_model_len,
            }
            for name in self._config.models
        ]
        return self._json({"object": "list", "data": cards})

    async def _tokenize(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, TokenizeRequest)
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
        return self._json({"prompt": detokenize(token_ids(asked.tokens, param="tokens"))})

    async def _reset_prefix_cache(self, exchange: Exchange) -> web.StreamResponse:
        self._engine.cache.reset()
        return self._replies.plain(b"")

    async def _transcribe(self, exchange: Exchange) -> web.StreamResponse:
        if not exchange.request.content_type.startswith("multipart/"):
            raise ApiError(HTTPStatus.BAD_REQUEST, "file: Field required")
        text = f"Hello from {self._config.name}. The upload had {exchange.body_bytes} bytes."
        return self._json({"text": text})

    async def _realtime(self, exchange: Exchange) -> web.StreamResponse:
        """Echo every message of a WebSocket."""
        asked = exchange.request.headers.get("Sec-WebSocket-Protocol", "")
        protocols = [name.strip() for name in asked.split(",") if name.strip()]
        socket = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
        if not socket.can_prepare(exchange.request).ok:
            return self._replies.json(b'{"detail":"Not Found"}', status=HTTPStatus.NOT_FOUND)
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
