"""One answer to generate: what the formats hand to the engine loop and get back filled in."""

import dataclasses
import hashlib
from collections.abc import Sequence

from extproc.sim.answers import answer_pieces, answer_tokens, seed_of
from extproc.sim.api_errors import invalid
from extproc.sim.prefix_cache import BLOCK_TOKENS, chain_hashes
from extproc.sim.statistics import FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What every answer of one worker depends on."""

    worker_name: str
    max_model_len: int
    """Longest prompt and answer together, in tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence to generate."""

    prompt_tokens: int
    block_hashes: Sequence[int]
    """One chained hash per full block of prompt and answer together."""
    pieces: Sequence[str] = ()
    """The answer, one piece per token; empty for a request that is prefill only."""
    finish_reason: FinishReason = FinishReason.STOP
    keep_kv: bool = False
    """Whether the blocks of the prompt are kept for another engine."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""

    @property
    def prompt_key(self) -> int:
        """Hash of the full blocks of the prompt: the same for the same prompt on every worker."""
        full = self.prompt_tokens // BLOCK_TOKENS
        return self.block_hashes[full - 1] if full else 0


@dataclasses.dataclass(slots=True)
class Choice:
    """One sequence of a request and how much of it is there."""

    index: int
    work: Work
    produced: int = 0
    """Output tokens generated so far; their text is the first *produced* of ``work.pieces``."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, known with the first token."""
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.work.pieces)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


def usage_of(choices: Sequence[Choice], *, per_prompt: int = 1) -> Usage:
    """Add up *choices*; *per_prompt* choices in a row share one prompt, which counts once."""
    firsts = choices[::per_prompt]
    return Usage(
        prompt_tokens=sum(choice.work.prompt_tokens for choice in firsts),
        completion_tokens=sum(choice.produced for choice in choices),
        cached_tokens=sum(choice.cached_tokens for choice in firsts),
    )


def plan_answer(
    worker_name: str,
    prompt: Sequence[int],
    *,
    tokens: int,
    finish_reason: FinishReason,
    variant: int = 0,
) -> Work:
    """Return the work of answering *prompt* with *tokens* tokens.

    Args:
        worker_name: said at the start of the answer.
        prompt: token ids.
        tokens: length of the answer.
        finish_reason: why it ends there.
        variant: the answers of one prompt differ by it (the ``n`` of a request).

    """
    pieces = answer_pieces(worker_name, seed_of(prompt) + variant, tokens)
    return Work(
        prompt_tokens=len(prompt),
        block_hashes=chain_hashes((*prompt, *answer_tokens(pieces))),
        pieces=pieces,
        finish_reason=finish_reason,
    )


def of_adapter(work: Work, adapter: str) -> Work:
    """Return *work* with block hashes of its own: an adapter shares no blocks with other models."""
    digest = hashlib.blake2b(adapter.encode(), digest_size=8, usedforsecurity=False).digest()
    salt = int.from_bytes(digest, "little")
    return dataclasses.replace(work, block_hashes=tuple(key ^ salt for key in work.block_hashes))


def check_length(*, prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raise ApiError 400 when a request cannot be served for its length."""
    if prompt_tokens < 1:
        raise invalid("The decoder prompt cannot be empty", param="prompt")
    if prompt_tokens + max_tokens > max_model_len:
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens. However, your request "
            f"has {prompt_tokens} input tokens and asks for {max_tokens} output tokens.",
            param="input_tokens",
        )
