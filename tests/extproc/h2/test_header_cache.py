"""Header blocks that were seen before are not decoded again: the result must be the same.

A fresh ``hpack`` decoder that remembers nothing is fed the same blocks.
"""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hypothesis import given
from hypothesis import strategies as st

from extproc.h2 import connection as module
from tests.extproc.h2.peer import BLOCK, HEADERS, connect, request

TO_100, TO_0, TO_4096 = b"\x3f\x45", b"\x20", b"\x3f\xe1\x1f"
ADD_A, ADD_B = b"\x40\x01a\x01x", b"\x40\x01b\x01y"
NEWEST, SECOND, THIRD = b"\xbe", b"\xbf", b"\xc0"


def check(blocks: list[bytes]) -> tuple[int, bool]:
    """Feed *blocks* to both; return how many went well and whether the connection lives."""
    connection, events = connect()
    decoder = Decoder()
    for number, block in enumerate(blocks):
        connection.receive(request(2 * number + 1, block=block))
        try:
            headers = [(bytes(n), bytes(v)) for n, v in decoder.decode(block, raw=True)]
        except (HPACKError, IndexError):
            assert connection.closed
            return number, False
        assert not connection.closed, connection.fault
        assert events.seen[-1] == ("request", 2 * number + 1, headers)
    return len(blocks), True


@pytest.mark.parametrize(
    "blocks",
    [
        [ADD_A, NEWEST, ADD_B, NEWEST, NEWEST],
        [ADD_A, ADD_B, NEWEST + SECOND, ADD_A, NEWEST + SECOND + THIRD],
        # Room for two entries: an equal one that is added evicts another.
        [TO_100 + ADD_A, ADD_B, SECOND, ADD_B, SECOND, ADD_B, NEWEST + SECOND],
        [TO_100 + ADD_A, ADD_A, NEWEST + SECOND, ADD_A, NEWEST + SECOND],
        # Room for one.
        [b"\x3f\x03" + ADD_A, NEWEST, ADD_A, NEWEST, ADD_B, NEWEST, ADD_A, NEWEST],
        # An entry that is larger than the table empties it.
        [TO_100 + ADD_A, NEWEST, b"\x40\x01c\x60" + b"z" * 96, NEWEST],
        [ADD_A, NEWEST, TO_0, NEWEST],
        [ADD_A, NEWEST, TO_0 + TO_4096, NEWEST],
        [ADD_A, NEWEST, TO_0 + TO_4096 + ADD_B, NEWEST, SECOND],
        [TO_0 + ADD_A, ADD_A, TO_0, ADD_A],
        [b"", b"", ADD_A, b"", TO_100, b"", NEWEST],
        [TO_0, BLOCK, TO_0, BLOCK, BLOCK],
    ],
    ids=str,
)
def test_cases_in_which_the_table_changes_between_equal_blocks(blocks):
    """By hand: whatever changes the table makes what was remembered worthless."""
    check(blocks)


ATOMS = st.sampled_from(
    [
        *(b"\x82", NEWEST, SECOND, THIRD, b"\xc1", ADD_A, ADD_B),
        *(b"\x7e\x01v", b"\x7f\x00\x01w", b"\x0f\x2f\x01q", b"\x00\x01a\x01x", b"\x10\x01n\x01v"),
        *(b"\x40\x01c\x60" + b"z" * 96, b"\x40\x01d\x14" + b"d" * 20, b"\x40\x81\x1f\x81\x1f"),
    ]
)
SIZES = st.sampled_from([b"", b"", b"", b"", TO_100, TO_0, TO_4096, TO_0 + TO_4096, b"\x3f\x03"])
BLOCKS = st.builds(lambda size, atoms: size + b"".join(atoms), SIZES, st.lists(ATOMS, max_size=3))


@pytest.mark.slow
@given(
    st.lists(BLOCKS, min_size=1, max_size=5).flatmap(
        lambda some: st.lists(st.sampled_from(some) | BLOCKS, max_size=40)
    )
)
def test_any_blocks_mean_what_they_mean_to_a_decoder_without_memory(blocks):
    """The same few blocks again and again, with changes of the table in between."""
    check(blocks)


FIELDS = st.tuples(
    st.sampled_from(["a", "b", ":path", "x-long", "content-type"]),
    st.sampled_from(["", "1", "2", "y" * 60, "application/grpc"]),
)
LISTS = st.lists(FIELDS, min_size=1, max_size=4)


@pytest.mark.slow
@given(
    st.lists(LISTS, min_size=1, max_size=3).flatmap(
        lambda some: st.lists(
            st.tuples(
                st.sampled_from(some) | LISTS,
                st.booleans(),
                st.sampled_from([None, None, None, 0, 64, 150, 4096]),
            ),
            max_size=40,
        )
    )
)
def test_what_a_real_encoder_sends_arrives(lists):
    """With and without Huffman, with tables of any size."""
    encoder, blocks = Encoder(), []
    for headers, huffman, size in lists:
        if size is not None:
            encoder.header_table_size = size
        blocks.append(encoder.encode(headers, huffman=huffman))

    assert check(blocks) == (len(blocks), True)


def test_block_that_was_seen_is_not_decoded_again(monkeypatch):
    """Also after others that left the table alone."""
    connection, events = connect()
    encoder = Encoder()
    first, block = encoder.encode(HEADERS), encoder.encode(HEADERS)
    connection.receive(request(1, block=first) + request(3, block=block) + request(5))
    monkeypatch.setattr(connection._decoder, "decode", None)

    connection.receive(request(7, block=block) + request(9) + request(11, block=block))

    assert len(events.seen) == 6
    assert len({str(event[2]) for event in events.seen}) == 1


def test_memory_of_blocks_is_bounded():
    """A peer whose headers are always new costs decoding, not memory; the usual block comes back."""
    connection, _ = connect()
    for number in range(200):
        block = b"\x00\x01a\x04%04d" % number
        connection.receive(request(2 * number + 1, block=block))
        assert len(connection._decoded) <= module.MAX_KNOWN_BLOCKS

    connection.receive(request(1001))

    assert BLOCK in connection._decoded
