"""What the formats of generated text share: their interface, prompts, lengths, chunks and usage."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from extproc.sim.api_errors import invalid
from extproc.sim.kv_params import KvAnswer
from extproc.sim.statistics import FinishReason
from extproc.sim.tokens import tokenize
from extproc.sim.wire import sse
from extproc.sim.work import Choice, Usage, Work

DEFAULT_MAX_TOKENS = 16
"""Length of an answer when the request does not say, in tokens."""


Prompt = str | list[str | int | list[int]]
"""A text, several texts, token ids, or several lists of token ids: the four forms of the OpenAI API."""


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options`` of both formats."""

    include_usage: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every message about one request repeats."""

    id: str
    created: int
    """Unix time, in whole seconds."""
    model: str
    request_id: str
    """The caller's id, or one made here."""


class Format(Protocol):
    """Writes the answer of one request."""

    @property
    def works(self) -> Sequence[Work]:
        """What the engine has to do."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the response body, once every choice has ended."""


class StreamFormat(Format, Protocol):
    """Also writes the answer as server-sent events, token by token."""

    def whole(self, choices: Sequence[Choice], kv_transfer_params: KvAnswer | None = None) -> bytes:
        """Return the response body, with what another worker needs to go on."""

    @property
    def stream(self) -> bool:
        """Whether the request asks for that."""

    def opening(self) -> bytes:
        """Return the events sent before there is any token; may be empty."""

    def delta(self, choice: Choice, position: int) -> bytes:
        """Return the events that carry token *position* of *choice*."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last token."""


def prompts_of(prompt: Prompt, *, param: str) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt."""
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if not prompt:
        raise invalid(f"{param} must not be empty", param=param)
    if isinstance(prompt[0], int):
        return [token_ids(prompt, param=param)]
    return [
        tokenize(item) if isinstance(item, str) else token_ids(item, param=param) for item in prompt
    ]


def token_ids(ids: object, *, param: str) -> tuple[int, ...]:
    """Return *ids* checked to be token ids."""
    if not isinstance(ids, list) or not all(
        isinstance(token, int) and 0 <= token < 1 << 32 for token in ids
    ):
        raise invalid(f"{param} has a token id out of vocabulary", param=param)
    return tuple(ids)


def answer_length(limit: int | None, *, natural_end: FinishReason) -> tuple[int, FinishReason]:
    """Return length and finish reason: what the request says, else the default answer."""
    if limit is None:
        return DEFAULT_MAX_TOKENS, natural_end
    if limit < 1:
        raise invalid(f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
    return limit, FinishReason.LENGTH


def choice_count(n: int | None) -> int:
    """Return how many choices a request asks for."""
    if n is not None and n < 1:
        raise invalid(f"n must be at least 1, got {n}.", param="n")
    return 1 if n is None else n


def usage_wanted(options: StreamOptions | None) -> bool:
    """Return whether a stream ends with its usage."""
    return options is not None and bool(options.include_usage)


def reason_at(choice: Choice, position: int) -> FinishReason | None:
    """Return the finish reason if token *position* is the last one."""
    return choice.finish_reason if position + 1 == len(choice.work.pieces) else None


def chunk_start(head: Head, kind: str) -> bytes:
    """Return the JSON of a chunk up to the value of ``choices``; it is the same in every chunk."""
    start = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": None,
    }
    return msgspec.json.encode(start).removesuffix(b"null}")


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def usage_chunk(start: bytes, usage: Usage) -> bytes:
    """Return the chunk that has no choices but the usage; *start* is what ``chunk_start`` gave."""
    return sse(start + b'[],"usage":' + msgspec.json.encode(_usage_json(usage)) + b"}")


def whole_body(
    head: Head,
    kind: str,
    choices: list[dict[str, Any]],
    usage: Usage,
    kv_transfer_params: KvAnswer | None = None,
) -> bytes:
    """Return a response body of object type *kind*."""
    return msgspec.json.encode(
        {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage_json(usage),
            "prompt_logprobs": None,
            "kv_transfer_params": kv_transfer_params,
        }
    )
