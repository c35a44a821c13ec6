"""What must hold of the router in a Kubernetes cluster, whatever kind of cluster it is.

Each scenario speaks to the cluster through kubectl, helm and HTTP to a node's address only, and begins with a
release that is installed and settled. It returns what it saw; ``problems`` says what should not have been.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence

import openai

from tests.cluster.cluster import (
    CHART,
    ENGINE_IMAGE,
    NAME,
    NAMESPACE,
    RELEASE,
    Change,
    Cluster,
    name_of,
    until,
)
from tests.cluster.killer import Killer
from tests.cluster.load import MODEL, Kind, Load, Result

SIMS = f"{NAME}-sim-worker"
FIRST_REQUEST_S = 1.0
"""From a Pod being ready to the first request on it."""

LAST_REQUEST_S = 0.1
"""From the deletion of a Pod to the last request that is begun on it."""

STREAMS = Kind(clients=50, tokens=60)
"""Fifty streams of three seconds each, all the time."""

SHORT = Kind(clients=6, tokens=1, stream=False)
"""Answers of some 30 ms: so finely a change is seen."""

STRANGERS = Kind(clients=4, tokens=10, keep_alive=False)
"""Clients with a connection for each request."""

DELAY_S, GRACE_S = 3, 8
"""``shutdown`` of values.yaml."""

GRACE_EARLY_S, GRACE_LATE_S = 0.5, 4.0
"""How much sooner and later than that streams may be cut: a watch and the hooks' processes take time."""


@dataclasses.dataclass
class Outcome:
    """What a scenario saw."""

    requests: int = 0
    failed: int = 0
    cut: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)

    def count(self, load: Load) -> None:
        """Add the requests of *load*."""
        self.requests += len(load.results)
        self.failed += sum(result.failed for result in load.results)
        self.cut += sum(result.cut for result in load.results)

    def check(self, holds: bool, problem: str) -> None:
        """Note *problem* unless it *holds*."""
        if not holds:
            self.problems.append(problem)

    def check_none_failed(self, load: Load) -> None:
        """Every request must have been answered whole."""
        wrong = [result for result in load.results if not result.complete]
        errors = sorted({result.error[:160] for result in wrong})
        self.check(not wrong, f"{len(wrong)} requests failed or were cut: {'; '.join(errors[:3])}")


Scenario = Callable[[Cluster], Awaitable[Outcome]]


async def chat(cluster: Cluster) -> Outcome:
    """Ask through the Service with the OpenAI SDK: whole answers and streams."""
    outcome = Outcome()
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    async with client:
        models = [model.id async for model in client.models.list()]
        outcome.check(models == [MODEL], f"the models are {models}")
        for number in range(10):
            question = f"What is {number}?"
            whole = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question}],
                max_tokens=20,
            )
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question}],
                max_tokens=20,
                stream=True,
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            outcome.requests += 2
            text = whole.choices[0].message.content or ""
            outcome.check(bool(text), "an answer is empty")
            outcome.check(len(parts) > 1 and bool("".join(parts)), f"a stream is {parts}")
    return outcome


async def scale(cluster: Cluster) -> Outcome:
    """Let workers come and go under load; new ones are used at once, and ones that go no more."""
    outcome = Outcome()
    load = Load(cluster.url, [dataclasses.replace(STREAMS, clients=10), SHORT])
    async with cluster.watching() as changes, load.running():
        await asyncio.sleep(2)
        await cluster.scale(SIMS, 4)
        await cluster.settle()
        await asyncio.sleep(2)
        await cluster.scale(SIMS, 2)
        await cluster.settle()
        await asyncio.sleep(1)
    outcome.count(load)
    outcome.check_none_failed(load)
    ready = {c.name: c.at for c in reversed(changes) if c.ready and c.kind == "MODIFIED"}
    came = [name for name in ready if SIMS in name]
    outcome.check(len(came) == 2, f"{len(came)} workers became ready instead of 2")
    _first_requests(outcome, load.results, {name: ready[name] for name in came})
    ending = _deletions(changes)
    outcome.check(len(ending) == 2, f"{len(ending)} workers were deleted instead of 2")
    _last_requests(outcome, load.results, ending, "seen by a watch")
    return outcome


async def delete_worker(cluster: Cluster) -> Outcome:
    """Delete a worker's Pod under load, as Kubernetes does it: nobody notices."""
    outcome = Outcome()
    load = Load(cluster.url, [dataclasses.replace(STREAMS, clients=20), SHORT])
    async with load.running():
        await asyncio.sleep(4)
        victim = name_of((await cluster.pods("sim-worker"))[0])
        at = await cluster.delete_pod(victim)
        await cluster.settle()
        await asyncio.sleep(1)
    outcome.count(load)
    outcome.check_none_failed(load)
    outcome.check(
        any(r.worker == victim and r.started < at < r.ended for r in load.results),
        "no stream was under way on it",
    )
    _last_requests(outcome, load.results, {victim: at}, "being asked for")
    return outcome


async def delete_worker_by_force(cluster: Cluster) -> Outcome:
    """Delete a worker's Pod without grace: what was under way there is lost, and nothing else."""
    outcome = Outcome()
    load = Load(cluster.url, [dataclasses.replace(STREAMS, clients=20), SHORT])
    async with load.running():
        await asyncio.sleep(4)
        victim = name_of((await cluster.pods("sim-worker"))[0])
        at = await cluster.delete_pod(victim, grace_s=0)
        await cluster.settle()
        await asyncio.sleep(1)
    outcome.count(load)
    wrong = [result for result in load.results if not result.complete]
    strays = [r for r in wrong if not (r.worker == victim and r.started < at + LAST_REQUEST_S)]
    outcome.check(not strays, f"{len(strays)} failed that were not under way there: {strays[:2]}")
    outcome.check(bool(wrong), "nothing was under way on it")
    _last_requests(outcome, load.results, {victim: at}, "being asked for")
    return outcome


async def roll_workers(cluster: Cluster) -> Outcome:
    """Replace all workers, one after the other, under 50 streams."""
    outcome = Outcome()
    load = Load(cluster.url, [STREAMS])
    before = {name_of(pod) for pod in await cluster.pods("sim-worker")}
    async with load.running():
        await asyncio.sleep(3)
        begun = time.monotonic()
        await cluster.kubectl("rollout", "restart", f"deployment/{SIMS}")
        await cluster.kubectl("rollout", "status", f"deployment/{SIMS}", "--timeout=120s")
        await cluster.settle()
        outcome.notes.append(f"took {time.monotonic() - begun:.0f} s")
        await asyncio.sleep(3)
    outcome.count(load)
    outcome.check_none_failed(load)
    after = {name_of(pod) for pod in await cluster.pods("sim-worker")}
    outcome.check(not before & after, "a worker was not replaced")
    served = {result.worker for result in load.results}
    outcome.check(before | after <= served, f"served by {sorted(served)} only")
    return outcome


async def roll_router(cluster: Cluster) -> Outcome:
    """Replace all Pods of the router: only streams that outlast the grace time are cut."""
    outcome = Outcome()
    short = Load(cluster.url, [dataclasses.replace(STREAMS, clients=20), STRANGERS])
    long = Load(cluster.url, [Kind(clients=6, tokens=800)])
    before = {name_of(pod) for pod in await cluster.pods("router")}
    async with cluster.watching() as changes, short.running(), long.running():
        await asyncio.sleep(2)
        await cluster.kubectl("rollout", "restart", f"deployment/{NAME}")
        await cluster.kubectl("rollout", "status", f"deployment/{NAME}", "--timeout=120s")
        await cluster.settle()
    after = {name_of(pod) for pod in await cluster.pods("router")}
    outcome.check(not before & after, "a Pod of the router was not replaced")
    outcome.count(short)
    outcome.count(long)
    outcome.check_none_failed(short)
    ends = sorted(at for name, at in _deletions(changes).items() if name in before)
    cut = [result for result in long.results if result.cut]
    refused = [result for result in long.results if result.failed]
    outcome.check(not refused, f"{len(refused)} long streams were refused")
    outcome.check(bool(cut), "no stream outlasted the grace time: nothing was tried")
    _cut_after_grace(outcome, cut, ends)
    return outcome


async def kill_service(cluster: Cluster) -> Outcome:
    """Kill the service's container of one Pod: Envoy goes on, Kubernetes starts it anew."""
    outcome = Outcome()
    load = Load(cluster.url, [dataclasses.replace(STREAMS, clients=20), STRANGERS, SHORT])
    pod = (await cluster.pods("router"))[0]
    async with Killer(cluster) as killer, load.running():
        await asyncio.sleep(3)
        killed = await killer.kill(pod, "extproc")
        await _restarted(cluster, name_of(pod), "extproc")
        outcome.notes.append(f"ready again after {time.monotonic() - killed:.1f} s")
        await asyncio.sleep(2)
    outcome.count(load)
    outcome.check_none_failed(load)
    return outcome


async def kill_envoy(cluster: Cluster) -> Outcome:
    """Kill the Envoy container of one Pod: its streams are lost, and only for a moment requests fail."""
    outcome = Outcome()
    load = Load(cluster.url, [dataclasses.replace(STREAMS, clients=20), STRANGERS])
    pod = (await cluster.pods("router"))[0]
    async with Killer(cluster) as killer, load.running():
        await asyncio.sleep(3)
        killed = await killer.kill(pod, "envoy")
        await _restarted(cluster, name_of(pod), "envoy")
        outcome.notes.append(f"ready again after {time.monotonic() - killed:.1f} s")
        await asyncio.sleep(2)
    outcome.count(load)
    wrong = [result for result in load.results if not result.complete]
    outcome.check(bool(wrong), "nothing was under way on it")
    early = [result for result in wrong if result.ended < killed]
    outcome.check(not early, f"{len(early)} failed before anything was killed")
    if wrong:
        last = max(result.ended for result in wrong) - killed
        outcome.notes.append(f"last failure {last:.1f} s after the kill")
        outcome.check(last < ENVOY_AWAY_S, f"requests still failed after {ENVOY_AWAY_S} s")
    return outcome


ENVOY_AWAY_S = 5.0
"""Until when nobody must be sent to a Pod whose Envoy has died."""


async def prefill_and_decode(cluster: Cluster) -> Outcome:
    """Try the P/D preset with its StatefulSets: each request is prefilled on one Pod and decoded on another."""
    outcome = Outcome()
    image, tag = ENGINE_IMAGE.rsplit(":", 1)
    await cluster.install(
        *("--reset-values", "--values", str(CHART / "values-pd.yaml")),
        *("--set", "simWorkers.enabled=false,vllm.enabled=true,vllm.resources=null"),
        *("--set", f"vllm.image.repository={image},vllm.image.tag={tag}"),
        *("--set", f"vllm.image.pullPolicy=Never,vllm.model={MODEL}"),
        *("--set", "vllm.sharedMemory=16Mi"),
    )
    load = Load(cluster.url, [Kind(clients=8, tokens=10), Kind(clients=4, tokens=10, stream=False)])
    async with load.running():
        await asyncio.sleep(8)
    outcome.count(load)
    outcome.check_none_failed(load)
    roles = {role: await cluster.pods(f"vllm-{role}") for role in ("prefill", "decode")}
    done = {}
    for role, pods in roles.items():
        outcome.check(len(pods) == 2, f"{len(pods)} Pods for {role}")
        counts = [await _finished(cluster, name_of(pod)) for pod in pods]
        done[role] = sum(counts)
        outcome.check(all(counts), f"requests of the Pods for {role}: {counts}")
        outcome.notes.append(f"{role} {' + '.join(f'{count:.0f}' for count in counts)}")
    outcome.check(
        done["prefill"] >= outcome.requests and done["decode"] >= outcome.requests,
        f"{outcome.requests} requests, but {done}",
    )
    served = {result.worker for result in load.results}
    decoders = {name_of(pod) for pod in roles["decode"]}
    outcome.check(served == decoders, f"answered by {sorted(served)}")
    return outcome


async def uninstall(cluster: Cluster) -> Outcome:
    """Uninstall the release: nothing of it is left, in its namespace or outside."""
    outcome = Outcome()
    await cluster.helm("uninstall", RELEASE, "--wait", "--timeout", "120s")
    selector = f"app.kubernetes.io/instance={RELEASE}"
    for scope in ("true", "false"):
        kinds = await cluster.kubectl(
            "api-resources", "--verbs=list", f"--namespaced={scope}", "--output=name"
        )
        names = [kind for kind in kinds.split() if not kind.startswith("events")]
        seen = ["--selector", selector, "--output=name", "--ignore-not-found"]

        async def gone(names: Sequence[str] = names, seen: Sequence[str] = seen) -> bool:
            return not (await cluster.kubectl("get", ",".join(names), *seen)).strip()

        try:
            await until(gone, 60, "everything is gone")
        except TimeoutError:
            left = await cluster.kubectl("get", ",".join(names), *seen)
            outcome.problems.append(f"left behind: {left.split()}")
        outcome.notes.append(
            f"{len(names)} kinds {'in the namespace' if scope == 'true' else 'outside'}"
        )
    # What has no labels of ours would not be found by them.
    rest = await cluster.kubectl(
        "get", "pods,services,secrets,configmaps,serviceaccounts,endpoints", "--output=name"
    )
    own = [name for name in rest.split() if RELEASE in name]
    outcome.check(not own, f"left behind: {own}")
    return outcome


ALL: dict[str, Scenario] = {
    "chat through the Service": chat,
    "workers scaled up and down": scale,
    "a worker deleted": delete_worker,
    "a worker deleted by force": delete_worker_by_force,
    "workers rolled, 50 streams": roll_workers,
    "router rolled": roll_router,
    "service container killed": kill_service,
    "Envoy container killed": kill_envoy,
    "prefill and decode": prefill_and_decode,
    "uninstall": uninstall,
}
"""In the order in which they run: each leaves the release as the next one needs it."""


def _deletions(changes: Sequence[Change]) -> dict[str, float]:
    """Return when each Pod was first seen to be about to end, or gone."""
    found: dict[str, float] = {}
    for change in changes:
        if change.kind == "DELETED" or "deletionTimestamp" in change.pod["metadata"]:
            found.setdefault(change.name, change.at)
    return found


def _cut_after_grace(outcome: Outcome, cut: Sequence[Result], ends: Sequence[float]) -> None:
    """Check that every stream was cut when the grace time of a Pod was over, whose end began at one of *ends*."""
    grace_s = DELAY_S + GRACE_S
    times = []
    for result in cut:
        after_s = [result.ended - at for at in ends]
        own = [s for s in after_s if -GRACE_EARLY_S <= s - grace_s <= GRACE_LATE_S]
        outcome.check(
            bool(own), f"a stream was cut {after_s} s after the ends of Pods, not after {grace_s} s"
        )
        times += own[:1]
    if times:
        outcome.notes.append(
            f"streams of 40 s cut {min(times):.1f} to {max(times):.1f} s after their Pod's end began"
            f" (delay and grace: {grace_s} s)"
        )


def _first_requests(outcome: Outcome, results: Sequence[Result], ready: dict[str, float]) -> None:
    """Check how long each Pod was ready before the first request on it began."""
    took = []
    for name, at in ready.items():
        begun = [result.started for result in results if result.worker == name]
        outcome.check(bool(begun), f"{name} was never used")
        took += [min(begun) - at] if begun else []
    if took:
        outcome.notes.append(f"ready to first request {_milliseconds(took)}")
        outcome.check(max(took) < FIRST_REQUEST_S, "the first request came too late")


def _last_requests(
    outcome: Outcome, results: Sequence[Result], deleted: dict[str, float], since: str
) -> None:
    """Check how long after its deletion the last request on each Pod began."""
    took = []
    for name, at in deleted.items():
        begun = [result.started for result in results if result.worker == name]
        outcome.check(bool(begun), f"{name} was never used")
        others = [result for result in results if result.started > at and result.worker != name]
        outcome.check(len(others) > 20, "too few requests afterwards to tell")
        took += [max(begun) - at] if begun else []
    if took:
        outcome.notes.append(f"deletion {since} to last request {_milliseconds(took)}")
        outcome.check(max(took) < LAST_REQUEST_S, "the last request came too late")


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1000 * s:.0f} ms" for s in sorted(seconds))


async def _restarted(cluster: Cluster, pod: str, container: str) -> None:
    """Wait until Kubernetes has seen the container's end and has it ready again."""

    async def ready() -> bool:
        found = await cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
        (status,) = [s for s in found["status"]["containerStatuses"] if s["name"] == container]
        return bool(status["restartCount"]) and bool(status["ready"])

    await until(ready, 60, f"{container} is restarted")
    await cluster.settle()


async def _finished(cluster: Cluster, pod: str) -> float:
    """Return how many requests a worker says that it has finished."""
    metrics = await cluster.kubectl(
        *("exec", pod, "--", "python3", "-c"),
        "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())",
    )
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
