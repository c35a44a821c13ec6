"""The routes that make the engine work: chat, completions, responses, embeddings, rerank."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence

from aiohttp import web

from extproc.sim.chat import ChatFormat, ChatRequest
from extproc.sim.completions import CompletionFormat, CompletionRequest
from extproc.sim.engine_loop import Generation
from extproc.sim.exchange import Exchange, Replies, Route, Routes, parse_json
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.generation import Format, Head, StreamFormat
from extproc.sim.kv_connector import DecodeLeg, KvConnector, PrefillLeg
from extproc.sim.kv_params import KvTransferParams
from extproc.sim.pooling import EmbeddingFormat, EmbeddingRequest, RerankFormat, RerankRequest
from extproc.sim.ranks import Rank, Ranks
from extproc.sim.responses_api import ResponsesFormat, ResponsesRequest
from extproc.sim.served_models import ServedModels
from extproc.sim.work import Answering, Work, of_adapter


class Inference:
    """Handlers of the inference routes of one worker."""

    def __init__(
        self,
        answering: Answering,
        models: ServedModels,
        ranks: Ranks,
        faults: FaultSwitch,
        replies: Replies,
        *,
        kv: KvConnector,
    ) -> None:
        self._answering = answering
        self._models = models
        self._ranks = ranks
        self._faults = faults
        self._replies = replies
        self._kv = kv

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
        answer = ChatFormat(asked, head, self._answering)
        return await self._reply_or_stream(exchange, head, answer, asked.kv_transfer_params)

    async def _completions(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, CompletionRequest)
        head = self._head(exchange, "cmpl-", asked.model)
        answer = CompletionFormat(asked, head, self._answering)
        return await self._reply_or_stream(exchange, head, answer, asked.kv_transfer_params)

    async def _responses(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, ResponsesRequest)
        head = self._head(exchange, "resp_", asked.model)
        answer = ResponsesFormat(asked, head, self._answering)
        return await self._reply_or_stream(exchange, head, answer, asked.kv_transfer_params)

    async def _embeddings(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, EmbeddingRequest)
        head = self._head(exchange, "embd-", asked.model)
        return await self._reply(exchange, head, EmbeddingFormat(asked, head, self._answering))

    async def _rerank(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, RerankRequest)
        head = self._head(exchange, "rerank-", asked.model)
        return await self._reply(exchange, head, RerankFormat(asked, head, self._answering))

    def _head(self, exchange: Exchange, id_prefix: str, model: str | None) -> Head:
        served = self._models.resolve(model)
        # vLLM makes the caller's request id part of the response's id
        request_id = exchange.request.headers.get("X-Request-Id") or uuid.uuid4().hex
        return Head(
            id=id_prefix + request_id,
            created=int(time.time()),
            model=served,
            request_id=request_id,
        )

    def _works(self, head: Head, answer: Format) -> Sequence[Work]:
        if self._models.is_adapter(head.model):
            return [of_adapter(work, head.model) for work in answer.works]
        return answer.works

    @contextlib.contextmanager
    def _generating(
        self, rank: Rank, works: Sequence[Work], *, arrived: float | None = None
    ) -> Iterator[Generation]:
        """Let *rank* compute *works*; what is left of them at the end of the block is aborted."""
        generation = rank.submit(works, arrived=arrived)
        try:
            yield generation
        finally:
            # a client that went away cancels this task: its sequences must not run on
            rank.engine_loop.abort(generation)

    async def _reply(self, exchange: Exchange, head: Head, answer: Format) -> web.StreamResponse:
        works, rank = self._works(head, answer), self._ranks.choose(exchange)
        with self._generating(rank, works) as generation:
            await generation.finished()
        return self._replies.json(answer.whole(generation.choices))

    async def _reply_or_stream(
        self,
        exchange: Exchange,
        head: Head,
        answer: StreamFormat,
        params: KvTransferParams | None,
    ) -> web.StreamResponse:
        works, rank = self._works(head, answer), self._ranks.choose(exchange)
        leg = self._kv.leg(
            params, works, request_id=head.request_id, answer_id=head.id, stream=answer.stream
        )
        arrived, kept = rank.engine_loop.now(), None
        if isinstance(leg, DecodeLeg):
            works = await self._kv.receive(leg, rank, works)
        elif isinstance(leg, PrefillLeg):
            works = [dataclasses.replace(work, keep_kv=True) for work in works]
        with self._generating(rank, works, arrived=arrived) as generation:
            if answer.stream:
                return await self._stream(exchange, answer, generation)
            await generation.finished()
            if isinstance(leg, PrefillLeg):
                kept = self._kv.keep(leg, rank, generation)
        return self._replies.json(answer.whole(generation.choices, kept))

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
