"""Headers that stay here: ours, Envoy's, those of one connection, and those that tell what software answers.

Envoy itself removes what ``Connection`` names, and the other headers that HTTP/1.1 means for one connection
only, from requests and responses; and it refuses bodies whose length is given twice or in two ways.
"""

from __future__ import annotations

from collections.abc import Iterable

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Rule
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import (
    HeaderMutation,
    Mutations,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.ext_proc_answers import METADATA_NAMESPACE, SHOWN_ID_KEY

INTERNAL_PREFIXES = ("x-router-", "x-gateway-", "x-envoy-")

LOOKALIKE_PREFIXES = tuple(
    f"x{first}{name}{second}"
    for name in ("router", "gateway", "envoy")
    for first, second in (("_", "_"), ("_", "-"), ("-", "_"))
)
"""Some servers take an underscore for a hyphen."""

PRIVATE_REQUEST_HEADERS = ("proxy-authorization", "proxy-connection", "keep-alive")
PRIVATE_RESPONSE_HEADERS = (
    "server",
    "via",
    "x-powered-by",
    "proxy-authenticate",
    "proxy-connection",
    "keep-alive",
)

REQUEST_ID_HEADER = "x-request-id"
FRESH_ID = "%UNIQUE_ID%"


def build_early_hygiene() -> TypedExtensionConfig:
    """Return what removes a client's own routing headers before anything reads the request."""
    rules = [_without_prefix(prefix) for prefix in (*INTERNAL_PREFIXES, *LOOKALIKE_PREFIXES)]
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(EarlyHeaderMutation(mutations=rules)),
    )


def build_header_hygiene(
    request_id_headers: Iterable[str], *, hides_ids: bool = False
) -> HttpFilter:
    """Return the filter that is the first to see a request and the last to see its response.

    The response gets the request's id: the one that workers were given, else the client's own, out of
    *request_id_headers*, else a new one. *hides_ids*: workers may get another id than clients are shown.
    """
    # The service sets the first, whatever the client has sent it in.
    names = dict.fromkeys((REQUEST_ID_HEADER, *request_id_headers))
    # A name may hold a percent sign, which means something here.
    sources = [f"%REQ({name})%" for name in names if "%" not in name]
    if hides_ids:
        sources.insert(0, f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:{SHOWN_ID_KEY})%")
    mutations = Mutations(
        request_mutations=[Rule(remove=name) for name in PRIVATE_REQUEST_HEADERS],
        response_mutations=[
            *(Rule(remove=name) for name in PRIVATE_RESPONSE_HEADERS),
            *(_without_prefix(prefix) for prefix in INTERNAL_PREFIXES),
            Rule(remove=REQUEST_ID_HEADER),
            *(_add(REQUEST_ID_HEADER, value) for value in (*sources, FRESH_ID)),
        ],
    )
    return HttpFilter(
        name="envoy.filters.http.header_mutation",
        typed_config=Any.pack(HeaderMutation(mutations=mutations)),
    )


def _without_prefix(prefix: str) -> Rule:
    return Rule(
        remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix))
    )


def _add(name: str, value: str) -> Rule:
    """Add a header that is not there yet; nothing, if the value is empty."""
    return Rule(
        append=HeaderValueOption(
            header=HeaderValue(key=name, value=value),
            append_action=HeaderValueOptionHeaderAppendAction.ADD_IF_ABSENT,
        )
    )
