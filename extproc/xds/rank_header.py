"""The data-parallel rank of each attempt.

Envoy sets the header once the endpoint of an attempt is known, from the ranks that ext_proc gave for
every endpoint of the pick: a retry on another node names the rank that is meant there, and one on an
engine without ranks names none.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Rule
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import (
    HeaderMutation,
    Mutations,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any

from extproc.ext_proc_answers import RANK_HEADER, RANK_NAMESPACE


def build_rank_filters() -> list[HttpFilter]:
    """Return the upstream filter of a cluster whose endpoints have ranks."""
    rank = f"%CEL(metadata.filter_metadata['{RANK_NAMESPACE}'][upstream.address])%"
    mutation = HeaderMutation(
        mutations=Mutations(
            request_mutations=[
                Rule(remove=RANK_HEADER),
                Rule(
                    append=HeaderValueOption(
                        header=HeaderValue(key=RANK_HEADER, value=rank),
                        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
                    )
                ),
            ]
        )
    )
    return [HttpFilter(name="envoy.filters.http.header_mutation", typed_config=Any.pack(mutation))]
