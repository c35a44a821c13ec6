"""The admin API as a whole: probes, errors, who gets in; and metrics."""

from __future__ import annotations

import io
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from extproc.admin import ENDPOINTS, build_metrics_app
from extproc.config import Config
from extproc.metrics import Metrics
from policies.base import Request
from policies.sticky_least_loaded import StickyLeastLoaded
from tests.extproc.admin_api import BY_ENVOY, A, B, C, serve, unserved

KEY = "s3cret"
OPEN = [endpoint for endpoint in ENDPOINTS if endpoint.is_open]
GUARDED = [endpoint for endpoint in ENDPOINTS if not endpoint.is_open]


def path_of(endpoint):
    return endpoint.path.replace("{url}", A).replace("{model}", "m")


def name_of(endpoint):
    return f"{endpoint.method} {endpoint.path}"


@pytest.fixture
async def api():
    async with serve() as api:
        api.add(A, B, C)
        yield api


@pytest.fixture
async def scrape():
    api = unserved(A, settings=BY_ENVOY)
    metrics = Metrics("random", api.fleet.registry).registry
    async with TestClient(TestServer(build_metrics_app(metrics, api.readiness))) as client:
        client.api = api
        yield client


async def test_port_of_the_metrics_tells_readiness(scrape):
    """For a Pod without an Envoy, and for those who cannot ask through it."""
    before = await scrape.get("/readiness")
    scrape.api.pass_check(A)
    after = await scrape.get("/readiness")

    assert (before.status, after.status) == (503, 200)
    assert (await before.json())["reason"] == "no healthy workers available"
    assert (await after.json())["healthy_workers"] == 1


async def test_all_probes_are_content_when_ready(api):
    """200 each; readiness counts the workers."""
    for path in ("/liveness", "/health"):
        answer = await api.get(path)
        assert (answer.status, answer.text) == (200, "OK")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    ready = await api.get("/readiness")
    assert (ready.status, ready.headers["Content-Type"]) == (200, "application/json")
    assert ready.json == {"status": "ready", "healthy_workers": 3, "total_workers": 3}


async def test_service_without_workers_is_alive_but_not_ready():
    """A restart would not help, so liveness stays 200."""
    async with serve() as api:
        ready, health = await api.get("/readiness"), await api.get("/health")

        assert (await api.get("/liveness")).status == 200
    reason = "no healthy workers available"
    assert (health.status, health.text) == (503, reason)
    assert ready.status == 503
    assert ready.json == {"status": "not_ready", "reason": reason, "total_workers": 0}


async def test_service_that_stops_is_not_ready(api):
    """Load balancers take it out before it goes."""
    api.readiness.stopping = True

    assert (await api.get("/readiness")).status == 503
    assert (await api.get("/health")).text == "shutting down"
    assert (await api.get("/liveness")).status == 200


@pytest.mark.parametrize("path", ["/", "/metrics", "/readiness/", "/health/x", "/workers/", "/v1"])
async def test_nothing_else_is_served(api, path):
    """404 in the shape of all errors. Metrics have a port of their own."""
    answer = await api.get(path)

    assert answer.status == 404
    assert answer.json == {"error": "there is nothing at this path", "code": "NOT_FOUND"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/workers", "GET, HEAD, POST"),
        ("GET", "/add_worker", "POST"),
        ("GET", "/flush_cache", "POST"),
        ("POST", f"/workers/{A}", "DELETE, GET, HEAD"),
        ("OPTIONS", "/config", "GET, HEAD"),
        ("PATCH", "/workers", "GET, HEAD, POST"),
    ],
)
async def test_wrong_method_is_told_the_right_ones(api, method, path, allowed):
    """405 with Allow."""
    answer = await api.ask(method, path)

    assert (answer.status, answer.headers["Allow"]) == (405, allowed)
    assert answer.json["code"] == "METHOD_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allowed"),
    [
        *[
            ("PUT", path_of(e), 405, "method_not_allowed", "GET, HEAD")
            for e in ENDPOINTS
            if e.is_open and e.method == "GET"
        ],
        ("POST", "/v1/models", 405, "method_not_allowed", "GET, HEAD"),
        ("POST", "/health", 405, "method_not_allowed", "GET, HEAD"),
        ("GET", "/finish_session", 405, "method_not_allowed", "POST"),
        ("POST", "/finish_session", 400, "missing_session_id", None),
        ("GET", "/v1/models/", 404, "not_found", None),
        ("GET", "/v1/models/none", 404, "model_not_found", None),
    ],
)
async def test_errors_of_what_is_open_are_as_openai_shapes_them(
    api, method, path, status, code, allowed
):
    """Clients with an SDK ask there, not administrators."""
    answer = await api.ask(method, path)

    assert (answer.status, answer.headers.get("Allow")) == (status, allowed)
    error = answer.json["error"]
    assert answer.json.keys() == {"error"}
    assert (error.pop("code"), error.pop("type")) == (code, "invalid_request_error")
    assert error.pop("message")
    assert error == {"param": None}


@pytest.mark.parametrize(
    "endpoint", [e for e in ENDPOINTS if e.method == "GET"], ids=lambda e: e.path
)
async def test_head_is_get_without_a_body(api, endpoint):
    """Same status, same length."""
    got, head = await api.get(path_of(endpoint)), await api.ask("HEAD", path_of(endpoint))

    assert (head.status, head.text) == (got.status, "")
    assert head.headers["Content-Length"] == got.headers["Content-Length"]


@pytest.mark.parametrize("path", ["/workers", "/health", "/nothing", "/workers/x", "/add_worker"])
async def test_software_is_not_named(api, path):
    """No Server header, in errors neither."""
    assert "Server" not in (await api.get(path)).headers


async def test_unknown_parameters_are_ignored(api):
    """Load balancers and people add some."""
    assert (await api.get("/workers?x=1&wait=maybe")).status == 200


async def test_large_body_is_refused(api):
    """1 MiB is more than any worker's description needs."""
    answer = await api.post("/workers", data=io.BytesIO(b" " * (2**20 + 1)))

    assert (answer.status, answer.json["code"]) == (413, "PAYLOAD_TOO_LARGE")


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", {}),
        (b"{", {}),
        (b"url=http://10.0.0.9", {}),
        (b"\xff", {}),
        (b"[" * 100_000, {}),
        (b'{"url": "http://10.0.0.9", "weight": NaN}', {}),
        (b"x", {"Content-Encoding": "gzip"}),
    ],
    ids=["empty", "cut", "form", "not UTF-8", "deep", "NaN", "not gzip"],
)
async def test_body_that_is_not_json_is_refused(api, body, headers):
    """400, and nothing changes."""
    answer = await api.post("/workers", data=body, headers=headers)

    assert (answer.status, answer.json["code"]) == (400, "INVALID_REQUEST")
    assert len(api.registry.engines) == 3


async def test_unforeseen_failure_is_an_error_without_details(api, monkeypatch):
    """500 in JSON; the cause is for the log."""

    def fail():
        raise RuntimeError("secret detail")

    monkeypatch.setattr(api.readiness, "state", fail)
    answer = await api.get("/readiness")

    assert answer.status == 500
    assert answer.json["error"]["code"] == "request_failed"
    assert "secret detail" not in answer.text


# --- who gets in --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Config(admin_api_key=KEY), Config(host="0.0.0.0")], ids=["key", "open"])  # fmt: skip
@pytest.mark.parametrize("endpoint", OPEN, ids=name_of)
async def test_open_endpoints_are_for_everybody(endpoint, config):
    """No key is asked for, wherever the router listens and wherever a page comes from."""
    headers = {"Origin": "http://evil", "Host": "evil"}
    async with serve(config=config) as api:
        answer = await api.ask(endpoint.method, path_of(endpoint), headers=headers)

    assert answer.status not in (401, 403)


@pytest.mark.parametrize("endpoint", GUARDED, ids=name_of)
async def test_guarded_endpoints_need_the_key(endpoint):
    """401 with the scheme, and nothing is done."""
    async with serve(config=Config(admin_api_key=KEY)) as api:
        api.add(A)
        answer = await api.ask(endpoint.method, path_of(endpoint))
        wrong = await api.ask(
            endpoint.method, path_of(endpoint), headers={"Authorization": "Bearer x"}
        )

        assert api.registry.get(A).state == "healthy"
    assert (answer.status, wrong.status) == (401, 401)
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json["code"] == "UNAUTHORIZED"
    assert KEY not in answer.text + wrong.text


@pytest.mark.parametrize("endpoint", GUARDED, ids=name_of)
async def test_guarded_endpoints_are_closed_without_a_key_in_the_open(endpoint):
    """403 with the flag to set."""
    async with serve(config=Config(host="0.0.0.0")) as api:
        api.add(A)
        answer = await api.ask(endpoint.method, path_of(endpoint))

        assert api.registry.get(A).state == "healthy"
    assert (answer.status, answer.json["code"]) == (403, "FORBIDDEN")
    assert "set --admin-api-key" in answer.json["error"]


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1:9003", 200),
        ("[::1]:9003", 200),
        ("unix:/run/x/admin.sock", 200),
        ("0.0.0.0:9003", 403),
        ("[::]:9003", 403),
        ("10.0.0.1:9003", 403),
    ],
)
async def test_address_of_the_service_itself_must_be_loopback_too(address, status):
    """It can be asked without Envoy; a Unix socket is for this user alone."""
    async with serve(config=Config(admin_address=address)) as api:
        assert (await api.get("/workers")).status == status
        assert (await api.get("/liveness")).status == 200
    async with serve(config=Config(admin_address=address, admin_api_key=KEY)) as api:
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (await api.get("/workers", headers=headers)).status == 200


@pytest.mark.parametrize("endpoint", GUARDED, ids=name_of)
@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil"}, {"Host": "evil"}, {"Via": "1.1 proxy"}], ids=str
)
async def test_guarded_endpoints_answer_no_page_of_elsewhere(api, endpoint, headers):
    """403 though the router listens on loopback; nor what came through another proxy."""
    answer = await api.ask(endpoint.method, path_of(endpoint), headers=headers)

    assert (answer.status, answer.json["code"]) == (403, "FORBIDDEN")


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/workersx", "/health/x"])
async def test_unknown_paths_are_guarded_too(path):
    """What is there, administrators know."""
    async with serve(config=Config(admin_api_key=KEY)) as api:
        assert (await api.get(path)).status == 401


async def test_key_lets_everything_through():
    """Also from a page of elsewhere: it was given the key."""
    headers = {"Authorization": f"Bearer {KEY}", "Origin": "http://dashboard"}
    async with serve(config=Config(admin_api_key=KEY, host="0.0.0.0")) as api:
        assert (await api.get("/workers", headers=headers)).status == 200
        assert (await api.get("/nothing", headers=headers)).status == 404


# --- sessions -----------------------------------------------------------------------------------


async def test_session_is_finished_whether_it_was_known_or_not():
    """Answered as vLLM Router does; the policy forgets it."""
    async with serve(policy=StickyLeastLoaded) as api:
        api.add(A)
        (pool,) = api.registry.pools
        request = Request("POST", "/", {"x-session-id": "s 1"})
        pool.policy.on_sent(pool.members[0], request, 0.0)
        answers = [await api.post("/finish_session?session_id=s%201") for _ in range(2)]

        assert pool.policy.finish_session("s 1") is False
    assert [(answer.status, answer.json) for answer in answers] == [
        (200, {"status": "ok", "session_id": "s 1"})
    ] * 2


async def test_policy_without_sessions_knows_none(api):
    """It is no error to finish a session that was never kept."""
    answer = await api.post("/finish_session?session_id=x")

    assert (answer.status, answer.json["status"]) == (200, "ok")


@pytest.mark.parametrize("query", ["", "?session_id=", "?id=x"])
async def test_session_that_is_not_named_is_a_bad_request(api, query):
    """In OpenAI's shape, with what to do."""
    answer = await api.post(f"/finish_session{query}")

    error = answer.json["error"]
    assert answer.status == 400
    assert (error["code"], error["type"]) == ("missing_session_id", "invalid_request_error")


# --- metrics ------------------------------------------------------------------------------------


async def test_metrics_are_prometheus_text(scrape):
    """They parse."""
    async with scrape.get("/metrics") as response:
        text = await response.text()

    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert any(
        family.name.startswith("vllm_extproc_") for family in text_string_to_metric_families(text)
    )


async def test_metrics_are_open_metrics_when_asked(scrape):
    """As newer Prometheus servers do; the text ends with its mark."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with scrape.get("/metrics", headers=accept) as response:
        text = await response.text()

    assert response.headers["Content-Type"].startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    assert text.endswith("# EOF\n")


async def test_configuration_is_shown_without_its_secrets():
    """Every field as it is; of a secret only that it is set."""
    config = Config(admin_api_key=KEY, port=1234, worker_file="/\udcff", worker_urls=(A,))
    async with serve(config=config) as api:
        answer = await api.get("/config", headers={"Authorization": f"Bearer {KEY}"})

    shown = answer.json
    assert shown.keys() == set(Config.__struct_fields__)
    assert (shown["port"], shown["worker_urls"]) == (1234, [A])
    assert (shown["admin_api_key"], shown["worker_api_key"]) == ("***", "")
    assert KEY not in json.dumps(shown)
