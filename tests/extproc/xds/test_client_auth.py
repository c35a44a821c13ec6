"""Who must show what, and names that two sides must agree on."""

from __future__ import annotations

import itertools

import pytest

from extproc import admission, authorize
from extproc.xds.client_auth import credentials_to_remove
from extproc.xds.ext_authz import ADDRESS_HEADER, AUTHORIZE_PATH
from extproc.xds.extensions import build_extensions
from extproc.xds.listener import build_listener
from extproc.xds.model import (
    CLIENT_HEADER,
    Access,
    ApiKey,
    ApiKeys,
    AskedTokens,
    NobodyYet,
    Passwords,
    SignedTokens,
)
from extproc.xds.slots import SLOT_TYPES
from tests.extproc.xds.models import CASES, read_model

WAYS = {
    "none": None,
    "keys": ApiKeys((ApiKey("a", "sk-secret"),)),
    "passwords": Passwords("a:{SHA}secret"),
    "signed": SignedTokens("issuer", "{}"),
    "asked": AskedTokens(1),
    "nobody": NobodyYet(),
}


def test_both_sides_mean_the_same():
    """Envoy asks where the service answers, and under the name that the queue goes by."""
    assert authorize.PATH == AUTHORIZE_PATH
    assert authorize.ADDRESS_HEADER == ADDRESS_HEADER
    assert CLIENT_HEADER == authorize.IDENTITY_HEADER == admission.CLIENT_HEADER


@pytest.mark.parametrize("case", CASES)
def test_slot_holds_what_the_listener_takes(case):
    """Envoy refuses a filter of a kind that the listener has not named."""
    for extension in build_extensions(read_model(case)):
        assert extension.typed_config.type_url in SLOT_TYPES[extension.name]


@pytest.mark.slow
def test_no_listener_depends_on_who_may_come_in():
    """Or it would be replaced with every key."""
    model = read_model("default")
    one = bytes(build_listener(model))

    for case in ("api_keys", "passwords", "rates", "cors", "keep_authorization"):
        assert bytes(build_listener(read_model(case))) == one


@pytest.mark.parametrize(
    ("way", "kept", "key"), list(itertools.product(WAYS, (False, True), ("", "sk-worker")))
)
def test_routes_remove_credentials_that_no_filter_removes(way, kept, key):
    """Passwords and tokens that others judge; unless they are to be kept, or are replaced anyway."""
    access = Access(WAYS[way], keep_authorization=kept, worker_api_key=key)

    removed = way in ("passwords", "asked") and not kept and not key
    assert credentials_to_remove(access) == (["authorization"] if removed else [])


@pytest.mark.parametrize("way", WAYS)
def test_model_shows_no_secrets(way):
    """It may end up in a traceback."""
    assert "secret" not in repr(Access(WAYS[way], worker_api_key="sk-secret"))
