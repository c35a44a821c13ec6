"""A worker that serves https."""

from pathlib import Path

import aiohttp
import pytest

CHAT = "/v1/chat/completions"


@pytest.fixture
async def worker(start_worker, certificate):
    """Start a worker that serves https."""
    return await start_worker(ssl_certfile=certificate[0], ssl_keyfile=certificate[1])


async def test_https_is_served(worker, http, trust, chat_body):
    """Answers, streams and WebSockets; the certificate is the one given."""
    url = worker.url
    assert url == f"https://127.0.0.1:{worker.port}"

    answer = await http.post(url + CHAT, json=chat_body(), ssl=trust)
    stream = await http.post(url + CHAT, json=chat_body(stream=True), ssl=trust)
    async with http.ws_connect(url + "/v1/realtime", ssl=trust) as socket:
        await socket.send_str("hello")
        assert (await socket.receive(5)).data == "hello"

    assert answer.status == 200
    assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await http.get(url + "/health")


async def test_http_is_not_served_there(worker, http):
    """The port has one protocol."""
    with pytest.raises(aiohttp.ClientError):
        await http.get(worker.url.replace("https", "http") + "/health")


async def test_a_stream_is_reset_under_tls_too(worker, http, trust, chat_body):
    """The fault acts on the TCP connection below."""
    worker.reset_midstream(after=2)
    answer = await http.post(worker.url + CHAT, json=chat_body(stream=True), ssl=trust)

    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        await answer.read()


@pytest.fixture
def both(certificate, tmp_path):
    """Make a file with certificate and key."""
    path = tmp_path / "both.pem"
    path.write_text("".join(Path(part).read_text() for part in certificate))
    return path


async def test_the_key_may_be_in_the_certificates_file(start_worker, http, trust, both):
    """As with vLLM, then one flag is enough."""
    worker = await start_worker(ssl_certfile=str(both))

    assert (await http.get(worker.url + "/health", ssl=trust)).status == 200


async def test_an_unusable_certificate_is_named(start_worker, tmp_path):
    """ValueError, for the caller to word."""
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("x")

    with pytest.raises(ValueError, match=r"cannot use the certificate '.*wrong.pem'"):
        await start_worker(ssl_certfile=str(wrong))
