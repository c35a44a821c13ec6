"""The client of the API server of Kubernetes: how the server is reached, and as whom.

In the cluster that is told by the service account of the Pod, outside by a kubeconfig. Tokens are read again
while the client is in use; certificates only when a new client is made.

What the official library says of a kubeconfig shows parts of it, its token among them. So nothing that it
says is shown, here or in its own log.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import logging
import re
from typing import TYPE_CHECKING, Any

from yarl import URL

from extproc.discovery.proxies import environment_proxy
from extproc.errors import ConfigError

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, Configuration

REREAD_S = 60.0
"""Between two looks at a token, at least. Kubelet writes a new one long before the old one ends."""

EXPIRY_MARGIN_S = 300.0
"""How long before the end of its token an exec plugin is asked again, as in the library."""

REREAD_LIMIT_S = 5.0
"""How long a request waits for a token that is read again, before it goes on with the old one."""

_MISSING = re.compile(r"Invalid kube-config file\. Expected key ([a-z-]+) in ")
_UNNAMED = re.compile(r".*Expected object with name .*/(contexts|clusters) list\Z", re.DOTALL)
_NO_FILE = "File does not exists: "


async def make_client(kubeconfig: str) -> ApiClient:
    """Return a client as *kubeconfig* says; empty: of the service account. ``ConfigError`` says what is wrong."""
    try:
        from kubernetes.aio import client  # noqa: PLC0415  0.3 s and 30 MB that few need
    except ImportError as error:
        raise ConfigError(
            "--service-discovery needs the client of Kubernetes: pip install 'vllm-extproc[kubernetes]'"
        ) from error
    # It logs what an exec plugin writes to its standard error.
    logging.getLogger("kubernetes.aio.config").setLevel(logging.CRITICAL + 1)
    settings, lasts_s = await _read(kubeconfig)
    # Not what aiohttp takes from the environment: proxies without networks in NO_PROXY, and ~/.netrc.
    settings.client_session_kwargs = {"trust_env": False}
    settings.refresh_api_key_hook = _Token(kubeconfig, lasts_s).refresh
    try:
        return client.ApiClient(configuration=settings)
    except Exception as error:  # noqa: BLE001  of the certificates, which are read here
        raise _cannot_be_used(kubeconfig, type(error).__name__) from None


class _Token:
    """Reads the token of a client again."""

    def __init__(self, kubeconfig: str, lasts_s: float) -> None:
        self._kubeconfig = kubeconfig
        self._due = asyncio.get_running_loop().time() + lasts_s
        self._reading: asyncio.Future[tuple[Configuration, float]] | None = None

    async def refresh(self, settings: Configuration) -> None:
        """Put the token as it is now into *settings*. The client calls it before each request.

        One that cannot be read, which may be half written, leaves the old one: the server decides how long
        that is good.
        """
        loop = asyncio.get_running_loop()
        if self._reading is None:
            if loop.time() < self._due:
                return
            self._reading = asyncio.ensure_future(_read(self._kubeconfig))
        done, _ = await asyncio.wait({self._reading}, timeout=REREAD_LIMIT_S)
        if not done:  # an exec plugin; it is not begun once more while it hangs
            return
        reading, self._reading = self._reading, None
        self._due = loop.time() + REREAD_S
        if reading.exception() is None:
            fresh, lasts_s = reading.result()
            settings.api_key = fresh.api_key or settings.api_key
            self._due = loop.time() + lasts_s


async def _read(kubeconfig: str) -> tuple[Configuration, float]:
    """Return how to reach the server, and for how many seconds its token need not be read again."""
    try:
        return await _of_file(kubeconfig) if kubeconfig else _of_service_account()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  whatever is wrong with a file
        # Without the error in its wake, whose text a traceback would show.
        raise _cannot_be_used(kubeconfig, _fault(error)) from None


def _of_service_account() -> tuple[Configuration, float]:
    from kubernetes.aio import client, config  # noqa: PLC0415  as above

    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings, try_refresh_token=False)
    except config.ConfigException as error:
        raise ConfigError(
            f"--service-discovery: this is no Pod with a service account ({error}); outside of a cluster give"
            " --kubeconfig"
        ) from error
    return settings, REREAD_S


async def _of_file(kubeconfig: str) -> tuple[Configuration, float]:
    from kubernetes.aio import client  # noqa: PLC0415  as above
    from kubernetes.aio.config import kube_config  # noqa: PLC0415

    document = kube_config.KubeConfigMerger(kubeconfig).config
    if document is None:
        raise _cannot_be_used(kubeconfig, "there is no such file")
    loader = kube_config.KubeConfigLoader(document, config_base_path=None)
    context = loader.current_context["context"]
    server = str(document["clusters"].get_with_name(context["cluster"])["cluster"]["server"])
    named = {user.value["name"] for user in document.value["users"]}
    if server.startswith("https") and context.get("user") not in named:
        raise _cannot_be_used(kubeconfig, "its context names no user, or one that is not there")
    settings = client.Configuration()
    await loader.load_and_set(settings)
    user = document["users"].get_with_name(context.get("user"), safe=True)
    # When its plugin fails the library goes on as nobody.
    if user and "exec" in user["user"] and not settings.api_key and not settings.cert_file:
        raise _cannot_be_used(
            kubeconfig,
            "the exec plugin of its user failed, or gave neither token nor certificate; run it by hand to see why",
        )
    _set_proxy(settings, kubeconfig)
    return settings, _lasts_s(loader)


def _set_proxy(settings: Configuration, kubeconfig: str) -> None:
    """Take the proxy of the kubeconfig, else that of the environment."""
    source = "its proxy-url" if settings.proxy else "the proxy of the environment"
    text = str(settings.proxy or environment_proxy(settings.host))
    if not text:
        return
    try:
        proxy = URL(text)
    except ValueError:
        proxy = URL()
    if proxy.scheme not in ("http", "https") or not proxy.host:  # not shown: it may have a password
        raise _cannot_be_used(kubeconfig, f"{source} is no URL with http or https and a host")
    if proxy.user is not None and settings.host.startswith("https"):
        # In a header, since errors of aiohttp show the URL.
        user = f"{proxy.user}:{proxy.password or ''}".encode()
        settings.proxy_headers = {"Proxy-Authorization": f"Basic {base64.b64encode(user).decode()}"}
        proxy = proxy.with_user(None)
    settings.proxy = str(proxy)


def _lasts_s(loader: Any) -> float:
    """Return for how many seconds what *loader* has read is good; ``REREAD_S`` when nothing says so."""
    expiry = getattr(loader, "exec_plugin_expiry", None)
    if expiry is None:
        return REREAD_S
    left: float = (expiry - dt.datetime.now(dt.UTC)).total_seconds()
    return max(REREAD_S, left - EXPIRY_MARGIN_S)


def _cannot_be_used(kubeconfig: str, why: str) -> ConfigError:
    return ConfigError(f"--kubeconfig: {kubeconfig or 'the service account'} cannot be used: {why}")


def _fault(error: Exception) -> str:
    """Say what is wrong with a kubeconfig, in words that show nothing of it but the names of keys."""
    text = str(error)
    if found := _MISSING.match(text):
        return f"the key {found[1]} is missing"
    if found := _UNNAMED.match(text):
        return f"a name is asked for that is not among its {found[1]}"
    if text.startswith(_NO_FILE):
        return "a file that it names is not there"
    return type(error).__name__
