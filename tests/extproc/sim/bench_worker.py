"""What one simulated worker process bears: ``python tests/extproc/sim/bench_worker.py``.

Starts the worker as a process of its own (``--speed 0``) and loads it from this one: first closed-loop chat
requests without streaming, then many streams held open at a fixed pace. Prints rates and the worker's CPU use.
"""

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

COMMAND = (
    "import argparse, sys; from extproc.sim.command import add_arguments, run; "
    "parser = argparse.ArgumentParser(); add_arguments(parser); sys.exit(run(parser.parse_args()))"
)
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"


def start(*flags):
    """Start a worker; return the process and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--port", "0", *flags], stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    return process, int(re.search(r":(\d+)$", line.strip())[1])


def cpu_s(pid):
    """Return the CPU seconds that process *pid* has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid):
    """Return the resident memory of process *pid*."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def message(*, tokens, stream):
    """Return one chat request as bytes."""
    body = (
        '{"model":"sim-model","messages":[{"role":"user","content":"hi there, how are you"}],'
        f'"max_tokens":{tokens},"stream":{str(stream).lower()}}}'
    )
    return f"{HEAD}content-length: {len(body)}\r\n\r\n{body}".encode()


async def plain_requests(port, *, connections, duration_s):
    """Return how many requests were answered."""
    end = time.monotonic() + duration_s
    request = message(tokens=16, stream=False)

    async def client():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        done = 0
        while time.monotonic() < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
            done += 1
        writer.close()
        return done

    return sum(await asyncio.gather(*(client() for _ in range(connections))))


async def open_streams(port, *, streams, tokens):
    """Return the events of each stream, all of them open at once."""
    request = message(tokens=tokens, stream=True)

    async def client(index):
        await asyncio.sleep(index * 0.0005)  # spread over the interval between tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        events = 0
        while True:
            data = await reader.read(65536)
            events += data.count(b"data: ")
            if b"[DONE]" in data or not data:
                writer.close()
                return events

    return await asyncio.gather(*(client(index) for index in range(streams)))


def main():
    """Run both loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--duration-s", type=float, default=5)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))

    process, port = start("--speed", "0")
    before = cpu_s(process.pid)
    done = asyncio.run(
        plain_requests(port, connections=args.connections, duration_s=args.duration_s)
    )
    used = cpu_s(process.pid) - before
    print(
        f"plain: {done / args.duration_s:.0f} requests/s, worker CPU {used / done * 1e6:.0f} us a request"
    )
    process.terminate()
    process.wait(10)

    process, port = start("--itl-ms", "100", "--max-num-seqs", "8192")
    began = time.monotonic()
    events = asyncio.run(open_streams(port, streams=args.streams, tokens=args.tokens))
    took = time.monotonic() - began
    print(
        f"streams: {args.streams} open, {sum(events) / took:.0f} events/s, "
        f"{sum(n != args.tokens + 2 for n in events)} incomplete, {took:.1f} s for {args.tokens} tokens every 100 ms, "
        f"worker CPU {cpu_s(process.pid) / took:.2f} cores, {rss_mib(process.pid):.0f} MiB"
    )
    process.terminate()
    process.wait(10)


if __name__ == "__main__":
    main()
