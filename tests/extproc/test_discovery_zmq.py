"""Workers that announce themselves, through real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from extproc.address import Address
from extproc.discovery import announcements
from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec, WorkerType
from extproc.discovery.zmq import watch
from extproc.errors import ConfigError

pytestmark = pytest.mark.slow

LIMIT_S = 10.0
SHORT_S = 1.0
_opened: list[zmq.Socket[bytes]] = []
ROLES = {"P": WorkerType.PREFILL, "D": WorkerType.DECODE}


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        for opened in _opened:
            opened.close()
        _opened.clear()


SHORT = pytest.mark.usefixtures("short")


@pytest.fixture
def short(monkeypatch):
    """Let workers be gone sooner."""
    monkeypatch.setattr(announcements, "EXPIRY_S", SHORT_S)


class Dealer:
    """One worker's socket."""

    def __init__(self, context, address, number=1, identity=None, hwm=1000):
        self.http = f"10.0.1.{number}:8000"
        self.key = f"http://{self.http}"
        self.zmq = f"10.0.1.{number}:14579"
        self.socket = context.socket(zmq.DEALER)
        _opened.append(self.socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.setsockopt(zmq.IDENTITY, identity or self.zmq.encode())
        self.socket.connect(f"tcp://{address}")

    def ping(self, role="P"):
        message = {"type": role, "http_address": self.http, "zmq_address": self.zmq}
        self.send(msgspec.msgpack.encode(message))

    def send(self, *parts):
        self.socket.send_multipart(parts, zmq.NOBLOCK)


class Followed:
    """What the updates say."""

    def __init__(self):
        self.workers: dict[str, WorkerSpec] = {}
        self.updates: list[tuple[float, object]] = []
        self.refused = 0
        self.complaints: list[tuple[int, str]] = []

    @property
    def roles(self):
        return {key: spec.worker_type for key, spec in self.workers.items()}

    def take(self, update):
        self.updates.append((time.monotonic(), update))
        match update:
            case Add(spec):
                self.workers[spec.key] = spec
            case Remove(key):
                del self.workers[key]
            case Reset(specs):
                self.workers = {spec.key: spec for spec in specs}

    def count(self, number):
        self.refused += number

    def complain(self, number, reason):
        self.complaints.append((number, reason))

    async def until(self, condition, limit_s=LIMIT_S):
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, (len(self.workers), self.refused, self.complaints)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(address, known=()):
    """Follow meanwhile; afterwards the address is free again."""
    followed = Followed()

    async def follow():
        async for update in watch(
            address,
            known=lambda: known,
            count_refused=followed.count,
            report=followed.complain,
        ):
            followed.take(update)

    task = asyncio.ensure_future(follow())
    try:
        await asyncio.sleep(0.05)
        yield followed
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))


async def test_worker_comes_and_goes(context, address):
    """It is there at once, and gone exactly five seconds after its last message; nobody answers it."""
    async with following(address) as followed:
        dealer = Dealer(context, address)
        dealer.ping()
        await followed.until(lambda: followed.workers)
        await asyncio.sleep(0.7)
        last = time.monotonic()
        dealer.ping()
        await followed.until(lambda: not followed.workers)

        (_, added), (gone_at, removed) = followed.updates
        assert (added.worker.key, removed) == (dealer.key, Remove(dealer.key))
        assert gone_at - last == pytest.approx(5.0, abs=0.1)
        assert not dealer.socket.poll(0)


@SHORT
async def test_a_hundred_workers(context, address):
    """They join, change roles, send garbage, send too much, and leave."""
    rng = random.Random(1)
    dealers = [Dealer(context, address, number) for number in range(100)]
    roles = {dealer.key: "PD"[number % 2] for number, dealer in enumerate(dealers)}
    silent = set()
    stop = asyncio.Event()

    async def ping():
        while not stop.is_set():
            for dealer in dealers:
                if dealer not in silent:
                    dealer.ping(roles[dealer.key])
            await asyncio.sleep(0.2)

    def there():
        return {d.key: ROLES[roles[d.key]] for d in dealers if d not in silent}

    async with following(address) as followed, asyncio.TaskGroup() as tasks:
        tasks.create_task(ping())
        await followed.until(lambda: followed.roles == there())

        for dealer in rng.sample(dealers, 30):
            roles[dealer.key] = "P" if roles[dealer.key] == "D" else "D"
        await followed.until(lambda: followed.roles == there(), 1.0)

        for dealer in rng.sample(dealers, 30):
            dealer.send(rng.randbytes(rng.randrange(200)))
            dealer.send(b"a", b"b", *[b"c"] * 50)
        await followed.until(lambda: followed.refused == 60)
        for dealer in rng.sample(dealers, 30):
            dealer.send(b"x" * 5000)  # which ends its connection
            dealer.send(b"\x00" * 2**20)
        await asyncio.sleep(SHORT_S / 2)
        assert followed.roles == there()

        silent.update(rng.sample(dealers, 40))
        await followed.until(lambda: followed.roles == there(), SHORT_S + 0.5)
        await asyncio.sleep(SHORT_S * 1.5)
        assert followed.roles == there()

        silent.clear()
        await followed.until(lambda: followed.roles == there(), 1.0)
        stop.set()
    assert len(followed.complaints) == 1
    assert followed.refused == 60


@SHORT
async def test_those_of_an_earlier_run_have_their_time(context, address):
    """Who does not speak any more is gone; who does was there all the time."""
    dealer = Dealer(context, address)
    said = announcements.Announcements()
    message = {"type": "P", "http_address": "10.0.1.1:8000", "zmq_address": dealer.zmq}
    here = said.take([b"", msgspec.msgpack.encode(message)], 0)
    gone = said.take([b"", msgspec.msgpack.encode({**message, "http_address": "10.0.1.2:1"})], 0)
    async with following(address, [here, gone]) as followed:
        followed.workers = {here.key: here, gone.key: gone}
        for _ in range(5):
            dealer.ping()
            await asyncio.sleep(0.25)

        assert [update for _, update in followed.updates] == [Remove(gone.key)]


@SHORT
async def test_worker_that_comes_back_takes_over(context, address):
    """Its old connection may look alive, and has the same identity."""
    async with following(address) as followed:
        old = Dealer(context, address)
        old.ping()
        await followed.until(lambda: followed.workers)
        new = Dealer(context, address, 2, identity=old.zmq.encode())
        new.ping()
        await followed.until(lambda: new.key in followed.workers)


@SHORT
async def test_flood_hides_nobody_and_takes_no_memory(context, address):
    """Of one that sends as fast as it can only its share is read."""
    stop = threading.Event()

    def flood():
        with zmq.Context() as own:
            loud = [Dealer(own, address, number, hwm=10) for number in (200, 201)]
            while not stop.is_set():
                for dealer in loud:
                    with contextlib.suppress(zmq.Again):
                        dealer.send(b"x" * 4000)
            for dealer in loud:
                dealer.socket.close()

    thread = threading.Thread(target=flood)
    async with following(address) as followed:
        dealer = Dealer(context, address)
        dealer.ping()
        await followed.until(lambda: followed.workers)
        before = rss_bytes()
        thread.start()
        try:
            for _ in range(20):
                dealer.ping()
                await asyncio.sleep(0.2)
            assert len(followed.updates) == 1
            assert followed.refused > 1000
            assert rss_bytes() - before < 32 * 2**20
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
        await followed.until(lambda: not followed.workers, 3 * SHORT_S)


async def test_senders_wait_while_nobody_reads(context, address):
    """What is not read yet is bounded."""
    async with following(address) as followed:
        dealer = Dealer(context, address, hwm=1)
        dealer.ping()
        await followed.until(lambda: followed.workers)
        sent, deadline = 0, time.monotonic() + 2
        while time.monotonic() < deadline:  # the event loop does not get its turn
            try:
                dealer.send(b"x" * 4096)
                sent += 1
            except zmq.Again:
                time.sleep(0.001)  # noqa: ASYNC251
        assert sent * 4096 < 8 * 2**20
        await followed.until(lambda: followed.refused == sent)


@SHORT
async def test_pause_of_the_service_removes_nobody(address):
    """What came meanwhile is read before anybody is called gone."""
    stop = threading.Event()

    def ping():
        with zmq.Context() as own:
            dealers = [Dealer(own, address, number) for number in range(20)]
            while not stop.is_set():
                for dealer in dealers:
                    dealer.ping()
                time.sleep(0.2)
            for dealer in dealers:
                dealer.socket.close()

    thread = threading.Thread(target=ping)
    async with following(address) as followed:
        thread.start()
        try:
            await followed.until(lambda: len(followed.workers) == 20)
            updates = len(followed.updates)
            time.sleep(3 * SHORT_S)  # noqa: ASYNC251
            await asyncio.sleep(0.3)
            assert len(followed.updates) == updates
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)


async def test_address_in_use(address):
    """The flag is named."""
    with socket.socket() as other:
        other.bind((address.host, address.port))
        other.listen()
        with pytest.raises(ConfigError) as raised:
            await anext(watch(address, count_refused=int, report=print))

    text = f"cannot listen on {address} (--vllm-discovery-address): Address already in use"
    assert str(raised.value) == text


async def test_ipv6(context):
    """In brackets, as everywhere."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            address = Address("::1", probe.getsockname()[1])
    except OSError:
        pytest.skip("there is no ::1")
    task = asyncio.ensure_future(anext(watch(address, count_refused=int, report=print)))
    await asyncio.sleep(0.05)
    dealer = context.socket(zmq.DEALER)
    _opened.append(dealer)
    dealer.setsockopt(zmq.IPV6, 1)
    dealer.connect(f"tcp://{address}")
    message = {"type": "D", "http_address": "[::1]:1", "zmq_address": "[::1]:2"}
    dealer.send(msgspec.msgpack.encode(message))

    update = await asyncio.wait_for(task, LIMIT_S)

    assert (update.worker.key, update.worker.zmq_address) == ("http://[::1]:1", "[::1]:2")


def rss_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
