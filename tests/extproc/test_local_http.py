"""One request to a program beside us."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from extproc.address import Address
from extproc.local_http import ask


@pytest.fixture
async def site(tmp_path):
    """Serve on a port and on a Unix socket; return both addresses."""

    async def echo(request):
        body = f"{request.method} {request.rel_url} {request.headers['Host'].split(':')[0]}"
        return web.Response(text=body, status=201)

    async def hang(_request):
        await asyncio.sleep(60)

    app = web.Application()
    app.router.add_get("/hang", hang)
    app.router.add_route("*", "/{path:.*}", echo)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    tcp = web.TCPSite(runner, "127.0.0.1", 0)
    unix = web.UnixSite(runner, str(tmp_path / "http.sock"))
    await tcp.start()
    await unix.start()
    port = runner.addresses[0][1]
    yield Address("127.0.0.1", port), Address(path=str(tmp_path / "http.sock"))
    await runner.cleanup()


async def test_status_and_body_are_returned(site):
    """Over TCP as over a Unix socket, whatever the status is."""
    tcp, unix = site

    assert await ask(tcp, "GET", "/a?b=c", timeout_s=5) == (201, b"GET /a?b=c 127.0.0.1")
    assert await ask(unix, "POST", "/x", timeout_s=5) == (201, b"POST /x localhost")


async def test_who_does_not_answer_in_time_gives_none(site):
    """Nobody waits for ever for a program that hangs."""
    for address in site:
        assert await ask(address, "GET", "/hang", timeout_s=0.05) is None


async def test_who_is_not_there_gives_none(tmp_path):
    """A port that is closed, a socket without a file, a file that is none."""
    (tmp_path / "file").touch()
    closed = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    await closed.wait_closed()

    for address in (
        Address("127.0.0.1", port),
        Address(path=str(tmp_path / "none")),
        Address(path=str(tmp_path / "file")),
    ):
        assert await ask(address, "GET", "/", timeout_s=5) is None


@pytest.mark.parametrize(
    "answer", [b"", b"junk\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"]
)
async def test_who_does_not_speak_http_gives_none(answer):
    """Or stops in the middle."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    assert await ask(Address("127.0.0.1", port), "GET", "/", timeout_s=5) is None

    server.close()
    await server.wait_closed()
