"""Embeddings and rerank: requests that the engine only prefills, and their deterministic answers."""

import base64
import math
import random
import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from extproc.sim.answers import seed_of
from extproc.sim.api_errors import invalid
from extproc.sim.generation import Head, Prompt, prompts_of
from extproc.sim.prefix_cache import chain_hashes
from extproc.sim.tokens import tokenize
from extproc.sim.work import Answering, Choice, Work, check_length, usage_of

DIMENSIONS = 64
"""Length of an embedding when the request does not say."""


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /v1/embeddings`` that change the answer."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /v1/rerank`` that change the answer."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None


class EmbeddingFormat:
    """One request to ``/v1/embeddings``."""

    def __init__(self, request: EmbeddingRequest, head: Head, answering: Answering) -> None:
        self._dimensions = DIMENSIONS if request.dimensions is None else request.dimensions
        if self._dimensions < 1:
            raise invalid("dimensions must be at least 1", param="dimensions")
        self._prompts = prompts_of(request.input, param="input")
        self._base64 = request.encoding_format == "base64"
        self._head = head
        self.works = _prefill_only(self._prompts, answering)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the response body."""
        data = []
        for choice in choices:
            vector: list[float] | str = embedding(self._prompts[choice.index], self._dimensions)
            if self._base64:
                packed = struct.pack(f"<{self._dimensions}f", *vector)
                vector = base64.b64encode(packed).decode()
            data.append({"index": choice.index, "object": "embedding", "embedding": vector})
        usage = usage_of(choices)
        return msgspec.json.encode(
            {
                "id": self._head.id,
                "object": "list",
                "created": self._head.created,
                "model": self._head.model,
                "data": data,
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "total_tokens": usage.total_tokens,
                    "completion_tokens": 0,
                    "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
                },
            }
        )


class RerankFormat:
    """One request to ``/rerank``, ``/v1/rerank`` or ``/v2/rerank``."""

    def __init__(self, request: RerankRequest, head: Head, answering: Answering) -> None:
        if not request.documents:
            raise invalid("documents must not be empty", param="documents")
        self._request = request
        self._head = head
        query = tokenize(request.query)
        prompts = [(*query, *tokenize(document)) for document in request.documents]
        self._scores = [random.Random(seed_of(prompt)).random() for prompt in prompts]
        self.works = _prefill_only(prompts, answering)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the response body, best document first."""
        order = sorted(range(len(choices)), key=lambda index: -self._scores[index])
        results: list[dict[str, Any]] = [
            {
                "index": index,
                "document": {"text": self._request.documents[index], "multi_modal": None},
                "relevance_score": self._scores[index],
            }
            for index in order[: self._request.top_n or None]
        ]
        usage = usage_of(choices)
        return msgspec.json.encode(
            {
                "id": self._head.id,
                "model": self._head.model,
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "total_tokens": usage.total_tokens,
                },
                "results": results,
            }
        )


def embedding(prompt: Sequence[int], dimensions: int) -> list[float]:
    """Return a unit vector that depends on *prompt* only."""
    rng = random.Random(seed_of(prompt))
    vector = [rng.uniform(-1, 1) for _ in range(dimensions)]
    norm = math.hypot(*vector) or 1.0
    return [value / norm for value in vector]


def _prefill_only(prompts: Sequence[tuple[int, ...]], answering: Answering) -> list[Work]:
    for prompt in prompts:
        check_length(prompt_tokens=len(prompt), max_tokens=0, max_model_len=answering.max_model_len)
    return [
        Work(prompt_tokens=len(prompt), block_hashes=chain_hashes(prompt)) for prompt in prompts
    ]
