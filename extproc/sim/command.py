"""``vllm-extproc sim-worker``: one simulated worker as a process."""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys

import structlog

from extproc.sim.config import SimConfig
from extproc.sim.faults import Faults
from extproc.sim.kv_config import Connector, KvConfig, Role, TransferMode
from extproc.sim.step_model import HARDWARE

CRASHED = 70
"""Exit status after ``--crash-on-request``; EX_SOFTWARE of sysexits.h."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; each default is that of ``SimConfig`` or ``Faults``."""
    config, faults = SimConfig(), Faults()
    parser.add_argument("--host", default=config.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="TCP port; 0 takes a free one")
    parser.add_argument("--name", help="said in every answer (default: sim-<port>)")
    parser.add_argument(
        "--model",
        nargs="+",
        action="extend",
        metavar="MODEL",
        help="served names (default: sim-model)",
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME[=PATH]",
        help="LoRA adapters on the first model",
    )
    parser.add_argument("--root-path", default=config.root_path, help="path before every route")
    parser.add_argument("--ssl-certfile", metavar="FILE", help="PEM certificate: serve https")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="its private key")
    parser.add_argument("--api-key", metavar="KEY", help="bearer token that the API needs")
    parser.add_argument(
        "--startup-delay",
        type=float,
        default=config.startup_delay_s,
        metavar="SECONDS",
        help="time during which health and inference answer 503",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=config.data_parallel_size,
        metavar="N",
        help="ranks, each with an engine of its own",
    )
    parser.add_argument(
        "--data-parallel-start-rank",
        type=int,
        default=config.data_parallel_start_rank,
        metavar="R",
        help="number of the first rank",
    )
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default=config.hardware)
    parser.add_argument(
        "--speed", type=float, default=config.speed, help="10 is ten times faster, 0 does not wait"
    )
    parser.add_argument(
        "--kv-blocks", type=int, help="KV blocks of 16 tokens (default: by hardware)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=config.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, default=config.max_num_batched_tokens)
    parser.add_argument("--max-model-len", type=int, default=config.max_model_len)
    parser.add_argument(
        "--itl-ms", type=float, help="fixed time between tokens instead of the model's"
    )
    parser.add_argument("--ttft-ms", type=float, help="fixed time to the first token")
    parser.add_argument(
        "--record", type=int, default=config.record, help="requests to keep; 0 for none"
    )
    parser.add_argument("--fail-first-n", type=int, default=faults.fail_first_n, metavar="N")
    parser.add_argument("--status-code", type=int, default=faults.status_code, metavar="C")
    parser.add_argument(
        "--retry-after", type=int, metavar="SECONDS", help="said in Retry-After of failed requests"
    )
    parser.add_argument(
        "--random-fail-rate", type=float, default=faults.random_fail_rate, metavar="R"
    )
    parser.add_argument(
        "--crash-on-request", type=int, default=faults.crash_on_request, metavar="N"
    )
    parser.add_argument(
        "--stall-after", type=int, metavar="K", help="tokens after which a stream stalls"
    )
    parser.add_argument(
        "--reset-after", type=int, metavar="K", help="tokens after which it is reset"
    )
    parser.add_argument(
        "--slowdown",
        type=float,
        default=faults.slowdown,
        metavar="F",
        help="take F times as long for each token",
    )
    parser.add_argument(
        "--health-status", type=int, default=faults.health_status, metavar="C", help="of /health"
    )
    _add_kv_arguments(parser)
    parser.add_argument("--seed", type=int, default=config.seed, help="of the random faults")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning"
    )


def _add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of prefill and decode; each default is that of ``KvConfig``."""
    kv = KvConfig()
    parser.add_argument(
        "--role",
        choices=[*Role],
        default=kv.role,
        help="half of a request that is computed here; both also takes whole ones",
    )
    parser.add_argument("--kv-connector", choices=[*Connector], default=kv.connector)
    parser.add_argument(
        "--kv-transfer-mode",
        choices=[*TransferMode],
        default=kv.transfer_mode,
        help="of nixl: with push, decode may come before prefill is done",
    )
    parser.add_argument(
        "--kv-transfer-mb-per-s",
        type=float,
        default=kv.transfer_mb_per_s,
        metavar="MB",
        help="speed of a transfer; 0 takes no time",
    )
    parser.add_argument(
        "--kv-bytes-per-token", type=int, default=kv.bytes_per_token, metavar="BYTES"
    )
    parser.add_argument(
        "--kv-hold-s",
        type=float,
        default=kv.hold_s,
        metavar="SECONDS",
        help="how long prefill keeps blocks that nobody pulls",
    )
    parser.add_argument(
        "--kv-host",
        default=kv.host,
        help="address of the side channel, here and for the other workers",
    )
    parser.add_argument(
        "--kv-port", type=int, default=kv.port, help="of the side channel; 0 takes a free port"
    )
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=kv.bootstrap_port,
        help="of mooncake; 0 takes a free port",
    )
    parser.add_argument(
        "--zmq-address",
        metavar="HOST:PORT",
        help="name of this worker in request ids of nccl (default: the side channel)",
    )
    parser.add_argument(
        "--discovery-address",
        metavar="HOST:PORT",
        help="router to ping with nccl; needs pyzmq",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    import uvloop

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[args.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        config = build_config(args)
    except ValueError as error:
        print(f"sim-worker: {error}", file=sys.stderr)
        return 1
    _allow_many_connections()
    return uvloop.run(_serve(config))


def build_config(args: argparse.Namespace) -> SimConfig:
    """Return the settings that *args* ask for; ValueError says which one is impossible."""
    return SimConfig(
        name=args.name or f"sim-{args.port}",
        models=tuple(args.model or SimConfig().models),
        lora_modules=tuple(args.lora_modules or ()),
        host=args.host,
        port=args.port,
        root_path=args.root_path,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        api_key=args.api_key,
        startup_delay_s=args.startup_delay,
        data_parallel_size=args.data_parallel_size,
        data_parallel_start_rank=args.data_parallel_start_rank,
        hardware=args.hardware,
        speed=args.speed,
        kv_blocks=args.kv_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        itl_ms=args.itl_ms,
        ttft_ms=args.ttft_ms,
        record=args.record,
        seed=args.seed,
        kv=KvConfig(
            role=args.role,
            connector=args.kv_connector,
            transfer_mode=args.kv_transfer_mode,
            transfer_mb_per_s=args.kv_transfer_mb_per_s,
            bytes_per_token=args.kv_bytes_per_token,
            hold_s=args.kv_hold_s,
            host=args.kv_host,
            port=args.kv_port,
            bootstrap_port=args.bootstrap_port,
            zmq_address=args.zmq_address,
            discovery_address=args.discovery_address,
        ),
        faults=Faults(
            fail_first_n=args.fail_first_n,
            status_code=args.status_code,
            retry_after_s=args.retry_after,
            random_fail_rate=args.random_fail_rate,
            crash_on_request=args.crash_on_request,
            stall_after=args.stall_after,
            reset_after=args.reset_after,
            slowdown=args.slowdown,
            health_status=args.health_status,
        ),
    )


def _allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one; each open stream takes a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(config: SimConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    from extproc.sim.worker import SimWorker

    worker = SimWorker(config)
    try:
        await worker.start()
    except OSError as error:
        print(
            f"sim-worker: cannot listen on {config.host}:{config.port}: {os.strerror(error.errno) if error.errno else error}",
            file=sys.stderr,
        )
        return 1
    except ValueError as error:
        print(f"sim-worker: {error}", file=sys.stderr)
        return 1
    print(f"sim-worker {config.name} ready on {worker.url}", flush=True)
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(worker.crashed.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await worker.stop()
    return CRASHED if worker.crashed.is_set() else 0
