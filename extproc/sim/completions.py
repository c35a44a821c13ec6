"""The completions format: requests in, responses and stream chunks out."""

from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.sim.generation import (
    Head,
    Prompt,
    StreamOptions,
    answer_length,
    choice_count,
    chunk_start,
    prompts_of,
    reason_at,
    usage_chunk,
    usage_wanted,
    whole_body,
)
from extproc.sim.kv_params import KvAnswer, KvTransferParams
from extproc.sim.statistics import FinishReason
from extproc.sim.wire import SSE_DONE, sse
from extproc.sim.work import Answering, Choice, Usage, Work, check_length, plan_answer, usage_of


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /v1/completions`` that change the answer."""

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: KvTransferParams | None = None


class CompletionFormat:
    """One request to ``/v1/completions``."""

    def __init__(self, request: CompletionRequest, head: Head, answering: Answering) -> None:
        tokens, reason = answer_length(request.max_tokens, natural_end=FinishReason.LENGTH)
        self.stream = bool(request.stream)
        self._per_prompt = choice_count(request.n)
        self.works: list[Work] = []
        for prompt in prompts_of(request.prompt, param="prompt"):
            check_length(
                prompt_tokens=len(prompt), max_tokens=tokens, max_model_len=answering.max_model_len
            )
            self.works.extend(
                plan_answer(
                    answering.worker_name,
                    prompt,
                    tokens=tokens,
                    finish_reason=reason,
                    variant=variant,
                )
                for variant in range(self._per_prompt)
            )
        self._head = head
        self._usage_wanted = usage_wanted(request.stream_options)
        self._chunk_start = chunk_start(head, "text_completion")

    def whole(self, choices: Sequence[Choice], kv_transfer_params: KvAnswer | None = None) -> bytes:
        """Return the response body."""
        listed = [self._choice(choice, choice.text, choice.finish_reason) for choice in choices]
        return whole_body(
            self._head, "text_completion", listed, self._usage(choices), kv_transfer_params
        )

    def opening(self) -> bytes:
        """Return nothing: the first event carries the first token."""
        return b""

    def delta(self, choice: Choice, position: int) -> bytes:
        """Return one chunk."""
        tail = self._choice(choice, choice.work.pieces[position], reason_at(choice, position))
        return sse(self._chunk_start + b"[" + msgspec.json.encode(tail) + b"]}")

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the usage chunk if it was asked for, and the end mark."""
        if not self._usage_wanted:
            return SSE_DONE
        return usage_chunk(self._chunk_start, self._usage(choices)) + SSE_DONE

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        return usage_of(choices, per_prompt=self._per_prompt)

    @staticmethod
    def _choice(choice: Choice, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": None,
        }
