"""Envoy's requests and our snapshots in, responses out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.xds.snapshot import (
    CLUSTER_TYPE,
    ENDPOINT_TYPE,
    EXTENSION_TYPE,
    LISTENER_TYPE,
    ROUTE_TYPE,
    SECRET_TYPE,
    TYPES,
    Resources,
    Snapshot,
)
from extproc.xds.subscription import AdsSession, Nack
from protos.discovery_pb2 import DiscoveryRequest

RUNTIME_TYPE = "type.googleapis.com/envoy.service.runtime.v3.Runtime"
NAMES = {
    CLUSTER_TYPE: ("default", "extproc_admin"),
    ENDPOINT_TYPE: ("default",),
    SECRET_TYPE: ("worker_api_key",),
    LISTENER_TYPE: ("ingress",),
    EXTENSION_TYPE: ("auth", "rates"),
    ROUTE_TYPE: ("ingress",),
}
ASKED = {**NAMES, CLUSTER_TYPE: (), LISTENER_TYPE: ()}
"""What Envoy names in its requests: clusters and listeners are wildcards."""


def snapshot(clusters=1, endpoints=1, secrets=1, listeners=1, extensions=1, routes=1):
    """Resources whose content is a number: another number, another version."""
    numbers = dict(
        zip(TYPES, (clusters, endpoints, secrets, listeners, extensions, routes), strict=True)
    )
    return Snapshot(
        {
            type_url: Resources(
                version=f"v{number}",
                by_name={name: f"{name} {number}".encode() for name in NAMES[type_url]},
            )
            for type_url, number in numbers.items()
        }
    )


def ask(type_url, names=None, *, nonce="", error=None, version=""):
    request = DiscoveryRequest(
        type_url=type_url,
        resource_names=ASKED.get(type_url, ()) if names is None else names,
        response_nonce=nonce,
        version_info=version,
    )
    if error is not None:
        request.error_detail.message = error
    return request


def subscribe(session, *types):
    """Ask for *types* (all) and acknowledge each; return the last nonce of each."""
    nonces = {}
    for type_url in types or TYPES:
        (response,), nack = session.on_request(ask(type_url))
        assert nack is None
        assert session.on_request(ask(type_url, nonce=response.nonce)) == ([], None)
        nonces[type_url] = response.nonce
    return nonces


def values(response):
    assert all(resource.type_url == response.type_url for resource in response.resources)
    return [resource.value.decode() for resource in response.resources]


@pytest.fixture
def session():
    return AdsSession(snapshot())


@pytest.mark.parametrize("type_url", TYPES)
def test_first_request_is_answered_with_the_snapshot(session, type_url):
    """Version, type and a nonce; all resources of a wildcard, else those that are named."""
    (response,), nack = session.on_request(ask(type_url))

    assert nack is None
    assert (response.version_info, response.type_url) == ("v1", type_url)
    assert response.nonce
    assert values(response) == [f"{name} 1" for name in NAMES[type_url]]


def test_every_response_has_a_nonce_of_its_own(session):
    """Also across types: a nonce names one response."""
    responses = [session.on_request(ask(type_url))[0][0] for type_url in TYPES]
    responses += session.on_snapshot(snapshot(*[2] * 6))

    assert len({response.nonce for response in responses}) == len(responses) == 12


def test_ack_is_not_answered(session):
    """Envoy has what we have: silence."""
    (response,), _ = session.on_request(ask(CLUSTER_TYPE))

    assert session.on_request(ask(CLUSTER_TYPE, nonce=response.nonce, version="v1")) == ([], None)


def test_nack_is_reported_and_not_answered(session):
    """Type, version and Envoy's own words; the same version is not sent again."""
    (response,), _ = session.on_request(ask(LISTENER_TYPE))

    answer = session.on_request(ask(LISTENER_TYPE, nonce=response.nonce, error="no such filter"))

    assert answer == ([], Nack(LISTENER_TYPE, "v1", "no such filter"))
    assert session.on_snapshot(snapshot()) == []


def test_refused_version_is_followed_by_the_next_one(session):
    """After a NACK the next change is sent as ever."""
    subscribe(session, LISTENER_TYPE)
    (refused,) = session.on_snapshot(snapshot(listeners=2))
    session.on_request(ask(LISTENER_TYPE, nonce=refused.nonce, error="bad"))

    (mended,) = session.on_snapshot(snapshot(listeners=3))

    assert (mended.version_info, values(mended)) == ("v3", ["ingress 3"])


def test_first_version_refused_is_not_serving_and_a_later_one_refused_is(session):
    """A NACK keeps what Envoy had: nothing at first, the last good version later."""
    nonces = {type_url: session.on_request(ask(type_url))[0][0].nonce for type_url in TYPES}
    for type_url in TYPES:
        error = "bad" if type_url == LISTENER_TYPE else None
        session.on_request(ask(type_url, nonce=nonces[type_url], error=error))
    assert not session.serving()

    (mended,) = [
        r for r in session.on_snapshot(snapshot(listeners=2)) if r.type_url == LISTENER_TYPE
    ]
    session.on_request(ask(LISTENER_TYPE, nonce=mended.nonce))
    assert session.serving()

    bad = session.on_snapshot(snapshot(listeners=3))[0]
    session.on_request(ask(LISTENER_TYPE, nonce=bad.nonce, error="bad"))
    assert session.serving()


@pytest.mark.parametrize("missing", TYPES)
def test_serving_only_when_every_type_is_acknowledged(session, missing):
    """Asked for is not enough, nor is all but one; filters and secrets count once Envoy asks for them."""
    assert not session.serving()
    subscribe(session, *(type_url for type_url in TYPES if type_url != missing))
    assert session.serving() == (missing in (SECRET_TYPE, EXTENSION_TYPE))

    (response,), _ = session.on_request(ask(missing))
    assert not session.serving()

    session.on_request(ask(missing, nonce=response.nonce))
    assert session.serving()


@pytest.mark.parametrize("error", [None, "bad"], ids=["ack", "nack"])
def test_answer_to_an_older_response_is_stale(session, error):
    """A newer one is under way, and its answer is the one that counts."""
    (old,), _ = session.on_request(ask(CLUSTER_TYPE))
    (new,) = session.on_snapshot(snapshot(clusters=2))

    assert session.on_request(ask(CLUSTER_TYPE, nonce=old.nonce, error=error)) == ([], None)

    _, nack = session.on_request(ask(CLUSTER_TYPE, nonce=new.nonce, error="bad"))
    assert nack == Nack(CLUSTER_TYPE, "v2", "bad")


def test_stale_ack_does_not_make_the_new_version_serving(session):
    """The version that Envoy has is the one of the nonce."""
    nonces = {type_url: session.on_request(ask(type_url))[0][0].nonce for type_url in TYPES}
    newer = session.on_snapshot(snapshot(*[2] * 6))

    for type_url in TYPES:
        session.on_request(ask(type_url, nonce=nonces[type_url]))
    assert not session.serving()

    for response in newer:
        session.on_request(ask(response.type_url, nonce=response.nonce))
    assert session.serving()


def test_acknowledgement_that_names_more_is_a_new_subscription(session):
    """Envoy asks for the endpoints of one more cluster in its ACK, and gets them at once."""
    nonce = subscribe(session, ENDPOINT_TYPE)[ENDPOINT_TYPE]

    (response,), nack = session.on_request(ask(ENDPOINT_TYPE, ["default", "other"], nonce=nonce))

    assert nack is None
    assert response.nonce != nonce
    assert values(response) == ["default 1"]


@pytest.mark.parametrize("names", [["default", "default"], ["default"]])
def test_same_names_in_another_form_are_no_new_subscription(session, names):
    """Repetition does not matter."""
    nonce = subscribe(session, ENDPOINT_TYPE)[ENDPOINT_TYPE]

    assert session.on_request(ask(ENDPOINT_TYPE, names, nonce=nonce)) == ([], None)


def test_order_of_names_does_not_matter(session):
    """The same set is the same subscription."""
    (response,), _ = session.on_request(ask(ENDPOINT_TYPE, ["default", "other"]))

    again = ask(ENDPOINT_TYPE, ["other", "default"], nonce=response.nonce)

    assert session.on_request(again) == ([], None)


def test_nack_that_names_more_is_reported_and_answered(session):
    """One message may be both."""
    (response,), _ = session.on_request(ask(ENDPOINT_TYPE))

    request = ask(ENDPOINT_TYPE, ["default", "x"], nonce=response.nonce, error="bad")
    responses, nack = session.on_request(request)

    assert nack == Nack(ENDPOINT_TYPE, "v1", "bad")
    assert [values(r) for r in responses] == [["default 1"]]


@pytest.mark.parametrize("type_url", TYPES)
def test_request_without_nonce_subscribes_anew(session, type_url):
    """It is answered with everything, as the first one was; the older nonce is stale then."""
    old = subscribe(session, type_url)[type_url]

    (response,), nack = session.on_request(ask(type_url, version="v1"))

    assert nack is None
    assert values(response) == [f"{name} 1" for name in NAMES[type_url]]
    assert session.on_request(ask(type_url, nonce=old, error="late")) == ([], None)


def test_resource_that_is_not_named_is_not_sent(session):
    """Endpoints and routes are answered for exactly the asked names."""
    (response,), _ = session.on_request(ask(ENDPOINT_TYPE, ["other"]))

    assert values(response) == []


@pytest.mark.parametrize("type_url", [ENDPOINT_TYPE, SECRET_TYPE, EXTENSION_TYPE, ROUTE_TYPE])
def test_naming_nothing_any_more_ends_the_interest(session, type_url):
    """Only clusters and listeners are wildcards; here no names means no resources."""
    nonce = subscribe(session, type_url)[type_url]

    responses, _ = session.on_request(ask(type_url, [], nonce=nonce))

    assert [value for response in responses for value in values(response)] == []


@pytest.mark.parametrize("nonce", ["", "1", "bogus"])
@pytest.mark.parametrize("type_url", [RUNTIME_TYPE, "", "nonsense"])
def test_type_that_is_not_served_gets_no_answer(session, type_url, nonce):
    """And it does not disturb the others."""
    assert session.on_request(ask(type_url, ["x"], nonce=nonce)) == ([], None)

    subscribe(session)
    assert session.serving()


def test_snapshot_before_any_request_is_kept_for_the_first(session):
    """Nothing is sent to who has not asked."""
    assert session.on_snapshot(snapshot(*[2] * 6)) == []

    (response,), _ = session.on_request(ask(CLUSTER_TYPE))

    assert response.version_info == "v2"


def test_equal_snapshot_sends_nothing(session):
    """Same versions, nothing to do."""
    subscribe(session)

    assert session.on_snapshot(snapshot()) == []


@pytest.mark.parametrize(
    ("new", "sent"),
    [
        ({"clusters": 2}, [CLUSTER_TYPE, ENDPOINT_TYPE]),
        ({"endpoints": 2}, [ENDPOINT_TYPE]),
        ({"secrets": 2}, [SECRET_TYPE]),
        ({"listeners": 2}, [LISTENER_TYPE, EXTENSION_TYPE, ROUTE_TYPE]),
        ({"extensions": 2}, [EXTENSION_TYPE]),
        ({"secrets": 2, "extensions": 2}, [SECRET_TYPE, EXTENSION_TYPE]),
        ({"routes": 2}, [ROUTE_TYPE]),
        ({"clusters": 2, "routes": 2}, [CLUSTER_TYPE, ENDPOINT_TYPE, ROUTE_TYPE]),
        (
            {"endpoints": 2, "listeners": 2},
            [ENDPOINT_TYPE, LISTENER_TYPE, EXTENSION_TYPE, ROUTE_TYPE],
        ),
        (dict.fromkeys(("clusters", "endpoints", "secrets", "listeners"), 2), list(TYPES)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_changes_are_sent_make_before_break(session, new, sent):
    """What is referred to comes first; endpoints follow clusters, filters and routes listeners."""
    subscribe(session)

    responses = session.on_snapshot(snapshot(**new))

    assert [response.type_url for response in responses] == sent


def test_what_follows_is_sent_only_to_who_subscribed(session):
    """A changed cluster brings no endpoints to an Envoy that has not asked for any yet."""
    subscribe(session, CLUSTER_TYPE)

    responses = session.on_snapshot(snapshot(clusters=2, listeners=2))

    assert [response.type_url for response in responses] == [CLUSTER_TYPE]


def test_unacknowledged_version_is_not_sent_twice(session):
    """Its answer is still to come; a newer version is sent without waiting for it."""
    (response,), _ = session.on_request(ask(ROUTE_TYPE))
    assert session.on_snapshot(snapshot()) == []

    (newer,) = session.on_snapshot(snapshot(routes=2))

    assert newer.nonce != response.nonce


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([*TYPES, RUNTIME_TYPE]), st.booleans()),
        st.tuples(st.just("ack"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("nack"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("snapshot"), st.tuples(*[st.integers(1, 3)] * 6), st.booleans()),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=200)
@given(steps=steps, cautious=st.booleans())
def test_any_order_of_answers_and_snapshots_ends_acknowledged(steps, cautious):
    """Nothing raises, nothing is sent unasked, and one more version that Envoy takes settles it."""
    session = AdsSession(snapshot(), (lambda: {"default": b"some"}) if cautious else None)
    current = snapshot()
    sent = []
    asked = set()
    last = {}

    def deliver(responses):
        for response in responses:
            assert response.type_url in asked
            version = response.version_info
            if cautious and response.type_url == ENDPOINT_TYPE:
                assert version.endswith("-healthy") == (b"some" in response.SerializeToString())
                version = version.removesuffix("-healthy")
            assert version == current.resources[response.type_url].version
            last[response.type_url] = response
            sent.append(response)

    for what, detail, more in steps:
        match what:
            case "ask":
                asked |= {detail} & set(TYPES)
                responses, nack = session.on_request(ask(detail))
                assert nack is None
                deliver(responses)
            case "ack" | "nack" if sent:
                response = sent[detail % len(sent)]  # the newest of its type or a stale one
                names = [*ASKED[response.type_url], *(["other"] if more else [])]
                error = "bad" if what == "nack" else None
                request = ask(response.type_url, names, nonce=response.nonce, error=error)
                newest = last[response.type_url] is response
                responses, nack = session.on_request(request)
                assert (nack is not None) == (newest and what == "nack")
                assert newest or not responses
                deliver(responses)
            case "snapshot":
                current = snapshot(*detail)
                deliver(session.on_snapshot(current))

    for type_url in set(TYPES) - asked:
        asked.add(type_url)
        deliver(session.on_request(ask(type_url))[0])
    current = snapshot(*[9] * 6)
    deliver(session.on_snapshot(current))
    for type_url in TYPES:
        rounds = 0
        while rounds == 0 or responses:
            # A subscription that shrinks back is answered once more, and so are endpoints not all there.
            responses, _ = session.on_request(ask(type_url, nonce=last[type_url].nonce))
            deliver(responses)
            rounds += 1
            assert rounds <= 3
        assert last[type_url].version_info == "v9"
    assert session.serving()
    assert session.on_snapshot(current) == []


# --- endpoints of clusters that are new to Envoy ------------------------------------------------


def with_endpoints(version, **endpoints):
    """Return a snapshot with these endpoints by cluster."""
    by_name = {name: value.encode() for name, value in endpoints.items()}
    resources = {**snapshot().resources, ENDPOINT_TYPE: Resources(version, by_name)}
    return Snapshot(resources)


class Cautious:
    """A session that knows which endpoints are healthy."""

    def __init__(self, complete, **good):
        self.good = good
        self.session = AdsSession(complete, self._first)
        self.nonce = ""

    def _first(self):
        return {name: value.encode() for name, value in self.good.items()}

    def _got(self, responses):
        told = [response for response in responses if response.type_url == ENDPOINT_TYPE]
        for response in told:
            self.nonce = response.nonce
        return [(response.version_info, values(response)) for response in told]

    def ask(self, *names, version=""):
        responses, nack = self.session.on_request(ask(ENDPOINT_TYPE, names, version=version))
        assert nack is None
        return self._got(responses)

    def ack(self, *names, nonce=None):
        request = ask(ENDPOINT_TYPE, names, nonce=nonce or self.nonce)
        responses, nack = self.session.on_request(request)
        assert nack is None
        return self._got(responses)

    def nack(self, *names):
        responses, nack = self.session.on_request(
            ask(ENDPOINT_TYPE, names, nonce=self.nonce, error="bad")
        )
        return self._got(responses), nack

    def publish(self, complete):
        return self._got(self.session.on_snapshot(complete))


def test_fresh_envoy_gets_the_good_endpoints_first_and_the_rest_after_its_ack():
    """A worker that hangs would hold up its start; the answer to the rest ends the matter."""
    envoy = Cautious(with_endpoints("v1", a="1 2 3", b="4 5"), a="1", b="4 5")

    assert envoy.ask("a", "b") == [("v1-healthy", ["1", "4 5"])]
    assert envoy.ack("a", "b") == [("v1", ["1 2 3", "4 5"])]
    assert envoy.ack("a", "b") == []
    assert envoy.publish(with_endpoints("v1", a="1 2 3", b="4 5")) == []


def test_when_all_are_good_there_is_one_answer():
    """Nothing is held back, so nothing follows."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="1 2")

    assert envoy.ask("a") == [("v1", ["1 2"])]
    assert envoy.ack("a") == []


def test_when_none_is_good_the_cluster_begins_empty():
    """Envoy can start; requests get 503 until a worker is found healthy."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="")

    assert envoy.ask("a") == [("v1-healthy", [""])]
    assert envoy.ack("a") == [("v1", ["1 2"])]


def test_envoy_that_reconnects_gets_everything_at_once():
    """It had them from an earlier stream: fewer now would take workers away from it."""
    envoy = Cautious(with_endpoints("v1", a="1 2", b="3"), a="1", b="")

    assert envoy.ask("a", "b", version="v1") == [("v1", ["1 2", "3"])]
    assert envoy.ack("a", "b") == []


def test_version_of_another_type_says_nothing_of_endpoints():
    """An Envoy that has its clusters may have got no endpoints yet."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="1")
    envoy.session.on_request(ask(CLUSTER_TYPE, version="v1"))

    assert envoy.ask("a") == [("v1-healthy", ["1"])]


def test_cluster_that_is_new_at_run_time_begins_with_its_good_endpoints():
    """The others keep all of theirs in the same answer."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="1", b="3")
    envoy.ask("a")
    envoy.ack("a")
    envoy.ack("a")

    assert envoy.publish(with_endpoints("v2", a="1 2", b="3 4")) == [("v2", ["1 2"])]
    assert envoy.ack("a", "b") == [("v2-healthy", ["1 2", "3"])]
    assert envoy.ack("a", "b") == [("v2", ["1 2", "3 4"])]
    assert envoy.ack("a", "b") == []


def test_clusters_that_come_one_after_the_other_are_each_new_once():
    """An acknowledgement that names one more settles what it acknowledges, not what it asks for."""
    envoy = Cautious(with_endpoints("v1", a="1 2", b="3 4"), a="1", b="3")

    assert envoy.ask("a") == [("v1-healthy", ["1"])]
    assert envoy.ack("a", "b") == [("v1-healthy", ["1 2", "3"])]
    assert envoy.ack("a", "b") == [("v1", ["1 2", "3 4"])]
    assert envoy.ack("a", "b") == []


def test_worker_that_joins_a_known_cluster_is_told_at_once():
    """Only clusters are new, not workers: Envoy goes on with the others while it checks this one."""
    envoy = Cautious(with_endpoints("v1", a="1"), a="1")
    envoy.ask("a")
    envoy.ack("a")

    assert envoy.publish(with_endpoints("v2", a="1 2")) == [("v2", ["1 2"])]


def test_cluster_that_went_and_comes_back_is_new_again():
    """Envoy has forgotten it, and checks all of its endpoints anew."""
    envoy = Cautious(with_endpoints("v1", a="1", b="2 3"), a="1", b="2")
    envoy.ask("a", "b")
    envoy.ack("a", "b")
    envoy.ack("a", "b")

    assert envoy.ack("a") == [("v1", ["1"])]
    assert envoy.ack("a", "b") == [("v1-healthy", ["1", "2"])]


def test_change_while_the_first_answer_is_under_way_is_first_again():
    """What counts is the answer to the newest one; the older acknowledgement is stale."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="1")
    envoy.ask("a")
    stale = envoy.nonce

    assert envoy.publish(with_endpoints("v2", a="1 2 3")) == [("v2-healthy", ["1"])]
    assert envoy.ack("a", nonce=stale) == []
    assert envoy.ack("a") == [("v2", ["1 2 3"])]


def test_same_snapshot_while_the_first_answer_is_under_way_sends_nothing():
    """The rest follows after the acknowledgement, not before it."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="1")
    envoy.ask("a")

    assert envoy.publish(with_endpoints("v1", a="1 2")) == []


def test_refused_first_endpoints_are_reported_and_not_followed_by_the_rest():
    """Envoy has nothing yet, so the next version begins with the good ones again."""
    envoy = Cautious(with_endpoints("v1", a="1 2"), a="1")
    envoy.ask("a")

    assert envoy.nack("a") == ([], Nack(ENDPOINT_TYPE, "v1-healthy", "bad"))
    assert envoy.publish(with_endpoints("v1", a="1 2")) == []
    assert envoy.publish(with_endpoints("v2", a="1 2 3")) == [("v2-healthy", ["1"])]
    assert envoy.ack("a") == [("v2", ["1 2 3"])]


def test_cluster_whose_health_is_not_known_is_told_as_a_whole():
    """A cluster that only lingers is none of the registry's any more."""
    envoy = Cautious(with_endpoints("v1", a="1 2", gone="3"), a="1")

    assert envoy.ask("a", "gone") == [("v1-healthy", ["1", "3"])]


def test_envoy_serves_with_the_first_endpoints():
    """Accepted is accepted: requests need not wait for the rest."""
    envoy = Cautious(snapshot(), default="some")
    subscribe(envoy.session, CLUSTER_TYPE, LISTENER_TYPE, ROUTE_TYPE)

    envoy.ask("default")
    assert not envoy.session.serving()

    envoy.ack("default")
    assert envoy.session.serving()


def test_changed_cluster_brings_its_endpoints_in_full():
    """It warms up anew in Envoy, which serves with the old one meanwhile."""
    envoy = Cautious(snapshot(), default="some")
    subscribe(envoy.session, CLUSTER_TYPE)
    envoy.ask("default")
    envoy.ack("default")
    envoy.ack("default")

    assert envoy.publish(snapshot(clusters=2)) == [("v1", ["default 1"])]
