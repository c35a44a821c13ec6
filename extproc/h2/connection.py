"""The server side of one HTTP/2 connection, without I/O.

``receive`` takes bytes and calls the ``Listener``; the ``send_*`` methods queue frames; ``output`` hands
over what is to be written. Flow control is obeyed in both directions: what the peer's windows do not
allow waits here, and what is received is given back at once, since messages are taken in as they come
and their size is limited above.

A fault of the peer, one that concerns a single stream too, ends the connection with GOAWAY and its
reason. Names follow RFC 9113.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from hpack import Decoder
from hpack.exceptions import HPACKError

from extproc.h2 import frames as f
from extproc.h2.frames import ConnectionFault, ErrorCode

MAX_FRAME_BYTES = 2**20
"""Largest frame taken: few frames per large body."""

MAX_HEADER_BLOCK_BYTES = 64 * 1024
"""Envoy's requests to us have some hundred bytes of headers."""

MAX_HEADER_FRAGMENTS = 64
"""Frames of one header block; empty ones, that no size limits, count too."""

MAX_KNOWN_BLOCKS = 64

WINDOW_REFRESH_BYTES = 2**24
"""Received bytes after which the connection's window is filled up again."""

HeaderList = Sequence[tuple[bytes, bytes]]


class Listener(Protocol):
    """Who is told what the peer does, of each stream until that has been reset or ``end``-ed."""

    def on_request(self, stream: int, headers: HeaderList) -> None:
        """Take the headers of a new stream."""
        ...

    def on_data(self, stream: int, data: bytes) -> None:
        """Take bytes of the body."""
        ...

    def on_end(self, stream: int) -> None:
        """Note that the peer has sent everything."""
        ...

    def on_reset(self, stream: int) -> None:
        """Note that the peer has given the stream up."""
        ...


class _Stream:
    __slots__ = ("ended_by_peer", "pending", "pending_sent", "refresh", "trailers", "window")

    def __init__(self, window: int, *, ended_by_peer: bool) -> None:
        self.window = window
        """Bytes that the peer is ready to take on this stream; below zero when it took some back."""
        self.pending: deque[bytes] | None = None
        """Bodies that wait for the peer's windows."""
        self.pending_sent = 0
        """Bytes of the first of them that are sent."""
        self.trailers: bytes | None = None
        """What follows them, once the layer above has ended the stream."""
        self.refresh = 0
        self.ended_by_peer = ended_by_peer


class ServerConnection:
    """One peer."""

    def __init__(self, listener: Listener) -> None:
        self.closed = False
        """Whether nothing more can be exchanged; write ``output`` once more and close."""
        self.fault: ConnectionFault | None = None
        """What the peer did wrong, when that has closed the connection."""
        self._listener = listener
        self._partial = bytearray()
        """The beginning of a frame."""
        self._needed = 0
        """Bytes that it must have before it is worth looking at."""
        self._preface_seen = False
        self._out: list[bytes] = [
            f.settings(
                {
                    f.SETTINGS_INITIAL_WINDOW_SIZE: f.MAX_WINDOW,
                    f.SETTINGS_MAX_FRAME_SIZE: MAX_FRAME_BYTES,
                }
            ),
            f.window_update(0, f.MAX_WINDOW - f.DEFAULT_WINDOW),
        ]
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._draining = False
        self._decoder = Decoder()
        self._decoder.max_header_list_size = MAX_HEADER_BLOCK_BYTES
        self._decoded: dict[bytes, HeaderList] = {}
        """Header blocks that left the decoder's table as it was: Envoy sends the same one each time."""
        self._header_fragments: tuple[int, int, list[bytes]] | None = None
        self._window = f.DEFAULT_WINDOW
        self._peer_initial_window = f.DEFAULT_WINDOW
        self._peer_max_frame = f.DEFAULT_MAX_FRAME
        self._received = 0
        self._waiting: OrderedDict[int, None] = OrderedDict()
        """Streams that only the connection's window holds up, the longest waiting first."""
        self._table_update = b""
        """What the peer's decoder must see first in the next header block."""

    # What the shell does.

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer."""
        if self.closed:
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        try:
            position = self._take_frames(data)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        if position < len(data):
            self._partial += data[position:]

    def lost(self) -> None:
        """Note that the peer is gone."""
        self.closed = True
        self._partial.clear()
        self._out.clear()
        self._reset_all()

    def output(self) -> bytes:
        """Return what is to be written, and forget it."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def drain(self) -> None:
        """Refuse new streams; those that are open go on."""
        if not self._draining and not self.closed:
            self._draining = True
            self._out.append(f.goaway(self._last_stream, ErrorCode.NO_ERROR, "shutting down"))

    def open_streams(self) -> list[int]:
        """Return the streams that are not over, those with an end that waits to be sent included."""
        return list(self._streams)

    # What the layer above sends.

    def send_headers(self, stream: int, block: bytes) -> None:
        """Send response headers, already compressed."""
        if stream in self._streams:
            self._send_block(f.END_HEADERS, stream, block)

    def send_data(self, stream: int, data: bytes) -> None:
        """Send bytes of the body, as fast as the peer's windows allow."""
        state = self._streams.get(stream)
        if state is None:
            return
        size = len(data)
        if (
            state.pending is None
            and size <= self._peer_max_frame
            and size <= state.window
            and size <= self._window
        ):
            state.window -= size
            self._window -= size
            self._out.append(f.frame(f.DATA, 0, stream, data))
            return
        if not data or state.trailers is not None:
            return
        if state.pending is None:
            state.pending = deque()
        state.pending.append(data)
        self._flush(stream, state)

    def end(self, stream: int, trailers: bytes) -> None:
        """Send trailers, already compressed, after all data; the stream is over for the layer above."""
        state = self._streams.get(stream)
        if state is None:
            return
        if state.pending is None:
            self._finish(stream, state, trailers)
        elif state.trailers is None:
            state.trailers = trailers

    # Frames.

    def _take_frames(self, buffer: bytes) -> int:
        position, length = 0, len(buffer)
        self._needed = f.HEADER_BYTES
        if not self._preface_seen:
            position = self._take_preface(buffer)
            if not position:
                return 0
        while length - position >= f.HEADER_BYTES:
            size_high, size_low, kind, flags, stream = f.HEADER.unpack_from(buffer, position)
            size = size_high << 8 | size_low
            if size > MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {size} bytes")
            end = position + f.HEADER_BYTES + size
            if end > length:
                self._needed = f.HEADER_BYTES + size
                break
            payload = buffer[position + f.HEADER_BYTES : end]
            self._on_frame(kind, flags, stream & f.MAX_STREAM, payload)
            position = end
        return position

    def _take_preface(self, buffer: bytes) -> int:
        """Return where the first frame begins, 0 while too little is there to tell."""
        start = len(f.PREFACE)
        if not f.PREFACE.startswith(buffer[:start]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 client")
        if len(buffer) < start + f.HEADER_BYTES:
            self._needed = 0
            return 0
        # RFC 9113, 3.4: "This sequence MUST be followed by a SETTINGS frame".
        if buffer[start + 3] != f.SETTINGS or buffer[start + 4] & f.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a preface without settings")
        self._preface_seen = True
        return start

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._header_fragments is not None and kind != f.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers without their end")
        match kind:
            case f.DATA:
                self._on_data(flags, stream, payload)
            case f.HEADERS:
                self._on_headers(flags, stream, payload)
            case f.CONTINUATION:
                self._on_continuation(flags, stream, payload)
            case f.WINDOW_UPDATE:
                self._on_window_update(stream, payload)
            case f.RST_STREAM:
                self._on_rst_stream(stream, payload)
            case _:
                self._on_rare_frame(kind, flags, stream, payload)

    def _on_rare_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case f.SETTINGS:
                self._on_settings(flags, stream, payload)
            case f.PING:
                self._on_ping(flags, stream, payload)
            case f.PUSH_PROMISE:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")
            case f.PRIORITY:
                _check_shape(len(payload) == 5, stream > 0, "PRIORITY")
            case f.GOAWAY:
                _check_shape(len(payload) >= 8, stream == 0, "GOAWAY")
            case _:
                pass  # kinds that a later RFC may add

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received >= WINDOW_REFRESH_BYTES:
            self._out.append(f.window_update(0, self._received))
            self._received = 0
        state = self._streams.get(stream)
        if state is None:
            self._check_known(stream)
            return  # crossed with our end of the stream
        if state.ended_by_peer:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "data after the end of its stream")
        state.refresh += size
        if state.refresh >= WINDOW_REFRESH_BYTES and not flags & f.END_STREAM:
            self._out.append(f.window_update(stream, state.refresh))
            state.refresh = 0
        data = f.unpad(payload) if flags & f.PADDED else payload
        if flags & f.END_STREAM:
            state.ended_by_peer = True
        if data and state.trailers is None:
            self._listener.on_data(stream, data)
        if flags & f.END_STREAM:
            self._tell_end(stream)

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & f.PADDED:
            payload = f.unpad(payload)
        if flags & f.PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "priority without its fields")
            payload = payload[5:]
        if not flags & f.END_HEADERS:
            self._header_fragments = (stream, flags, [payload])
            return
        self._on_header_block(flags, stream, payload)

    def _on_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        if self._header_fragments is None or self._header_fragments[0] != stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "continuation of nothing")
        _, first_flags, fragments = self._header_fragments
        fragments.append(payload)
        if (
            len(fragments) > MAX_HEADER_FRAGMENTS
            or sum(map(len, fragments)) > MAX_HEADER_BLOCK_BYTES
        ):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers too large")
        if flags & f.END_HEADERS:
            self._header_fragments = None
            self._on_header_block(first_flags, stream, b"".join(fragments))

    def _on_header_block(self, flags: int, stream: int, block: bytes) -> None:
        if len(block) > MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers too large")
        headers = self._decode(block)
        ends = bool(flags & f.END_STREAM)
        state = self._streams.get(stream)
        if state is not None:
            self._on_trailers(stream, state, ends)
            return
        if stream % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} of a client")
        if stream <= self._last_stream:
            return  # crossed with our end of the stream
        self._last_stream = stream
        if self._draining:
            self._out.append(f.rst_stream(stream, ErrorCode.REFUSED_STREAM))
            return
        self._streams[stream] = _Stream(self._peer_initial_window, ended_by_peer=ends)
        self._listener.on_request(stream, headers)
        if ends:
            self._tell_end(stream)

    def _on_trailers(self, stream: int, state: _Stream, ends: bool) -> None:  # noqa: FBT001
        if state.ended_by_peer:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "headers after the end of their stream")
        if not ends:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "trailers that are not the end")
        state.ended_by_peer = True
        self._tell_end(stream)

    def _tell_end(self, stream: int) -> None:
        state = self._streams.get(stream)
        if state is not None and state.trailers is None:  # else the listener has ended it meanwhile
            self._listener.on_end(stream)

    def _on_rst_stream(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a wrong size")
        self._check_known(stream)
        state = self._streams.get(stream)
        if state is not None:
            self._forget(stream)
            if state.trailers is None:
                self._listener.on_reset(stream)

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (flags & f.ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
        if flags & f.ACK:
            return
        window_before = self._peer_initial_window
        for key, value in struct.iter_unpack("!HI", payload):
            self._on_setting(key, value)
        # Before anything is sent within the new limits.
        self._out.append(f.frame(f.SETTINGS, f.ACK, 0))
        if self._peer_initial_window != window_before:
            for number, state in list(self._streams.items()):
                if state.pending is not None:
                    self._flush(number, state)

    def _on_setting(self, key: int, value: int) -> None:
        if key == f.SETTINGS_INITIAL_WINDOW_SIZE:
            if value > f.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            change = value - self._peer_initial_window
            self._peer_initial_window = value
            for state in self._streams.values():
                state.window += change
                if state.window > f.MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
        elif key == f.SETTINGS_MAX_FRAME_SIZE:
            if not f.DEFAULT_MAX_FRAME <= value <= f.LARGEST_MAX_FRAME:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame size out of range")
            self._peer_max_frame = value
        elif key == f.SETTINGS_HEADER_TABLE_SIZE:
            if value < f.DEFAULT_HEADER_TABLE:
                # RFC 7541, 4.2: a smaller table must be confirmed. We use none: its size is 0.
                self._table_update = b"\x20"
        elif key == f.SETTINGS_ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        _check_shape(len(payload) == 8, stream == 0, "PING")
        if not flags & f.ACK:
            self._out.append(f.frame(f.PING, f.ACK, 0, payload))

    def _on_window_update(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong size")
        increment = int.from_bytes(payload, "big") & f.MAX_WINDOW
        if increment == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window update of nothing")
        if stream == 0:
            self._window += increment
            if self._window > f.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            self._flush_waiting()
            return
        self._check_known(stream)
        state = self._streams.get(stream)
        if state is not None:
            state.window += increment
            if state.window > f.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            if state.pending is not None:
                self._flush(stream, state)

    # Sending within the peer's windows.

    def _flush(self, stream: int, state: _Stream) -> None:
        """Send what is pending, as far as both windows go."""
        pending, start = state.pending, state.pending_sent
        while pending:
            data = pending[0]
            left = len(data) - start
            size = min(left, self._peer_max_frame, state.window, self._window)
            if size <= 0:
                state.pending_sent = start
                if state.window > 0:
                    self._waiting[stream] = None
                return
            state.window -= size
            self._window -= size
            self._out.append(f.frame(f.DATA, 0, stream, data[start : start + size]))
            start += size
            if size == left:
                pending.popleft()
                start = 0
        state.pending, state.pending_sent = None, 0
        if state.trailers is not None:
            self._finish(stream, state, state.trailers)

    def _flush_waiting(self) -> None:
        """Share the connection's window: who gets less than it needs waits behind the others."""
        while self._waiting and self._window > 0:
            stream, _ = self._waiting.popitem(last=False)
            self._flush(stream, self._streams[stream])

    def _finish(self, stream: int, state: _Stream, trailers: bytes) -> None:
        self._send_block(f.END_HEADERS | f.END_STREAM, stream, trailers)
        if not state.ended_by_peer:
            # RFC 9113, 8.1: a server that needs no more of the request may say so after its answer.
            self._out.append(f.rst_stream(stream, ErrorCode.NO_ERROR))
        self._forget(stream)

    def _send_block(self, flags: int, stream: int, block: bytes) -> None:
        if self._table_update:
            block = self._table_update + block
            self._table_update = b""
        self._out.append(f.frame(f.HEADERS, flags, stream, block))

    # Bookkeeping.

    def _decode(self, block: bytes) -> HeaderList:
        known = self._decoded.get(block)
        if known is not None:
            return known
        entries = self._decoder.header_table.dynamic_entries
        newest = entries[0] if entries else None
        count = len(entries)
        try:
            headers = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError, UnicodeDecodeError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "headers cannot be read") from error
        pairs = [(bytes(name), bytes(value)) for name, value in headers]
        # By identity: an entry that is added again equals the one before, and evicts another.
        same_table = count == len(entries) and (not entries or entries[0] is newest)
        resizes = bool(block) and block[0] & 0xE0 == 0x20
        if not same_table or resizes:
            self._decoded.clear()
        else:
            if len(self._decoded) >= MAX_KNOWN_BLOCKS:
                self._decoded.clear()
            self._decoded[block] = pairs
        return pairs

    def _check_known(self, stream: int) -> None:
        if stream % 2 == 0 or stream > self._last_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} was never opened")

    def _forget(self, stream: int) -> None:
        self._waiting.pop(stream, None)
        del self._streams[stream]

    def _fail(self, fault: ConnectionFault) -> None:
        self._out.append(f.goaway(self._last_stream, fault.code, str(fault)))
        self.closed = True
        self.fault = fault
        self._reset_all()

    def _reset_all(self) -> None:
        streams, self._streams = self._streams, {}
        self._waiting.clear()
        for stream, state in streams.items():
            if state.trailers is None:
                self._listener.on_reset(stream)


def _check_shape(size_fits: bool, stream_fits: bool, name: str) -> None:  # noqa: FBT001
    if not stream_fits:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{name} of a wrong stream")
    if not size_fits:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{name} of a wrong size")
