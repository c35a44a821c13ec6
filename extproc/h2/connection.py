"""The server side of one HTTP/2 connection, without I/O.

``receive`` takes bytes and calls the ``Listener``; the ``send_*`` methods queue frames; ``output`` hands
over what is to be written. Flow control is obeyed in both directions: what the peer's windows do not
allow waits here, and what is received is given back at once, since messages are taken in as they come
and their size is limited above.

A fault of the peer ends the connection with GOAWAY and its reason. Names follow RFC 9113.
"""

from __future__ import annotations

import struct
from collections import deque
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

MAX_KNOWN_BLOCKS = 64

WINDOW_REFRESH_BYTES = 2**24
"""Received bytes after which the connection's window is filled up again."""

HeaderList = Sequence[tuple[bytes, bytes]]


class Listener(Protocol):
    """Who is told what the peer does."""

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
    __slots__ = ("ended_by_peer", "pending", "refresh", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        """Bytes that the peer is ready to take on this stream."""
        self.pending: deque[tuple[int, int, bytes]] | None = None
        """Frames (kind, flags, payload) that wait for the peer's window."""
        self.refresh = 0
        self.ended_by_peer = False


class ServerConnection:
    """One peer."""

    def __init__(self, listener: Listener) -> None:
        self.closed = False
        """Whether nothing more can be exchanged; write ``output`` once more and close."""
        self._listener = listener
        self._buffer = b""
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
        self._draining_after: int | None = None
        self._decoder = Decoder()
        self._decoder.max_header_list_size = MAX_HEADER_BLOCK_BYTES
        self._decoded: dict[bytes, HeaderList] = {}
        """Header blocks that left the decoder's table as it was: Envoy sends the same one each time."""
        self._header_fragments: tuple[int, int, bytes] | None = None
        self._window = f.DEFAULT_WINDOW
        self._peer_initial_window = f.DEFAULT_WINDOW
        self._peer_max_frame = f.DEFAULT_MAX_FRAME
        self._received = 0
        self._blocked: dict[int, None] = {}
        """Streams with pending frames, the longest waiting first."""

    # What the shell does.

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer."""
        if self.closed:
            return
        buffer = self._buffer + data if self._buffer else data
        try:
            position = self._take_frames(buffer)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        self._buffer = buffer[position:] if position < len(buffer) else b""

    def output(self) -> bytes:
        """Return what is to be written, and forget it."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def drain(self) -> None:
        """Refuse new streams; those that are open go on."""
        if self._draining_after is None:
            self._draining_after = self._last_stream
            self._out.append(f.goaway(self._last_stream, ErrorCode.NO_ERROR, "shutting down"))

    def open_streams(self) -> list[int]:
        """Return the streams that are not over."""
        return list(self._streams)

    # What the layer above sends.

    def send_headers(self, stream: int, block: bytes) -> None:
        """Send response headers, already compressed."""
        if stream in self._streams:
            self._out.append(f.frame(f.HEADERS, f.END_HEADERS, stream, block))

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
        limit = self._peer_max_frame
        for start in range(0, size, limit):
            self._queue(stream, state, f.DATA, 0, data[start : start + limit])
        self._flush(stream, state)

    def end(self, stream: int, trailers: bytes) -> None:
        """Send trailers, already compressed, after all data; the stream is over for the layer above."""
        state = self._streams.get(stream)
        if state is None:
            return
        if state.pending is None:
            self._finish(stream, state, trailers)
            return
        self._queue(stream, state, f.HEADERS, f.END_HEADERS | f.END_STREAM, trailers)
        self._flush(stream, state)

    def reset(self, stream: int, code: ErrorCode) -> None:
        """Give a stream up."""
        if self._forget(stream):
            self._out.append(f.rst_stream(stream, code))

    # Frames.

    def _take_frames(self, buffer: bytes) -> int:
        position, length = 0, len(buffer)
        if not self._preface_seen:
            preface = buffer[: len(f.PREFACE)]
            if not f.PREFACE.startswith(preface):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 client")
            if len(preface) < len(f.PREFACE):
                return 0
            self._preface_seen = True
            position = len(f.PREFACE)
        while length - position >= f.HEADER_BYTES:
            size = buffer[position] << 16 | buffer[position + 1] << 8 | buffer[position + 2]
            if size > MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {size} bytes")
            end = position + f.HEADER_BYTES + size
            if end > length:
                break
            kind, flags = buffer[position + 3], buffer[position + 4]
            stream = int.from_bytes(buffer[position + 5 : position + 9], "big") & f.MAX_WINDOW
            self._on_frame(kind, flags, stream, buffer[position + f.HEADER_BYTES : end])
            position = end
            if self.closed:
                return length
        return position

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
            case f.RST_STREAM:
                self._on_rst_stream(stream, payload)
            case f.SETTINGS:
                self._on_settings(flags, stream, payload)
            case f.PING:
                self._on_ping(flags, stream, payload)
            case f.WINDOW_UPDATE:
                self._on_window_update(stream, payload)
            case f.PUSH_PROMISE:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")
            case _:
                pass  # PRIORITY, GOAWAY, and kinds that a later RFC may add

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
        if data:
            self._listener.on_data(stream, data)
        if flags & f.END_STREAM:
            self._on_end_stream(stream)

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & f.PADDED:
            payload = f.unpad(payload)
        if flags & f.PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "priority without its fields")
            payload = payload[5:]
        if not flags & f.END_HEADERS:
            self._header_fragments = (stream, flags, payload)
            return
        self._on_header_block(flags, stream, payload)

    def _on_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        if self._header_fragments is None or self._header_fragments[0] != stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "continuation of nothing")
        _, first_flags, collected = self._header_fragments
        block = collected + payload
        if len(block) > MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers too large")
        if not flags & f.END_HEADERS:
            self._header_fragments = (stream, first_flags, block)
            return
        self._header_fragments = None
        self._on_header_block(first_flags, stream, block)

    def _on_header_block(self, flags: int, stream: int, block: bytes) -> None:
        if len(block) > MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers too large")
        headers = self._decode(block)
        if stream in self._streams:  # trailers
            if not flags & f.END_STREAM:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "trailers that are not the end")
            self._on_end_stream(stream)
            return
        if stream % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} of a client")
        if stream <= self._last_stream:
            return  # crossed with our end of the stream
        self._last_stream = stream
        if self._draining_after is not None:
            self._out.append(f.rst_stream(stream, ErrorCode.REFUSED_STREAM))
            return
        self._streams[stream] = _Stream(self._peer_initial_window)
        self._listener.on_request(stream, headers)
        if flags & f.END_STREAM:
            self._on_end_stream(stream)

    def _on_end_stream(self, stream: int) -> None:
        state = self._streams.get(stream)
        if state is None:
            return  # the listener has ended it meanwhile
        if state.ended_by_peer:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "a stream that ends twice")
        state.ended_by_peer = True
        self._listener.on_end(stream)

    def _on_rst_stream(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a wrong size")
        self._check_known(stream)
        if self._forget(stream):
            self._listener.on_reset(stream)

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "settings of a stream")
        if flags & f.ACK:
            return
        if len(payload) % 6:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
        for key, value in struct.iter_unpack("!HI", payload):
            if key == f.SETTINGS_INITIAL_WINDOW_SIZE:
                if value > f.MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
                change = value - self._peer_initial_window
                self._peer_initial_window = value
                for state in self._streams.values():
                    state.window += change
            elif key == f.SETTINGS_MAX_FRAME_SIZE:
                if not f.DEFAULT_MAX_FRAME <= value <= f.LARGEST_MAX_FRAME:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame size out of range")
                self._peer_max_frame = value
        self._out.append(f.frame(f.SETTINGS, f.ACK, 0))
        self._flush_blocked()

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a malformed PING")
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
            self._flush_blocked()
            return
        self._check_known(stream)
        state = self._streams.get(stream)
        if state is not None:
            state.window += increment
            if state.window > f.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            self._flush(stream, state)

    # Sending within the peer's windows.

    def _queue(self, stream: int, state: _Stream, kind: int, flags: int, payload: bytes) -> None:
        if state.pending is None:
            state.pending = deque()
            self._blocked[stream] = None
        state.pending.append((kind, flags, payload))

    def _flush(self, stream: int, state: _Stream) -> None:
        pending = state.pending
        while pending:
            kind, flags, payload = pending[0]
            size = len(payload)
            if kind == f.DATA:
                allowed = min(size, state.window, self._window)
                if allowed <= 0 < size:
                    return
                state.window -= allowed
                self._window -= allowed
                self._out.append(f.frame(f.DATA, flags, stream, payload[:allowed]))
                if allowed < size:
                    pending[0] = (kind, flags, payload[allowed:])
                    return
                pending.popleft()
            else:
                pending.popleft()
                self._finish(stream, state, payload)
                return
        if pending is not None:
            state.pending = None
            self._blocked.pop(stream, None)

    def _flush_blocked(self) -> None:
        for stream in list(self._blocked):
            state = self._streams.get(stream)
            if state is not None:
                self._flush(stream, state)

    def _finish(self, stream: int, state: _Stream, trailers: bytes) -> None:
        self._out.append(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, stream, trailers))
        if not state.ended_by_peer:
            # RFC 9113, 8.1: a server that needs no more of the request may say so after its answer.
            self._out.append(f.rst_stream(stream, ErrorCode.NO_ERROR))
        self._forget(stream)

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
        elif len(self._decoded) < MAX_KNOWN_BLOCKS:
            self._decoded[block] = pairs
        return pairs

    def _check_known(self, stream: int) -> None:
        if stream == 0 or stream > self._last_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} was never opened")

    def _forget(self, stream: int) -> bool:
        self._blocked.pop(stream, None)
        return self._streams.pop(stream, None) is not None

    def _fail(self, fault: ConnectionFault) -> None:
        self._out.append(f.goaway(self._last_stream, fault.code, str(fault)))
        self.closed = True
        self._buffer = b""
        for stream in list(self._streams):
            self._forget(stream)
            self._listener.on_reset(stream)
