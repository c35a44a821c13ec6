"""The command line. Flags are the fields of ``config.Config``; each command is one function."""

from __future__ import annotations

import argparse
import gc
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from extproc import __version__, log, router_arguments
from extproc.config import Config, load, policy_default
from extproc.config_file import flag_name, placed_later
from extproc.errors import ConfigError
from extproc.kubernetes_options import KubernetesOptions
from extproc.pd_options import PdOptions
from extproc.resilience_options import ResilienceOptions
from extproc.security_options import SecurityOptions
from extproc.sim import command as sim
from policies import registry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    registry.load_builtin()
    parsed = build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except ConfigError as error:
        given = vars(parsed)
        path = given.get("config") or given.get("config_file")
        sys.stderr.write(f"vllm-extproc: {placed_later(str(error), path, given)}\n")
        return 1
    except BrokenPipeError:
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="vllm-extproc", description="An Envoy-native router for fleets of vLLM workers."
    )
    parser.add_argument("--version", action="version", version=f"vllm-extproc {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> Any:
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary,
        )
        sub.set_defaults(command=run)
        return sub

    launch = add("launch", _launch, "Run the whole router: Envoy and the service.")
    add_config_flags(launch)

    serve = add("serve", _serve, "Run the service alone, beside an Envoy of your own.")
    add_config_flags(serve)

    envoy_config = add("envoy-config", _envoy_config, "Print the configuration for your own Envoy.")
    add_config_flags(envoy_config)
    envoy_config.add_argument(
        "--static",
        action="store_true",
        help="everything in one file (listener, routes, workers) instead of a bootstrap that gets"
        " it from the service",
    )
    check = add("check", _check, "Check a configuration without starting anything.")
    check.add_argument("config_file", nargs="?", type=Path, metavar="CONFIG", help="YAML file")
    add_config_flags(check)

    drain = add("drain", _drain, "Drain the Envoy beside `serve` before both are stopped.")
    drain.add_argument(
        "--files",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory, shared with Envoy's container, in which both say that they are asked to stop",
    )
    drain.add_argument(
        "--service-pid",
        type=int,
        metavar="PID",
        help="process of `serve`, whose /readiness is to fail first (in its container: 1)",
    )
    add_config_flags(drain)

    sim_worker = add("sim-worker", _sim_worker, "Run a simulated vLLM worker.")
    sim.add_arguments(sim_worker)

    demo = add("demo", _demo, "Try the router with simulated workers.")
    demo.add_argument(
        "--workers", type=int, default=2, help="simulated workers to start, of either role"
    )
    demo.add_argument("--serve", action="store_true", help="send nothing; serve until Ctrl-C")
    add_config_flags(demo)

    workers = add(
        "workers", _workers, "Show, add, remove or drain the workers of a running router."
    )
    router_arguments.add_workers_arguments(workers)

    top = add("top", _top, "Watch the workers of a running router.")
    router_arguments.add_top_arguments(top)
    return parser


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and one flag per configuration field."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with the same options; flags win"
    )
    hints = typing.get_type_hints(Config, include_extras=True)
    for title, fields in option_groups().items():
        group = parser.add_argument_group(title)
        for field in fields:
            options, description = _flag_options(hints[field.name])
            shown = shown_default(field)
            group.add_argument(
                *_flag_names(field.name),
                dest=field.name,
                default=argparse.SUPPRESS,
                help=f"{description} Default: {shown}.".replace("%", "%%"),
                **options,
            )


def option_groups() -> dict[str, list[msgspec.structs.FieldInfo]]:
    """Return the fields of the configuration by the title under which people look for them."""
    found: dict[str, list[msgspec.structs.FieldInfo]] = {
        "router and workers": [],
        "retries, circuit breakers, limits and queues": [],
        "who may ask, browsers, TLS": [],
        "prefill/decode disaggregation": [],
        "discovery in Kubernetes": [],
    }
    titles = list(found)
    for field in msgspec.structs.fields(Config):
        if field.name in ResilienceOptions.__struct_fields__:
            found[titles[1]].append(field)
        elif field.name in SecurityOptions.__struct_fields__:
            found[titles[2]].append(field)
        elif field.name in (*PdOptions.__struct_fields__, "prefill_policy", "decode_policy"):
            found[titles[3]].append(field)
        elif field.name in KubernetesOptions.__struct_fields__:
            found[titles[4]].append(field)
        else:
            found[titles[0]].append(field)
    return found


def config_from(parsed: argparse.Namespace) -> Config:
    """Build the configuration of a command line."""
    given = vars(parsed)
    fields = {field.name for field in msgspec.structs.fields(Config)}
    flags = {name: value for name, value in given.items() if name in fields}
    return load(given.get("config") or given.get("config_file"), flags)


def _flag_names(field: str) -> list[str]:
    names = [flag_name(field)]
    # These read better in the singular when given once, or several times.
    singular = {
        "session_headers": "--session-header",
        "worker_weights": "--worker-weight",
        "model_aliases": "--model-alias",
    }
    if field in singular:
        names.insert(0, singular[field])
    return names


def _flag_options(annotated: Any) -> tuple[dict[str, Any], str]:
    """Return argparse options and the description of a field."""
    hint, description = annotated, ""
    while typing.get_origin(hint) is typing.Annotated:
        for meta in hint.__metadata__:
            description = description or meta.description or ""
        hint = hint.__origin__
    if types.NoneType in typing.get_args(hint):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        return _flag_options(hint)[0], description
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}, description
    if typing.get_origin(hint) is tuple:
        return {"nargs": "*", "action": "extend", "metavar": "TEXT"}, description
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": list(typing.get_args(hint))}, description
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"metavar": "NAME"}, description
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}, description


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """Return the default of a configuration field as people read it."""
    value = policy_default(field.name) if field.default is None else field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple) and value:
        return ", ".join(value)
    return str(value) if value or value == 0 else "none"


def _launch(parsed: argparse.Namespace) -> int:
    from extproc import launcher

    config = config_from(parsed)
    log.configure(config.log_level, config.log_dir, "launcher")
    return launcher.run(config, lambda: config_from(parsed), parsed.config)


def _serve(parsed: argparse.Namespace) -> int:
    # Looking for garbage among what is imported takes a tenth of the time that the start takes.
    gc.disable()
    from extproc import main as service

    gc.enable()

    config = config_from(parsed)
    log.configure(config.log_level, config.log_dir, "service")
    return service.run(config, lambda: config_from(parsed), parsed.config)


def _envoy_config(parsed: argparse.Namespace) -> int:
    from extproc.check import render_envoy_config

    config = config_from(parsed)
    sys.stdout.write(render_envoy_config(config, static=parsed.static))
    if parsed.static and any(
        (config.api_key, config.api_keys_file, config.htpasswd_file, config.worker_api_key)
    ):
        sys.stderr.write(
            "vllm-extproc: the output holds keys in plain text; keep it where only Envoy can read it\n"
        )
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from extproc.check import check

    if parsed.config is not None and parsed.config_file is not None:
        raise ConfigError("give the file once: as CONFIG or with --config")
    check(config_from(parsed))
    return 0


def _drain(parsed: argparse.Namespace) -> int:
    from extproc import drain_command

    config = config_from(parsed)
    log.configure(config.log_level, config.log_dir, "drain")
    return drain_command.run(config, parsed.files, parsed.service_pid)


def _sim_worker(parsed: argparse.Namespace) -> int:
    return sim.run(parsed)


def _demo(parsed: argparse.Namespace) -> int:
    from extproc import demo

    config = config_from(parsed)
    if "log_level" not in parsed:  # the demo's own output is what a person wants to see
        config = msgspec.structs.replace(config, log_level="warning")
    if "shutdown_delay_s" not in parsed:  # no load balancer watches a demo
        config = msgspec.structs.replace(config, shutdown_delay_s=0)
    log.configure(config.log_level, config.log_dir, "launcher")
    return demo.run(config, workers=parsed.workers, serve=parsed.serve)


def _workers(parsed: argparse.Namespace) -> int:
    from extproc import workers_command

    return workers_command.run(parsed)


def _top(parsed: argparse.Namespace) -> int:
    from extproc import top

    return top.run(parsed)
