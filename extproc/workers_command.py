"""``workers list|add|remove|drain``: the admin API on the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from rich.console import Console

from extproc.admin_client import AdminClient, RouterError, RouterTls, plain
from extproc.config import environment_secret
from extproc.router_arguments import ADD_WAIT_S
from extproc.workers_table import build_table, format_plain

Action = Callable[[AdminClient, argparse.Namespace], Awaitable[str]]
"""Does it and returns what to print."""


def client_of(parsed: argparse.Namespace) -> AdminClient:
    """Return a client of the router that the arguments name."""
    key = parsed.admin_api_key
    return AdminClient(
        parsed.router_url,
        environment_secret("admin_api_key") if key is None else key,
        RouterTls(
            ca_file=parsed.router_ca_file,
            insecure=parsed.router_tls_insecure,
            client_cert=parsed.router_client_cert,
            client_key=parsed.router_client_key,
        ),
    )


def run(parsed: argparse.Namespace) -> int:
    """Carry out the action; return the exit status."""
    action = ACTIONS[parsed.action]

    async def act() -> str:
        async with client_of(parsed) as client:
            return await action(client, parsed)

    try:
        sys.stdout.write(asyncio.run(act()))
    except RouterError as error:
        sys.stderr.write(f"vllm-extproc: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _list(client: AdminClient, parsed: argparse.Namespace) -> str:
    listing = await client.list_workers()
    if parsed.json:
        shown = json.dumps(json.loads(listing.raw), indent=2)  # escapes what is not ASCII
        return f"{shown}\n"
    console = Console(highlight=False)
    if not console.is_terminal:
        return format_plain(listing)
    console.print(build_table(listing))
    return ""


async def _add(client: AdminClient, parsed: argparse.Namespace) -> str:
    described: dict[str, Any] = {
        "url": parsed.url,
        "weight": parsed.weight,
        "model": parsed.model,
        "labels": dict(parsed.label),
        "worker_type": parsed.worker_type,
        "bootstrap_port": parsed.bootstrap_port,
        "tls_name": parsed.tls_name,
    }
    wait_s = parsed.timeout
    if wait_s is None and parsed.wait:
        wait_s = ADD_WAIT_S
    given = {name: value for name, value in described.items() if value not in (None, {})}
    await client.add(given, wait_s=wait_s)
    return f"{plain(parsed.url)} {'added' if wait_s is None else 'is healthy'}\n"


async def _remove(client: AdminClient, parsed: argparse.Namespace) -> str:
    await client.remove(parsed.url)
    return f"{plain(parsed.url)} removed\n"


async def _drain(client: AdminClient, parsed: argparse.Namespace) -> str:
    await client.drain(parsed.url, timeout_s=parsed.timeout)
    return f"{plain(parsed.url)} is draining\n"


ACTIONS: dict[str, Action] = {"list": _list, "add": _add, "remove": _remove, "drain": _drain}
