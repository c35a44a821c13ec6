"""The routes that make the engine work: chat, completions, responses, embeddings, rerank."""

import time
import uuid

from aiohttp import web

from extproc.sim.api_errors import unknown_model
from extproc.sim.chat import ChatFormat, ChatRequest
from extproc.sim.completions import CompletionFormat, CompletionRequest
from extproc.sim.config import SimConfig
from extproc.sim.engine_loop import EngineLoop, Generation
from extproc.sim.exchange import Exchange, Replies, Route, Routes, parse_json
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.generation import Format, Head, StreamFormat
from extproc.sim.pooling import EmbeddingFormat, EmbeddingRequest, RerankFormat, RerankRequest
from extproc.sim.responses_api import ResponsesFormat, ResponsesRequest
from extproc.sim.work import Answering


class Inference:
    """Handlers of the inference routes of one worker."""

    def __init__(
        self,
        config: SimConfig,
        engine_loop: EngineLoop,
        faults: FaultSwitch,
        replies: Replies,
        *,
        max_model_len: int,
    ) -> None:
        self._answering = Answering(worker_name=config.name, max_model_len=max_model_len)
        self._config = config
        self._engine_loop = engine_loop
        self._faults = faults
        self._replies = replies

    def routes(self) -> Routes:
        """Return the routes."""
        handlers = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/responses": self._responses,
            "/v1/embeddings": self._embeddings,
            "/rerank": self._rerank,
            "/v1/rerank": self._rerank,
            "/v2/rerank": self._rerank,
        }
        return {
            ("POST", path): Route(handler, inference=True) for path, handler in handlers.items()
        }

    async def _chat(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, ChatRequest)
        head = self._head(exchange, "chatcmpl-", asked.model)
        return await self._reply_or_stream(exchange, ChatFormat(asked, head, self._answering))

    async def _completions(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, CompletionRequest)
        head = self._head(exchange, "cmpl-", asked.model)
        return await self._reply_or_stream(exchange, CompletionFormat(asked, head, self._answering))

    async def _responses(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, ResponsesRequest)
        head = self._head(exchange, "resp_", asked.model)
        return await self._reply_or_stream(exchange, ResponsesFormat(asked, head, self._answering))

    async def _embeddings(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, EmbeddingRequest)
        head = self._head(exchange, "embd-", asked.model)
        return await self._reply(EmbeddingFormat(asked, head, self._answering))

    async def _rerank(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, RerankRequest)
        head = self._head(exchange, "rerank-", asked.model)
        return await self._reply(RerankFormat(asked, head, self._answering))

    def _head(self, exchange: Exchange, id_prefix: str, model: str | None) -> Head:
        models = self._config.models
        if model is not None and model not in models:
            raise unknown_model(model)
        # vLLM makes the caller's request id part of the response's id
        request_id = exchange.request.headers.get("X-Request-Id") or uuid.uuid4().hex
        return Head(id=id_prefix + request_id, created=int(time.time()), model=model or models[0])

    async def _reply(self, answer: Format) -> web.StreamResponse:
        generation = self._engine_loop.submit(answer.works)
        try:
            await generation.finished()
        finally:
            # a client that went away cancels this task: its sequences must not run on
            self._engine_loop.abort(generation)
        return self._replies.json(answer.whole(generation.choices))

    async def _reply_or_stream(
        self, exchange: Exchange, answer: StreamFormat
    ) -> web.StreamResponse:
        if not answer.stream:
            return await self._reply(answer)
        generation = self._engine_loop.submit(answer.works)
        try:
            return await self._stream(exchange, answer, generation)
        finally:
            self._engine_loop.abort(generation)

    async def _stream(
        self, exchange: Exchange, answer: StreamFormat, generation: Generation
    ) -> web.StreamResponse:
        response = self._replies.event_stream()
        # the head leaves at once: a real vLLM starts its response before the first token
        await response.prepare(exchange.request)
        exchange.started(response.status)
        await response.write(answer.opening())
        written = [0] * len(generation.choices)
        sent, total = 0, sum(len(work.pieces) for work in answer.works)
        while sent < total:
            await generation.advanced()
            for choice in generation.choices:
                chunks: list[bytes] = []
                produced = choice.produced  # it may grow while this stream is held up
                for position in range(written[choice.index], produced):
                    if self._faults.spoils_stream(sent):
                        await response.write(b"".join(chunks))
                        chunks.clear()
                        await self._faults.spoil_stream(exchange, sent)
                    chunks.append(answer.delta(choice, position))
                    sent += 1
                written[choice.index] = produced
                if chunks:
                    await response.write(b"".join(chunks))
        # the client may close as soon as it has the last event, before write_eof returns
        exchange.ended(response.status)
        await response.write_eof(answer.closing(generation.choices))
        return response
