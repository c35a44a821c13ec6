"""The Responses format: ``POST /v1/responses`` with the events that the OpenAI SDK expects."""

from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.sim.api_errors import invalid
from extproc.sim.generation import DEFAULT_MAX_TOKENS, Head
from extproc.sim.kv_params import KvAnswer, KvTransferParams
from extproc.sim.statistics import FinishReason
from extproc.sim.tokens import tokenize_chat
from extproc.sim.wire import sse
from extproc.sim.work import Answering, Choice, check_length, plan_answer, usage_of


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that change the answer."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    metadata: dict[str, str] | None = None
    kv_transfer_params: KvTransferParams | None = None


class ResponsesFormat:
    """One request; its output is a single message with a single text part."""

    def __init__(self, request: ResponsesRequest, head: Head, answering: Answering) -> None:
        prompt = tokenize_chat(_messages(request), request.tools)
        limit = request.max_output_tokens
        if limit is not None and limit < 1:
            raise invalid("max_output_tokens must be at least 1", param="max_output_tokens")
        tokens = DEFAULT_MAX_TOKENS if limit is None else limit
        check_length(
            prompt_tokens=len(prompt), max_tokens=tokens, max_model_len=answering.max_model_len
        )
        reason = FinishReason.STOP if limit is None else FinishReason.LENGTH
        self.works = [
            plan_answer(answering.worker_name, prompt, tokens=tokens, finish_reason=reason)
        ]
        self.stream = bool(request.stream)
        self._request = request
        self._head = head
        self._item_id = head.id.replace("resp_", "msg_", 1)
        self._sequence = 0

    def whole(self, choices: Sequence[Choice], kv_transfer_params: KvAnswer | None = None) -> bytes:
        """Return the response body."""
        response = self._response(choices)
        if kv_transfer_params is not None:
            response["kv_transfer_params"] = kv_transfer_params
        return msgspec.json.encode(response)

    def opening(self) -> bytes:
        """Return the events up to the start of the text."""
        return b"".join(
            (
                self._event("response.created", response=self._response()),
                self._event("response.in_progress", response=self._response()),
                self._event(
                    "response.output_item.added",
                    output_index=0,
                    item=self._item(status="in_progress"),
                ),
                self._part_event("response.content_part.added", part=_part("")),
            )
        )

    def delta(self, choice: Choice, position: int) -> bytes:
        """Return the event with one token."""
        piece = choice.work.pieces[position]
        return self._part_event("response.output_text.delta", delta=piece, logprobs=[])

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the events that close text, part, item and response."""
        text = choices[0].text
        item = self._item(status="completed", content=[_part(text)])
        return b"".join(
            (
                self._part_event("response.output_text.done", text=text, logprobs=[]),
                self._part_event("response.content_part.done", part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event("response.completed", response=self._response(choices)),
            )
        )

    def _part_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(msgspec.json.encode(data), event=kind)

    def _item(self, *, status: str, content: Sequence[object] = ()) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": list(content),
        }

    def _response(self, choices: Sequence[Choice] | None = None) -> dict[str, Any]:
        """Return the response object; without *choices* it is the one still in progress."""
        status, cut = "in_progress", False
        if choices is not None:
            cut = choices[0].finish_reason is FinishReason.LENGTH
            status = "incomplete" if cut else "completed"
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self._request.instructions,
            "max_output_tokens": self._request.max_output_tokens,
            "metadata": self._request.metadata,
            "model": self._head.model,
            "output": []
            if choices is None
            else [self._item(status="completed", content=[_part(choices[0].text)])],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": self._request.tools or [],
            "top_p": 1.0,
            "usage": None if choices is None else _usage_json(choices),
        }


def _usage_json(choices: Sequence[Choice]) -> dict[str, Any]:
    usage = usage_of(choices)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages.extend(request.input)
    if not messages:
        raise invalid("input must not be empty", param="input")
    return messages
