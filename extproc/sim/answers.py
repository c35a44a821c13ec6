"""The text that a worker answers: its name, then words that depend on the prompt only.

Every piece is one token of ``tokens`` (four bytes), so an answer sent back in the next turn of a chat
finds its blocks in the cache.
"""

import struct
import zlib
from collections.abc import Sequence

from extproc.sim.tokens import TOKEN_BYTES, tokenize

WORDS = tuple(
    " " + word
    for word in (
        *("sea", "sky", "oak", "elm", "fox", "owl", "bee", "ant", "hen", "cat", "dog", "cow"),
        *("sun", "fog", "ice", "dew", "mud", "bay", "hay", "rye", "fig", "nut", "pea", "yam"),
        *("red", "tan", "big", "old", "new", "shy", "wet", "dry", "hot", "icy", "raw", "odd"),
        *("map", "pen", "ink", "key", "cup", "jar", "pot", "pan", "bag", "box", "bed", "rug"),
        *("bus", "car", "van", "jet", "oar", "log", "axe", "saw", "net", "rod", "bow", "gem"),
    )
)
"""Three letters and the space before them."""

# filler after the greeting, by the bytes it takes to reach the end of a token
_FILLER = ("", " ", " A", " An")


def greeting(name: str) -> str:
    """Return the start of every answer of worker *name*, a whole number of tokens long."""
    text = f"Hello from {name}."
    return text + _FILLER[-len(text.encode()) % TOKEN_BYTES]


def seed_of(prompt: Sequence[int]) -> int:
    """Return a number that depends on all token ids of *prompt* and is the same in every process."""
    return zlib.crc32(struct.pack(f"<{len(prompt)}I", *prompt))


def answer_pieces(name: str, seed: int, tokens: int) -> list[str]:
    """Return *tokens* pieces of text of one token each; joined they are the answer.

    Args:
        name: ASCII, so that a piece never ends inside a character.
        seed: chooses the words; the same seed gives the same words.
        tokens: how many pieces.

    """
    start = greeting(name)
    pieces = [start[at : at + TOKEN_BYTES] for at in range(0, len(start), TOKEN_BYTES)][:tokens]
    missing = tokens - len(pieces)
    first = seed % len(WORDS)
    stride = 1 + seed // len(WORDS) % 7
    pieces.extend(WORDS[(first + stride * index) % len(WORDS)] for index in range(missing))
    return pieces


def answer_tokens(pieces: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids of *pieces*."""
    return tokenize("".join(pieces))
