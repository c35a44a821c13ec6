"""How long one engine step takes, for one GPU that serves an 8-billion-parameter model in BF16.

All sequences of a batch advance together, so a step lasts::

    T_ms = overhead + max(floor, per_token * N)
         + prefill_pair * sum(n_i * (h_i + n_i / 2))
         + decode_context * sum(context_j) + per_sequence * B

with N the tokens computed in the step, n_i the tokens of prefill chunk i, h_i the tokens of that
sequence computed or cached before, context_j the tokens attended by decoding sequence j, and B the
number of decoding sequences.

The constants are our own fit (Llama-3.1-8B, mean error 2 to 3 percent) to the kernel tables that
AIConfigurator publishes for vLLM 0.24 on H100 and H200 (GEMM and FlashAttention-3). The overhead of
1.2 ms is launch, normalisation and sampling: 32 layers of 32 us and 0.126 ms per step, from BLIS.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """One GPU: the duration of a step and the room for KV blocks."""

    floor_ms: float
    """Time to stream the weights once, in ms; a small batch is bound by it."""

    decode_context_ms: float
    """Time per token of context attended by a decoding sequence, in ms."""

    kv_blocks: int
    """KV blocks of 16 tokens that fit at 128 KiB a token, with 90 % of the GPU memory in use."""

    overhead_ms: float = 1.2
    """Launch, normalisation and sampling, in ms a step."""

    per_token_ms: float = 0.018
    """Matrix products per token once the batch is compute bound, in ms."""

    prefill_pair_ms: float = 0.85e-6
    """Attention per pair of (prefill token, token before it), in ms."""

    per_sequence_ms: float = 0.0045
    """Bookkeeping per decoding sequence, in ms."""

    def step_s(
        self, *, prefills: Sequence[tuple[int, int]], decode_contexts: Sequence[int]
    ) -> float:
        """Return the duration of one step, in seconds; an empty step takes none.

        Args:
            prefills: ``(tokens computed in this step, tokens computed or cached before)`` per chunk.
            decode_contexts: tokens attended by each decoding sequence.

        """
        if not prefills and not decode_contexts:
            return 0.0
        sequences = len(decode_contexts)
        tokens = sequences
        pairs = 0.0
        for chunk, history in prefills:
            tokens += chunk
            pairs += chunk * (history + chunk / 2)
        step_ms = (
            self.overhead_ms
            + max(self.floor_ms, self.per_token_ms * tokens)
            + self.prefill_pair_ms * pairs
            + self.decode_context_ms * sum(decode_contexts)
            + self.per_sequence_ms * sequences
        )
        return step_ms / 1000


HARDWARE: Mapping[str, StepModel] = MappingProxyType(
    {
        "h100": StepModel(floor_ms=6.0, decode_context_ms=4.3e-5, kv_blocks=26_900),
        "h200": StepModel(floor_ms=4.5, decode_context_ms=3.05e-5, kv_blocks=53_700),
    }
)
"""By the name that ``--hardware`` takes: one H100 with 80 GB, one H200 with 141 GB."""
