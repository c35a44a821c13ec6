"""The client of the API server: from which files it is made, as whom it speaks, and by which proxy."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from extproc.config import Config
from extproc.discovery import kubernetes, kubernetes_client
from extproc.discovery.kubernetes_client import make_client
from extproc.errors import ConfigError
from tests.e2e.certificates import Maker

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-of-the-user"  # noqa: S105  a word to look for
ENCODED = base64.b64encode(SECRET.encode()).decode()


def kubeconfig(path: Path, user: Any, server: str = "https://127.0.0.1:1", **cluster: Any) -> str:
    """Write a whole kubeconfig with *user* under ``user``, and return its name."""
    return written(path, [{"name": "u", "user": user}], server, **cluster)


def written(
    path: Path, users: list[Any], server: str = "https://127.0.0.1:1", **cluster: Any
) -> str:
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": users,
    }
    path.write_text(yaml.safe_dump(document))
    return str(path)


async def token_of(client: Any) -> str:
    """Return the token with which the client would ask now."""
    _, _, headers, _, _ = await client.param_serialize(
        method="GET", resource_path="/", auth_settings=["BearerToken"]
    )
    return headers.get("authorization", "")


async def error_of(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        await make_client(path)
    trace = "".join(traceback.format_exception(caught.value))
    assert not any(secret in trace for secret in (SECRET, ENCODED)), trace
    return str(caught.value)


# --- a kubeconfig that cannot be used


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no such file"),
        ("", "TypeError"),
        ("{}", "the key current-context is missing"),
        ("a: [", "ParserError"),
        ("users: [{user: {token: s3cr3t-of-the-user}}]", "the key current-context is missing"),
        (
            "{current-context: x, contexts: [{name: c, context: {}}]}",
            "a name is asked for that is not among its contexts",
        ),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    """The flag and the file are named, and the key that is missing."""
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)

    text = await error_of(str(path))

    assert text == f"--kubeconfig: {path} cannot be used: {reason}"


@pytest.mark.parametrize(
    "users",
    [
        [{"name": "u", "token": SECRET}],
        [{"name": "u", "client-key-data": ENCODED, "client-certificate-data": ENCODED}],
        [{"name": "u", "exec": {"command": "x", "env": [{"name": "T", "value": SECRET}]}}],
        [{"name": "u", "user": {"token": "t"}}, {"token": SECRET}],
        [{"name": "u", "user": {"client-key-data": ENCODED, "client-certificate-data": ENCODED}}],
        [{"name": "u", "user": {"client-key": SECRET, "client-certificate": SECRET}}],
        [{"name": "u", "user": {"auth-provider": {"name": "oidc", "config": {"id-token": SECRET}}}}],
        [{"name": "u", "user": {"auth-provider": {"name": "oidc", "config": {"x": SECRET}}}}],
        [{"name": SECRET, "token": SECRET}],
        SECRET,
    ],
)  # fmt: skip
async def test_no_error_shows_what_is_secret(tmp_path: Path, caplog, users: Any) -> None:
    """The library puts the whole user into its errors when a key is forgotten."""
    caplog.set_level(logging.DEBUG)
    path = written(tmp_path / "kubeconfig", users)

    text = await error_of(path)

    assert text.startswith(f"--kubeconfig: {path} cannot be used: ")
    for secret in (SECRET, ENCODED):
        assert secret not in text
        assert secret not in caplog.text


async def test_the_key_that_is_missing_is_named(tmp_path: Path) -> None:
    """To forget it is a usual slip."""
    text = await error_of(written(tmp_path / "kubeconfig", [{"name": "u", "token": SECRET}]))

    assert text.endswith("cannot be used: the key user is missing")


@pytest.mark.parametrize("users", [[], [{"name": "other", "user": {}}]])
async def test_a_server_with_https_wants_a_user(tmp_path: Path, users: list[Any]) -> None:
    """The library knows only a TypeError then; behind `kubectl proxy` there need not be one."""
    text = await error_of(written(tmp_path / "kubeconfig", users))
    client = await make_client(written(tmp_path / "plain", users, "http://127.0.0.1:1"))
    token = await token_of(client)
    await client.close()

    assert text.endswith("its context names no user, or one that is not there")
    assert token == ""


async def test_what_an_exec_plugin_writes_is_not_logged(tmp_path: Path, caplog) -> None:
    """It may be a secret, and the library logs it."""
    caplog.set_level(logging.DEBUG)
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", f"echo {SECRET} >&2; exit 3"],
    }
    with pytest.raises(ConfigError, match="the exec plugin of its user failed") as caught:
        await make_client(kubeconfig(tmp_path / "kubeconfig", {"exec": plugin}))

    assert SECRET not in caplog.text
    assert SECRET not in str(caught.value)


async def test_outside_of_a_cluster_a_kubeconfig_is_needed(monkeypatch) -> None:
    """The text says so."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigError, match="outside of a cluster give --kubeconfig"):
        await make_client("")


async def test_without_the_client_the_text_says_what_to_install(monkeypatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)

    with pytest.raises(ConfigError, match="pip install 'vllm-extproc\\[kubernetes\\]'"):
        await make_client("")


# --- tokens that change


@pytest.fixture
def service_account(tmp_path: Path, monkeypatch) -> Path:
    """Return the file with the token of this Pod."""
    from kubernetes.aio.config import incluster_config  # noqa: PLC0415  only where it is needed

    token, ca = tmp_path / "token", tmp_path / "ca"
    token.write_text("first")
    ca.write_bytes(Maker(tmp_path).make("ca").cert.read_bytes())
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(ca))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return token


@pytest.mark.parametrize("where", ["service account", "token file", "kubeconfig"])
async def test_a_token_is_read_again(
    tmp_path: Path, service_account: Path, monkeypatch, where: str
) -> None:
    """One client speaks with the new token, but does not look for it at each request."""
    path, file = "", service_account
    if where == "token file":
        path = kubeconfig(tmp_path / "kubeconfig", {"tokenFile": str(file)})
    if where == "kubeconfig":
        path = kubeconfig(tmp_path / "kubeconfig", {"token": "first"})
    monkeypatch.setattr(kubernetes_client, "REREAD_S", 0.2)
    client = await make_client(path)

    first = await token_of(client)
    if where == "kubeconfig":
        kubeconfig(tmp_path / "kubeconfig", {"token": "second"})
    else:
        file.write_text("second")
    soon = await token_of(client)
    await asyncio.sleep(0.3)
    later = await token_of(client)
    await client.close()

    assert [text.lower() for text in (first, soon, later)] == [
        "bearer first",
        "bearer first",
        "bearer second",
    ]


def replace(file: Path, content: bytes | None) -> None:
    """Write *file* anew; None: remove it."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"\xff", None])
async def test_a_token_that_cannot_be_read_leaves_the_old_one(
    service_account: Path, monkeypatch, content: bytes | None
) -> None:
    """It may be half written; the next look finds it whole."""
    monkeypatch.setattr(kubernetes_client, "REREAD_S", 0.0)
    client = await make_client("")
    first = await token_of(client)
    replace(service_account, content)
    spoilt = await token_of(client)
    replace(service_account, b"second")
    whole = await token_of(client)
    await client.close()

    assert [first, spoilt, whole] == ["bearer first", "bearer first", "bearer second"]


def plugin(path: Path, ends_in_s: float | None) -> dict[str, Any]:
    """Return an exec plugin that gives another token each time."""
    status = {"token": "token-$n"}
    if ends_in_s is not None:
        end = time.gmtime(time.time() + ends_in_s)
        status["expirationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", end)
    version = "client.authentication.k8s.io/v1"
    answer = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
    script = path / "plugin.sh"
    text = answer.replace('"', '\\"')
    script.write_text(
        f'n=$(cat {path}/count 2>/dev/null || echo 0)\nn=$((n+1))\necho $n > {path}/count\necho "{text}"\n'
        f"while [ -e {path}/hang ]; do sleep 0.05; done\n"
    )
    return {"exec": {"apiVersion": version, "command": "sh", "args": [str(script)]}}


async def test_an_exec_plugin_is_asked_again_before_its_token_ends(
    tmp_path: Path, monkeypatch
) -> None:
    """Not sooner: one takes a second of CPU."""
    monkeypatch.setattr(kubernetes_client, "REREAD_S", 0.0)
    found = []
    for name, ends_in_s in (("long", 3600.0), ("short", 200.0), ("unknown", None)):
        (tmp_path / name).mkdir()
        path = kubeconfig(tmp_path / name / "kubeconfig", plugin(tmp_path / name, ends_in_s))
        client = await make_client(path)
        found.append([await token_of(client) for _ in range(2)])
        await client.close()

    assert found == [
        ["Bearer token-1", "Bearer token-1"],
        ["Bearer token-2", "Bearer token-3"],
        ["Bearer token-2", "Bearer token-3"],
    ]


async def test_an_exec_plugin_that_hangs_holds_no_request_and_is_not_begun_again(
    tmp_path: Path, monkeypatch
) -> None:
    """The old token goes on."""
    monkeypatch.setattr(kubernetes_client, "REREAD_S", 0.0)
    monkeypatch.setattr(kubernetes_client, "REREAD_LIMIT_S", 0.3)
    client = await make_client(kubeconfig(tmp_path / "kubeconfig", plugin(tmp_path, None)))
    (tmp_path / "hang").touch()
    begin = time.monotonic()
    tokens = [await token_of(client) for _ in range(2)]
    took = time.monotonic() - begin
    await client.close()
    (tmp_path / "hang").unlink()
    async with asyncio.timeout(10):
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    assert tokens == ["Bearer token-1", "Bearer token-1"]
    assert took < 5.0
    assert (tmp_path / "count").read_text() == "2\n"


# --- proxies


class Proxy:
    """A proxy that answers by itself, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.port = 0

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(
            (
                f"{request.method} {request.raw_path}",
                request.headers.get("Proxy-Authorization", ""),
            )
        )
        return web.Response(status=407 if request.method == "CONNECT" else 403)


@pytest.fixture
async def proxy(monkeypatch) -> AsyncIterator[Proxy]:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    proxy = Proxy()
    runner = web.ServerRunner(web.Server(proxy.answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy.port = runner.addresses[0][1]
    yield proxy
    await runner.cleanup()


async def ask(path: str, monkeypatch) -> str:
    """Look for Pods; return why there are none."""
    monkeypatch.setattr(kubernetes, "CONNECT_S", 0.3)
    options = Config(service_discovery=True, selector=("a=b",), kubeconfig=path)
    with pytest.raises((ConfigError, OSError)) as caught:
        await kubernetes.look_once(options)
    return str(caught.value)


@pytest.mark.usefixtures("service_account")
async def test_in_the_cluster_no_proxy_is_used(proxy: Proxy, monkeypatch) -> None:
    """Nobody reaches the address of a service by one."""
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")

    await ask("", monkeypatch)

    assert proxy.asked == []


async def test_a_proxy_of_the_environment_is_used_with_a_kubeconfig(
    proxy: Proxy, tmp_path: Path, monkeypatch
) -> None:
    """Unless NO_PROXY names the server, as an address or by its network."""
    path = kubeconfig(tmp_path / "kubeconfig", {"token": "t"}, "https://192.0.2.1:6443")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,.svc")
    await ask(path, monkeypatch)
    by_proxy = [line for line, _ in proxy.asked]
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,192.0.2.0/24")
    await ask(path, monkeypatch)

    assert by_proxy == ["CONNECT 192.0.2.1:6443"]
    assert len(proxy.asked) == 1


async def test_the_proxy_of_a_kubeconfig_counts_more_and_its_password_is_not_shown(
    proxy: Proxy, tmp_path: Path, monkeypatch
) -> None:
    """NO_PROXY is for those of the environment."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "*")
    url = f"http://me:{SECRET}@127.0.0.1:{proxy.port}"
    for server in ("https://192.0.2.1:6443", "http://192.0.2.1:6443"):
        path = kubeconfig(tmp_path / "kubeconfig", {"token": "t"}, server, **{"proxy-url": url})
        text = await ask(path, monkeypatch)
        assert SECRET not in text

    basic = f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"
    assert [(line.partition("?")[0], sent) for line, sent in proxy.asked] == [
        ("CONNECT 192.0.2.1:6443", basic),
        ("GET http://192.0.2.1:6443/api/v1/pods", basic),
    ]


@pytest.mark.parametrize("url", ["socks5://u:PW@h:1", "proxy", "http://u:PW@:x", "http://u:PW@h:x"])
async def test_a_proxy_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    """Without what it says, which may have a password."""
    path = kubeconfig(tmp_path / "kubeconfig", {"token": "t"}, **{"proxy-url": url})

    text = await error_of(path)

    assert text.endswith("its proxy-url is no URL with http or https and a host")
