"""What the clients of the bench send: a chat request as the OpenAI SDK sends it."""

from __future__ import annotations

import json

PATH = "/v1/chat/completions"
HEADERS = {
    "accept": "application/json",
    "accept-language": "en",
    "authorization": "Bearer sk-bench",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 1.60.0",
    "x-request-id": "0123456789abcdef0123456789abcdef",
    "x-session-id": "bench",
    "x-stainless-arch": "x64",
    "x-stainless-async": "false",
    "x-stainless-lang": "python",
    "x-stainless-os": "Linux",
    "x-stainless-package-version": "1.60.0",
    "x-stainless-retry-count": "0",
    "x-stainless-runtime": "CPython",
    "x-stainless-runtime-version": "3.11.7",
}
_WORDS = "Say in a few words what a router does for a fleet of workers, and why it matters. "


def chat_body(size: int) -> bytes:
    """Return a chat request of *size* bytes."""

    def encode(text: str) -> bytes:
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": text},
        ]
        return json.dumps(
            {"model": "bench-model", "messages": messages, "max_tokens": 64, "stream": True}
        ).encode()

    missing = size - len(encode(""))
    return encode((_WORDS * (missing // len(_WORDS) + 1))[:missing])


def raw_request(host: str, body: bytes) -> bytes:
    """Return the whole request as HTTP/1.1 has it."""
    lines = [f"POST {PATH} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
