"""A simulated worker: its parts put together, its lifetime and its faults as verbs."""

import asyncio

import msgspec
from aiohttp import web

from extproc.sim.config import SimConfig
from extproc.sim.control import Control
from extproc.sim.dispatch import Dispatcher
from extproc.sim.engine import Engine
from extproc.sim.engine_loop import EngineLoop
from extproc.sim.exchange import Replies, reset
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.faults import Faults
from extproc.sim.gate import Gate
from extproc.sim.inference import Inference
from extproc.sim.kv_connector import KvConnector
from extproc.sim.model_routes import ModelRoutes
from extproc.sim.pace import Pace
from extproc.sim.prefix_cache import BLOCK_TOKENS
from extproc.sim.ranks import Ranks
from extproc.sim.recorder import Recorder
from extproc.sim.served_models import ServedModels
from extproc.sim.service_routes import ServiceRoutes
from extproc.sim.statistics import FinishReason
from extproc.sim.step_model import HARDWARE
from extproc.sim.tls import server_context
from extproc.sim.work import Answering

KEEPALIVE_S = 5.0
"""How long an idle connection stays open, in seconds; uvicorn's default, which vLLM keeps."""

STOP_S = 2.0
"""How long ``stop`` waits for each part, in seconds."""

HEADER_LIMIT_BYTES = 64 * 1024
"""Longest request line or header; what h11 under uvicorn accepts in all."""

BACKLOG = 2048
"""Connections waiting to be accepted; uvicorn's default."""


class SimWorker:
    """One simulated worker, usable in a test's event loop: ``start``, ``url``, ``stop``."""

    def __init__(self, config: SimConfig | None = None) -> None:
        self.config = config = config or SimConfig()
        self.models = ServedModels(config.models, config.lora_modules)
        self.ranks = Ranks(
            [
                EngineLoop(_engine(config), speed=config.speed)
                for _ in range(config.data_parallel_size)
            ],
            start=config.data_parallel_start_rank,
        )
        self.kv = KvConnector(config.kv, self.ranks)
        self.recorder = Recorder(config.record)
        self.crashed = asyncio.Event()
        """Set when a fault made the worker die."""
        self._faults = FaultSwitch(
            config.faults, seed=config.seed, set_slowdown=self.ranks.set_slowdown
        )
        self._gate = Gate(
            root_path=config.root_path,
            api_key=config.api_key,
            loading=config.startup_delay_s > 0,
        )
        self._replies = Replies(config.name)
        self._dispatcher = Dispatcher(
            self._gate, self.recorder, self._faults, self._replies, crash=self.crash
        )
        self._service = self._serve_routes()
        self._loaded: asyncio.TimerHandle | None = None
        self._http: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._port = config.port

    @property
    def engine(self) -> Engine:
        """The engine of the first rank."""
        return next(iter(self.ranks)).engine

    @property
    def port(self) -> int:
        """The TCP port in use; a free one is chosen by ``start`` when the setting is 0."""
        return self._port

    @property
    def url(self) -> str:
        """Where the worker answers, its base path included, without a slash at the end."""
        scheme = "http" if self.config.ssl_certfile is None else "https"
        return f"{scheme}://{self._address}{self.config.root_path}"

    @property
    def _address(self) -> str:
        host = self.config.host
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    @property
    def faults(self) -> Faults:
        """The faults in force."""
        return self._faults.faults

    async def start(self) -> None:
        """Serve; OSError when the address cannot be had, ValueError for what else cannot."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        tls = None
        if config.ssl_certfile is not None:
            tls = server_context(config.ssl_certfile, config.ssl_keyfile)
        await self.kv.start()
        self._http = web.Server(
            self._dispatcher.handle,
            handler_cancellation=True,  # a client that goes away frees its sequences at once
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,  # recorder and routes see the bytes as sent
            max_line_size=HEADER_LIMIT_BYTES,
            max_field_size=HEADER_LIMIT_BYTES,
            max_headers=1000,
        )
        self._listener = await loop.create_server(
            self._http,
            config.host,
            config.port,
            backlog=BACKLOG,
            ssl=tls,
            ssl_shutdown_timeout=None if tls is None else STOP_S,
        )
        self._port = self._listener.sockets[0].getsockname()[1]
        self.ranks.start()
        self.kv.ping(self._address)
        if self._gate.loading:
            self._loaded = loop.call_later(config.startup_delay_s, self._finish_loading)

    async def stop(self) -> None:
        """Stop serving; responses still open are cut. A second call does nothing."""
        self._close_listener()
        if self._loaded is not None:
            self._loaded.cancel()
        await self._dispatcher.cancel_all(STOP_S)
        if self._http is not None:
            self._http.pre_shutdown()
            await self._http.shutdown(STOP_S)
            self._http = None
        self.kv.close()
        await self.ranks.stop()

    def crash(self) -> None:
        """Die at once: reset every connection and refuse new ones. ``stop`` is still needed."""
        self._dispatcher.stopping = True
        self._close_listener()
        self.kv.close()
        if self._http is not None:
            for connection in self._http.connections:
                if connection.transport is not None:
                    reset(connection.transport)
        self.crashed.set()

    def set_faults(self, **fields: object) -> None:
        """Change the named fields of the faults and keep the others."""
        self._faults.set(msgspec.structs.replace(self.faults, **fields))

    def heal(self) -> None:
        """Be healthy again; stalled streams go on."""
        self._faults.set(Faults())

    def fail_next(self, requests: int, *, status_code: int = 503) -> None:
        """Answer the next inference *requests* with an error."""
        self.set_faults(fail_first_n=requests, status_code=status_code)

    def stall(self, *, after: int = 0) -> None:
        """Let streams stop after *after* tokens but stay open, those already open too."""
        self.set_faults(stall_after=after)

    def reset_midstream(self, *, after: int = 0) -> None:
        """Reset the connection of each stream after *after* tokens, of those already open too."""
        self.set_faults(reset_after=after)

    def slow_down(self, factor: float) -> None:
        """Take *factor* times as long for each token, of requests already begun too."""
        self.set_faults(slowdown=factor)

    def set_health(self, status: int) -> None:
        """Let ``/health`` answer *status*."""
        self.set_faults(health_status=status)

    def state(self) -> dict[str, object]:
        """Return what ``GET /_sim/state`` shows; sequences unless the name says requests."""
        engines = [rank.engine for rank in self.ranks]
        finished = sum(sum(engine.statistics.finished.values()) for engine in engines)
        aborted = sum(engine.statistics.finished[FinishReason.ABORT] for engine in engines)
        return {
            "name": self.config.name,
            "running": sum(engine.running for engine in engines),
            "waiting": sum(engine.waiting for engine in engines),
            "finished": finished - aborted,
            "aborted": aborted,
            "kv_usage_ratio": sum(engine.kv_usage_ratio for engine in engines) / len(engines),
            "requests_received": self._dispatcher.received,
            "requests_active": self._dispatcher.active,
            "ranks": {str(rank.number): rank.served for rank in self.ranks},
            "prefix_cache_resets": self._service.prefix_cache_resets,
            "role": self.config.kv.role,
            "kv_transfers_held": len(self.kv.kept),
            "kv_mismatches": self.kv.mismatches,
            "probes": dict(self._dispatcher.probes),
        }

    def _serve_routes(self) -> ServiceRoutes:
        config, models, ranks = self.config, self.models, self.ranks
        faults, replies, dispatcher = self._faults, self._replies, self._dispatcher
        max_model_len = min(config.max_model_len, self.engine.cache.capacity_blocks * BLOCK_TOKENS)
        answering = Answering(worker_name=config.name, max_model_len=max_model_len)
        inference = Inference(answering, models, ranks, faults, replies, kv=self.kv)
        listing = ModelRoutes(models, faults, replies, max_model_len=max_model_len)
        service = ServiceRoutes(
            config,
            faults,
            replies,
            models=models,
            ranks=ranks,
            kv=self.kv,
            gate=self._gate,
            max_model_len=max_model_len,
            load=lambda: dispatcher.active,
        )
        control = Control(self.recorder, faults, models, replies, state=self.state)
        dispatcher.serve(
            {**inference.routes(), **listing.routes(), **service.routes(), **control.routes()}
        )
        return service

    def _finish_loading(self) -> None:
        self._gate.loading = False

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _engine(config: SimConfig) -> Engine:
    """Return the engine of one rank."""
    return Engine(
        HARDWARE[config.hardware],
        kv_blocks=config.kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pace=_pace(config),
    )


def _pace(config: SimConfig) -> Pace | None:
    """Return the fixed pace, None when the step model decides."""
    if config.itl_ms is None and config.ttft_ms is None:
        return None
    itl_ms = config.itl_ms or 0.0
    ttft_ms = itl_ms if config.ttft_ms is None else config.ttft_ms
    return Pace(ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000)
