"""The body of the prefill leg, and what no client may say about KV transfers.

All of it is made by edits: tools, images, unknown fields, duplicates, white space and number formats are
the client's, byte for byte, so that both legs have the same prompt.

``kv_transfer_params`` tells a worker which host to fetch KV blocks from. It is the router's to say: a
client that could would make workers connect to hosts of its choice, or read the prompts of others.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from extproc.json_edit import Edit, Remove, Replace, Set, edit_members
from extproc.pd.paths import Endpoint

PARAMS = "kv_transfer_params"

_HIDDEN = (
    # vLLM merges these into the extra arguments of the engine, which is where the connector looks.
    Remove(("vllm_xargs", PARAMS)),
    Remove(("sampling_params", "extra_args", PARAMS)),
)
"""The places other than the top level where a client can name them."""

_STRIPPED = (Remove((PARAMS,)), *_HIDDEN)

_ESCAPED_NAME = re.compile(
    b'"' + b"".join(b"(?:%c|\\\\u00(?i:%02x))" % (char, char) for char in PARAMS.encode()) + b'"'
)

_ONE = b"1"

_PLAIN: tuple[Edit, ...] = (
    Set(("max_tokens",), _ONE),
    # vLLM prefers it to max_tokens where both are given.
    Replace(("max_completion_tokens",), _ONE),
    Set(("min_tokens",), _ONE),
    Replace(("n",), _ONE),
    Replace(("best_of",), _ONE),
    Set(("stream",), b"false"),
    Remove(("stream_options",)),
)

_EDITS: dict[Endpoint, tuple[Edit, ...]] = {
    Endpoint.CHAT: _PLAIN,
    Endpoint.COMPLETIONS: _PLAIN,
    Endpoint.RESPONSES: (
        Set(("max_output_tokens",), _ONE),
        # A response in the background is answered before its prompt is read.
        Replace(("background",), b"false"),
        Set(("stream",), b"false"),
        Remove(("stream_options",)),
    ),
    Endpoint.GENERATE: (
        Set(("sampling_params", "max_tokens"), _ONE),
        Set(("sampling_params", "min_tokens"), _ONE),
        Replace(("sampling_params", "n"), _ONE),
        Replace(("sampling_params", "best_of"), _ONE),
        Set(("stream",), b"false"),
        Remove(("stream_options",)),
    ),
}


class _Response(msgspec.Struct):
    previous_response_id: msgspec.Raw = msgspec.Raw()


class _Completion(msgspec.Struct):
    prompt: Any = None


def build_prefill_body(body: bytes, endpoint: Endpoint, params: bytes | None) -> bytes | None:
    """Return the client's *body* as one that asks for a single token, not streamed, with *params*.

    *params* is the JSON of ``kv_transfer_params``; None sends none. ``n`` and ``best_of`` become 1
    where they are given: however many answers there will be, the prompt is computed once, and only its
    KV blocks matter. ``echo`` and what asks for log probabilities stay, see `extproc.pd.logprobs`.

    None when the request is not to be split: *body* is no JSON object, it continues an earlier
    response, which only the worker that gave that one can do, or it is a completion of several prompts,
    of which *params* could tell only one.
    """
    if endpoint is Endpoint.RESPONSES and _continues(body):
        return None
    if endpoint is Endpoint.COMPLETIONS and params is not None and _has_several_prompts(body):
        return None
    own = Remove((PARAMS,)) if params is None else Set((PARAMS,), params)
    return edit_members(body, (own, *_HIDDEN, *_EDITS[endpoint]))


def with_params(body: bytes, params: bytes) -> bytes | None:
    """Return the client's *body* with *params* for ``kv_transfer_params``, wherever it named some.

    None when *body* is no JSON object.
    """
    return edit_members(body, (Set((PARAMS,), params), *_HIDDEN))


def strip_client_params(body: bytes) -> bytes | None:
    """Return *body* without ``kv_transfer_params``; for every JSON request, split or not.

    *body* itself when it has none. None when it cannot be read here but a worker might read some in it:
    Python's parser takes UTF-16 and UTF-32, NaN and lone surrogates. Such a request must be refused.
    """
    # A key is written in ASCII or with \\u00 escapes, or else ASCII is written with NULs in between.
    if not any(mark in body for mark in (PARAMS.encode(), b"\\u00", b"\0")):
        return body
    edited = edit_members(body, _STRIPPED)
    if edited is None and b"\0" not in body and not _ESCAPED_NAME.search(body):
        return body
    return edited


def _continues(body: bytes) -> bool:
    try:
        previous = msgspec.json.decode(body, type=_Response).previous_response_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bytes(previous) not in {b"", b"null"}


def _has_several_prompts(body: bytes) -> bool:
    try:
        prompt = msgspec.json.decode(body, type=_Completion).prompt
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
