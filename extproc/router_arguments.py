"""Arguments of the commands that talk to a running router: ``workers`` and ``top``."""

from __future__ import annotations

import argparse

from extproc.discovery.updates import WorkerType

DEFAULT_URL = "http://127.0.0.1:30000"
ADD_WAIT_S = 600.0
"""How long ``add --wait`` waits without ``--timeout``; what the router does without other settings."""

MAX_SECONDS = 31_536_000.0
MIN_INTERVAL_S = 0.05


def add_workers_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``workers`` with their arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary)
        _add_router_arguments(sub)
        return sub

    listing = add("list", "Show the workers.")
    listing.add_argument("--json", action="store_true", help="as the router's API gives them")

    adding = add("add", "Add a worker.")
    adding.add_argument("url", metavar="URL", help="http[s]://host[:port][/base/path][@rank]")
    adding.add_argument(
        "--weight", type=_number, metavar="X", help="share of the traffic relative to others"
    )
    adding.add_argument("--model", metavar="NAME", help="the model it serves")
    adding.add_argument(
        "--label",
        action="append",
        default=[],
        type=_label,
        metavar="KEY=VALUE",
        help="free text for operators; may be given several times",
    )
    adding.add_argument(
        "--worker-type", choices=[kind.value for kind in WorkerType], help="its role"
    )
    adding.add_argument(
        "--bootstrap-port", type=int, metavar="N", help="port of a prefill worker's KV connector"
    )
    adding.add_argument(
        "--tls-name", metavar="NAME", help="name on its certificate when that is not its host"
    )
    adding.add_argument("--wait", action="store_true", help="until it is healthy")
    _add_timeout(adding, f"wait, and at most that long; default with --wait: {ADD_WAIT_S:g}")

    removing = add("remove", "Remove a worker at once; requests under way on it finish.")
    removing.add_argument("url", metavar="URL", help="as it is listed")

    draining = add("drain", "Give a worker no new requests, and remove it when it is idle.")
    draining.add_argument("url", metavar="URL", help="as it is listed")
    _add_timeout(draining, "remove it after that all the same; default: as the router is set")


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``top``."""
    _add_router_arguments(parser)
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="between two readings; default: 1",
    )
    parser.add_argument("--once", action="store_true", help="show the workers once and end")


def _add_router_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router-url",
        default=DEFAULT_URL,
        metavar="URL",
        help=f"the router; default: {DEFAULT_URL}",
    )
    parser.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="its admin API key; better set VLLM_EXTPROC_ADMIN_API_KEY: a process list shows flags",
    )
    parser.add_argument(
        "--router-ca-file",
        default="",
        metavar="FILE",
        help="certificates (PEM) that vouch for an https router; default: those of the system",
    )
    parser.add_argument(
        "--router-tls-insecure",
        action="store_true",
        help="take any certificate of an https router; for tests",
    )
    parser.add_argument(
        "--router-client-cert",
        default="",
        metavar="FILE",
        help="certificate (PEM) to show to a router that asks its clients for one",
    )
    parser.add_argument(
        "--router-client-key",
        default="",
        metavar="FILE",
        help="its private key (PEM); default: it stands in the same file",
    )


def _add_timeout(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help=meaning)


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _number(text: str) -> float:
    return _bounded(text, -MAX_SECONDS, MAX_SECONDS, "a number")


def _seconds(text: str) -> float:
    return _bounded(text, 0, MAX_SECONDS, "seconds")


def _interval(text: str) -> float:
    return _bounded(text, MIN_INTERVAL_S, MAX_SECONDS, "seconds")


def _bounded(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:  # not for NaN either
        raise argparse.ArgumentTypeError(
            f"expected {what} from {least:.10g} to {most:.10g}, got {text!r}"
        )
    return value
