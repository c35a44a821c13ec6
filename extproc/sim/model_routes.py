"""The routes about models: their list, and LoRA adapters loaded and unloaded at run time."""

import time
from http import HTTPStatus

import msgspec
from aiohttp import web

from extproc.sim.api_errors import ApiError
from extproc.sim.exchange import Exchange, Replies, Route, Routes, parse_json
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.served_models import ServedModels


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /v1/unload_lora_adapter``."""

    lora_name: str


class ModelRoutes:
    """Handlers of the routes about models, as with VLLM_ALLOW_RUNTIME_LORA_UPDATING set."""

    def __init__(
        self, models: ServedModels, faults: FaultSwitch, replies: Replies, *, max_model_len: int
    ) -> None:
        self._models = models
        self._faults = faults
        self._replies = replies
        self._max_model_len = max_model_len
        self._started = int(time.time())

    def routes(self) -> Routes:
        """Return the routes."""
        return {
            ("GET", "/v1/models"): Route(self._list),
            ("POST", "/v1/load_lora_adapter"): Route(self._load),
            ("POST", "/v1/unload_lora_adapter"): Route(self._unload),
        }

    async def _list(self, exchange: Exchange) -> web.StreamResponse:
        status = self._faults.faults.models_status
        if status >= HTTPStatus.BAD_REQUEST:
            raise ApiError(status, "simulated failure")
        cards = self._models.cards(created=self._started, max_model_len=self._max_model_len)
        return self._replies.json(
            msgspec.json.encode({"object": "list", "data": cards}), status=status
        )

    async def _load(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, LoadAdapterRequest)
        self._models.load_adapter(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
        return self._success(asked.lora_name, "added")

    async def _unload(self, exchange: Exchange) -> web.StreamResponse:
        asked = parse_json(exchange, UnloadAdapterRequest)
        self._models.unload_adapter(asked.lora_name)
        return self._success(asked.lora_name, "removed")

    def _success(self, name: str, done: str) -> web.Response:
        text = f"Success: LoRA adapter '{name}' {done} successfully."
        return self._replies.plain(text.encode())
