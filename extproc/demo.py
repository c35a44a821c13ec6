"""``demo``: simulated workers and the router, with something to paste or something to watch."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from extproc.address import join_host_port
from extproc.child import Child
from extproc.config import Config, bind_ip
from extproc.errors import ConfigError
from extproc.launcher import Launcher
from extproc.limits import raise_open_files
from extproc.stop import stop_on_signals

MODEL = "sim-model"
QUESTIONS = (
    ("In one sentence: what does a router do?", "And what does a worker do?"),
    ("Name three uses of a cache.", "Which of them matters most for prompts?"),
)
"""Two conversations of two turns."""

WORKER_START_TIMEOUT_S = 30.0

USAGE = """
Try it; each block can be pasted:

curl -i {curl_flags}{base_url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

{python} - <<'EOF'
from openai import {imports}OpenAI
client = OpenAI(base_url="{base_url}/v1", api_key="none"{openai_options})
messages = [{{"role": "user", "content": "Hello"}}]
for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
EOF

Ctrl-C stops all of it."""

_console = Console(highlight=False)


def run(config: Config, *, workers: int, serve: bool) -> int:
    """Start *workers* simulated workers and the router; chat through it, or *serve* until Ctrl-C.

    With ``vllm_pd_disaggregation`` there are that many of either role.
    """
    if config.worker_urls or config.prefill or config.decode:
        raise ConfigError("demo starts its own workers; use `launch` with URLs of others")
    if config.kv_connector == "mooncake":
        raise ConfigError("demo speaks nixl or nccl; use `launch` with workers of your own")
    if config.tls_client_ca:
        raise ConfigError(
            "demo has no certificate to show to the router; leave --tls-client-ca out"
        )
    if workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {workers}")
    if not serve and importlib.util.find_spec("openai") is None:
        raise ConfigError(
            "the demo speaks through the OpenAI SDK; install it with: pip install openai"
        )
    raise_open_files()
    return asyncio.run(_run(config, workers, serve=serve))


async def _run(config: Config, count: int, *, serve: bool) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop)

    workers = _name_workers(count, split=config.vllm_pd_disaggregation)
    config = _with_workers(config, workers)
    # Made before any worker starts: it fails early when there is no Envoy.
    launcher = Launcher(config)

    children: list[Child] = []
    ready = asyncio.Event()
    status = 0
    try:
        for worker in workers:
            children.append(await _start_worker(worker, config))  # noqa: PERF401  what has started must be stopped
        await asyncio.gather(*map(_wait_for_worker, children, (w.port for w in workers)))
        async with asyncio.TaskGroup() as tasks:
            router = tasks.create_task(launcher.run(stop, ready.set))
            waiting = tasks.create_task(ready.wait())
            await asyncio.wait({router, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if ready.is_set() and not router.done():
                if serve:
                    _print_usage(config, launcher.base_url, workers)
                else:
                    tasks.create_task(_chat_and_stop(launcher.base_url, stop))
    except* ConfigError as group:
        for error in group.exceptions:
            sys.stderr.write(f"vllm-extproc: {error}\n")
        status = 1
    finally:
        for child in children:
            await child.stop(timeout_s=2.0)
    return status


@dataclasses.dataclass(frozen=True, slots=True)
class _SimWorker:
    name: str
    role: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _name_workers(count: int, *, split: bool) -> list[_SimWorker]:
    """Return *count* workers on free ports; *split*: so many that prefill and so many that decode."""
    roles = ("prefill", "decode") if split else ("both",)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count * len(roles))]
    ports = iter([sock.getsockname()[1] for sock in sockets])
    for sock in sockets:
        sock.close()
    return [
        _SimWorker(f"{role if split else 'worker'}-{number}", role, next(ports))
        for role in roles
        for number in range(1, count + 1)
    ]


def _with_workers(config: Config, workers: list[_SimWorker]) -> Config:
    def urls(role: str) -> tuple[str, ...]:
        return tuple(worker.url for worker in workers if worker.role == role)

    return msgspec.structs.replace(
        config, worker_urls=urls("both"), prefill=urls("prefill"), decode=urls("decode")
    )


async def _start_worker(worker: _SimWorker, config: Config) -> Child:
    flags = ["--port", str(worker.port), "--name", worker.name, "--model", MODEL]
    flags += ["--role", worker.role, "--kv-connector", config.kv_connector]
    command = [sys.executable, "-P", "-m", "extproc", "sim-worker", *flags]
    return await Child.start(worker.name, command, quiet=True)


async def _wait_for_worker(child: Child, port: int) -> None:
    async with asyncio.timeout(WORKER_START_TIMEOUT_S):
        while child.running:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
    raise ConfigError(f"{child.name} ended while starting")


def _print_usage(config: Config, base_url: str, workers: list[_SimWorker]) -> None:
    policy = config.policy if isinstance(config.policy, str) else config.policy.name
    print(f"Router ready on {base_url} (policy {policy})")
    width = max(len(worker.name) for worker in workers)
    for worker in workers:
        print(f"  {worker.name:<{width}}  {worker.url}")
    if config.prometheus_port:
        metrics = join_host_port(bind_ip(config.prometheus_host), config.prometheus_port)
        print(f"  {'metrics':<{width}}  http://{metrics}/metrics")
    tls = bool(config.tls_cert)
    usage = USAGE.format(
        base_url=base_url,
        model=MODEL,
        python=Path(sys.executable),
        # The certificate need not be for the address that the demo serves on.
        curl_flags="--insecure " if tls else "",
        imports="DefaultHttpxClient, " if tls else "",
        openai_options=", http_client=DefaultHttpxClient(verify=False)" if tls else "",
    )
    print(usage, flush=True)


async def _chat_and_stop(base_url: str, stop: asyncio.Event) -> None:
    import openai

    table = Table(title="Two conversations of two turns each", title_justify="left")
    for column in ("conversation", "turn", "answered by"):
        table.add_column(column)
    table.add_column("chunks", justify="right")
    table.add_column("first after", justify="right")
    try:
        # It trusts whatever the router on this machine shows that it has just started.
        http_client = openai.DefaultAsyncHttpxClient(verify=not base_url.startswith("https:"))
        async with openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", http_client=http_client
        ) as client:
            histories: list[list[dict[str, str]]] = [[] for _ in QUESTIONS]
            for turn in range(len(QUESTIONS[0])):
                for number, history in enumerate(histories):
                    history.append({"role": "user", "content": QUESTIONS[number][turn]})
                    chat = await _chat(client, history, show=turn == number == 0)
                    history.append({"role": "assistant", "content": chat.text})
                    table.add_row(
                        "AB"[number],
                        str(turn + 1),
                        chat.worker,
                        str(chat.chunks),
                        f"{chat.first_after_s * 1000:.0f} ms",
                    )
    finally:
        stop.set()
    _console.print(table)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chat:
    worker: str
    text: str
    chunks: int
    first_after_s: float


async def _chat(client: Any, messages: list[dict[str, str]], *, show: bool) -> _Chat:
    """Stream one chat."""
    if show:
        print(f"user:      {messages[-1]['content']}\nassistant: ", end="", flush=True)
    started = time.monotonic()
    response = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=24, stream=True
    )
    pieces: list[str] = []
    first_after_s = 0.0
    async for chunk in response.parse():
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first_after_s = first_after_s or time.monotonic() - started
            pieces.append(text)
            if show:
                print(text, end="", flush=True)
    if show:
        print("\n")
    worker = response.headers.get("x-sim-worker", "unknown")
    return _Chat(worker, "".join(pieces), len(pieces), first_after_s)
