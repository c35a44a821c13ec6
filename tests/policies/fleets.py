"""Workers and requests that several tests of policies make."""

from __future__ import annotations

import json
import random

from extproc.openai import parse_content
from policies.base import MembershipObserver, Observer, Policy, Request, Worker


def fleet(count, *, first=0, weights=None, per_host=1):
    """Return *count* idle workers; *weights* in order of joining, *per_host* ports of one address."""
    return tuple(
        Worker(
            url=f"http://10.0.{order // per_host >> 8}.{order // per_host & 255}:{8000 + order % per_host}",
            endpoint=f"10.0.{order // per_host >> 8}.{order // per_host & 255}:{8000 + order % per_host}",
            order=order,
            weight=1.0 if weights is None else weights[order - first],
        )
        for order in range(first, first + count)
    )


def completion(prompt, *, model="m", headers=None, **fields):
    """Return a completion request as the exchange hands it over: *prompt* text, ids or a list."""
    return post({"model": model, "prompt": prompt, **fields}, headers)


def chat(*messages, model="m", headers=None, **fields):
    """Return a chat request; *messages* are (role, content)."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return post({"model": model, "messages": listed, **fields}, headers)


def post(fields, headers=None, path="/v1/chat/completions"):
    """Return a request whose body is *fields*, parsed as in production."""
    body = json.dumps(fields).encode()
    return Request("POST", path, headers or {}, body, parse_content(body))


def named(session):
    """Return a request whose headers name *session*, with the body left in Envoy."""
    return Request("POST", "/v1/chat/completions", {"x-session-id": session})


class Fleet:
    """A policy with its members, driven as the router does."""

    def __init__(self, policy: Policy, members=(), *, seed=1):
        self.policy = policy
        self.members: tuple[Worker, ...] = ()
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.become(members)

    def become(self, members):
        """Make *members* the pool."""
        self.members = tuple(members)
        if isinstance(self.policy, MembershipObserver):
            self.policy.on_workers(self.members)

    def pick(self, request, *, without=()):
        """Ask, among all but *without*."""
        workers = tuple(worker for worker in self.members if worker not in without)
        picked = self.policy.pick(request, workers, now=self.now, rng=self.rng)
        assert any(picked is worker for worker in workers)
        return picked

    def send(self, request, *, to=None, without=()):
        """Send *request* where the policy says, or *to* a worker; it stays in flight nowhere."""
        worker = to or self.pick(request, without=without)
        if isinstance(self.policy, Observer):
            self.policy.on_sent(worker, request, self.now)
        return worker
