"""The chat completions format: requests in, responses and stream chunks out."""

from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.sim.api_errors import invalid
from extproc.sim.generation import (
    Head,
    StreamOptions,
    answer_length,
    choice_count,
    chunk_start,
    reason_at,
    usage_chunk,
    usage_wanted,
    whole_body,
)
from extproc.sim.kv_params import KvAnswer, KvTransferParams
from extproc.sim.statistics import FinishReason
from extproc.sim.tokens import tokenize_chat
from extproc.sim.wire import SSE_DONE, sse
from extproc.sim.work import Answering, Choice, Usage, check_length, plan_answer, usage_of


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /v1/chat/completions`` that change the answer."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    kv_transfer_params: KvTransferParams | None = None


class ChatFormat:
    """One request to ``/v1/chat/completions``."""

    def __init__(self, request: ChatRequest, head: Head, answering: Answering) -> None:
        if not request.messages:
            raise invalid("messages must not be empty", param="messages")
        prompt = tokenize_chat(request.messages, request.tools)
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        tokens, reason = answer_length(limit, natural_end=FinishReason.STOP)
        check_length(
            prompt_tokens=len(prompt), max_tokens=tokens, max_model_len=answering.max_model_len
        )
        self.stream = bool(request.stream)
        self.works = [
            plan_answer(
                answering.worker_name, prompt, tokens=tokens, finish_reason=reason, variant=variant
            )
            for variant in range(choice_count(request.n))
        ]
        self._head = head
        self._usage_wanted = usage_wanted(request.stream_options)
        self._per_prompt = len(self.works)
        self._chunk_start = chunk_start(head, "chat.completion.chunk")

    def whole(self, choices: Sequence[Choice], kv_transfer_params: KvAnswer | None = None) -> bytes:
        """Return the response body."""
        listed: list[dict[str, Any]] = [
            {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": choice.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": None,
                "token_ids": None,
            }
            for choice in choices
        ]
        return whole_body(
            self._head, "chat.completion", listed, self._usage(choices), kv_transfer_params
        )

    def opening(self) -> bytes:
        """Return nothing: vLLM sends the role with the first token."""
        return b""

    def delta(self, choice: Choice, position: int) -> bytes:
        """Return one chunk, with the chunk that carries the role before it for the first token."""
        chunk = self._chunk(choice, {"content": choice.work.pieces[position]}, position)
        if position == 0:
            return self._chunk(choice, {"role": "assistant", "content": ""}, -1) + chunk
        return chunk

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the usage chunk if it was asked for, and the end mark."""
        if not self._usage_wanted:
            return SSE_DONE
        return usage_chunk(self._chunk_start, self._usage(choices)) + SSE_DONE

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        return usage_of(choices, per_prompt=self._per_prompt)

    def _chunk(self, choice: Choice, delta: dict[str, str], position: int) -> bytes:
        tail = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason_at(choice, position),
        }
        return sse(self._chunk_start + b"[" + msgspec.json.encode(tail) + b"]}")
