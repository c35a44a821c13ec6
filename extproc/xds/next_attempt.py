"""Asking the service before a further attempt at a request whose prompt was computed elsewhere.

An upstream filter: it sees each attempt on its own. First attempts pass it by, for what they are to carry has
just been said; so only what is retried pays for it. The number of the attempt stands in a header meanwhile, since
filters are matched by nothing else that knows it.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Rule
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    HeaderForwardingRules,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import (
    HeaderMutation,
    Mutations,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import (
    HttpRequestHeaderMatchInput,
    ListStringMatcher,
    RegexMatcher,
    StringMatcher,
)
from envoy_data_plane.google.protobuf import Any
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as XdsExtension
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherTree,
    MatcherMatcherTreeMatchMap,
    MatcherOnMatch,
)

from extproc.ext_proc_answers import (
    ADDRESS_ATTRIBUTE,
    ATTEMPT_ATTRIBUTE,
    ATTEMPT_HEADER,
    LENGTH_KEY,
    MAX_WAIT_S,
    METADATA_NAMESPACE,
    REQUEST_ID_HEADER,
)
from extproc.xds.bootstrap import EXTPROC_CLUSTER
from extproc.xds.ext_proc import FILTER_NAME
from extproc.xds.model import EnvoyModel
from extproc.xds.wire import seconds

MUTATION_FILTER = "envoy.filters.http.header_mutation"

_SEND = ProcessingModeHeaderSendMode.SEND
_SKIP = ProcessingModeHeaderSendMode.SKIP


def build_next_attempt_filters(model: EnvoyModel) -> list[HttpFilter]:
    """Return the upstream filters, none where requests are not split."""
    if model.prefill_address is None:
        return []
    number = HeaderValueOption(
        header=HeaderValue(key=ATTEMPT_HEADER, value="%UPSTREAM_REQUEST_ATTEMPT_COUNT%"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    asking = ExtensionWithMatcher(
        extension_config=TypedExtensionConfig(name=FILTER_NAME, typed_config=Any.pack(_ask(model))),
        xds_matcher=_skip_first_attempts(),
    )
    # Attempts share their headers: one that was given another body has left its length there.
    length = HeaderValueOption(
        header=HeaderValue(
            key="content-length", value=f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:{LENGTH_KEY})%"
        ),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS,
    )
    return [
        _mutation(Rule(append=number), Rule(append=length)),
        HttpFilter(name="next attempt", typed_config=Any.pack(asking)),
        _mutation(Rule(remove=ATTEMPT_HEADER)),
    ]


def _mutation(*rules: Rule) -> HttpFilter:
    mutation = HeaderMutation(mutations=Mutations(request_mutations=list(rules)))
    return HttpFilter(name=MUTATION_FILTER, typed_config=Any.pack(mutation))


def _skip_first_attempts() -> Matcher:
    header = HttpRequestHeaderMatchInput(header_name=ATTEMPT_HEADER)
    skip = XdsExtension(name="skip", typed_config=Any.pack(SkipFilter()))
    return Matcher(
        matcher_tree=MatcherMatcherTree(
            input=XdsExtension(name="attempt", typed_config=Any.pack(header)),
            exact_match_map=MatcherMatcherTreeMatchMap(map={"1": MatcherOnMatch(action=skip)}),
        )
    )


def _ask(model: EnvoyModel) -> ExternalProcessor:
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER), timeout=seconds(0)
        ),
        failure_mode_allow=True,  # the attempt may still succeed as it is
        processing_mode=ProcessingMode(
            request_header_mode=_SEND,
            request_body_mode=ProcessingModeBodySendMode.BUFFERED,
            request_trailer_mode=_SKIP,
            response_header_mode=_SKIP,
            response_body_mode=ProcessingModeBodySendMode.NONE,
            response_trailer_mode=_SKIP,
        ),
        message_timeout=seconds(model.decision_timeout_s),
        max_message_timeout=seconds(MAX_WAIT_S),
        allow_mode_override=True,
        request_attributes=[ATTEMPT_ATTRIBUTE, ADDRESS_ATTRIBUTE],
        # The worker's key, for one, is none of the service's business here.
        forward_rules=HeaderForwardingRules(
            allowed_headers=ListStringMatcher(patterns=[StringMatcher(exact=REQUEST_ID_HEADER)])
        ),
        mutation_rules=HeaderMutationRules(
            disallow_all=True,
            allow_expression=RegexMatcher(regex="^content-length$"),
        ),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[METADATA_NAMESPACE])
        ),
    )
