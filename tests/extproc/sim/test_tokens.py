"""Tokens and the answers made of them."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.answers import answer_pieces, answer_tokens, greeting, seed_of
from extproc.sim.tokens import (
    IMAGE_TOKENS,
    MAX_TOKENS,
    TooManyTokensError,
    detokenize,
    tokenize,
    tokenize_chat,
)

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


@given(TEXT)
def test_text_survives_tokens(text):
    """And there is one token for four bytes."""
    tokens = tokenize(text)

    assert detokenize(tokens) == text
    assert len(tokens) == -(-len(text.encode()) // 4)


@given(TEXT, TEXT)
def test_a_common_prefix_of_texts_is_one_of_tokens(start, rest):
    """All tokens that end within the common text are equal."""
    whole = len(start.encode()) // 4

    assert tokenize(start + rest)[:whole] == tokenize(start)[:whole]


def test_ids_are_the_same_in_another_process():
    """Nothing depends on the seed of ``hash``."""
    script = (
        "from extproc.sim.tokens import tokenize_chat;"
        "from extproc.sim.answers import seed_of;"
        "tokens = tokenize_chat([{'role': 'user', 'content': 'hello there'}]);"
        "print(tokens, seed_of(tokens))"
    )

    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20
    )

    tokens = tokenize_chat([{"role": "user", "content": "hello there"}])
    assert other.stdout.strip() == f"{tokens} {seed_of(tokens)}"


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT, st.integers(1, 40))
def test_the_next_turn_extends_the_tokens_of_this_one(contents, question, length):
    """Prompt and answer together are a prefix of the prompt that sends the answer back."""
    turn = [{"role": "user", "content": content} for content in contents]
    prompt = tokenize_chat(turn)
    pieces = answer_pieces("w1", seed_of(prompt), length)

    answered = [*turn, {"role": "assistant", "content": "".join(pieces)}]
    following = tokenize_chat([*answered, {"role": "user", "content": question}])

    so_far = (*prompt, *answer_tokens(pieces))
    assert following[: len(so_far)] == so_far


def test_roles_parts_tools_and_calls_change_the_tokens():
    """Whatever a chat template would render is part of the prompt."""
    user = {"role": "user", "content": "hi"}
    chats = [
        tokenize_chat([user]),
        tokenize_chat([{"role": "system", "content": "hi"}]),
        tokenize_chat([user], [{"type": "function", "function": {"name": "f"}}]),
        tokenize_chat([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        tokenize_chat([{"role": "assistant", "content": None}]),
        tokenize_chat([{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]),
        tokenize_chat([{"role": "user", "content": [{"type": "image_url", "image_url": "b"}]}]),
    ]

    assert len(set(chats)) == len(chats)
    assert len(chats[5]) == len(chats[4]) - len(tokenize("<|assistant|>")) + len(
        tokenize("<|user|>")
    ) + (IMAGE_TOKENS)
    assert (
        tokenize_chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == chats[0]
    )
    assert tokenize_chat([{"role": "user", "content": ["hi"]}]) == chats[0]


def test_a_text_beyond_any_context_is_refused_before_it_takes_memory():
    """512 MB of text would be 128 million tokens."""
    with pytest.raises(TooManyTokensError, match="more than any context"):
        tokenize("x" * (4 * MAX_TOKENS + 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from(["w", "w1", "abc", "abcd"]))
def test_an_answer_has_its_length_and_starts_with_the_name(seed, length, name):
    """One piece is one token, and a shorter answer is the start of a longer one."""
    pieces = answer_pieces(name, seed, length)

    assert len(pieces) == length == len(answer_tokens(pieces))
    assert "".join(answer_pieces(name, seed, 60)).startswith("".join(pieces))
    assert greeting(name).startswith(f"Hello from {name}.")
    assert len(greeting(name)) % 4 == 0


def test_different_prompts_get_different_words():
    """Otherwise no test could tell answers apart."""
    answers = {"".join(answer_pieces("w", seed, 30)) for seed in range(400)}

    assert len(answers) > 300
