"""While the service is away: no client tells workers where to fetch KV blocks.

The service takes that out of bodies. A request that it has not seen, since it is away or was too slow, goes to a
decode worker all the same; a script then refuses it if its body may name ``kv_transfer_params``. Bodies that
the service has seen are not looked at.
"""

from __future__ import annotations

import json

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any

from extproc.errors import Refusal, error_body, refusal_message, refusal_status
from extproc.ext_proc_answers import CLUSTER_HEADER
from extproc.xds.model import EnvoyModel

FILTER_NAME = "transfer-guard"

SCRIPT = """\
-- A name may be written with escapes, and JSON in UTF-16, which workers read too, has a NUL in each letter.
local marks = {"kv_transfer_params", "\\\\u00", "\\0"}

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get("%(picked)s") or (headers:get("content-type") or ""):lower():find("^multipart/") then
    return
  end
  local body = handle:body()
  local text = body and body:length() > 0 and body:getBytes(0, body:length())
  for _, mark in ipairs(text and marks or {}) do
    if text:find(mark, 1, true) then
      handle:respond({[":status"] = "%(status)d", ["content-type"] = "application/json"}, %(answer)s)
      return
    end
  end
end
"""


def build_transfer_guard(model: EnvoyModel) -> list[HttpFilter]:
    """Return the filter, for after the service has been asked; none where requests are not split."""
    if model.prefill_address is None or model.fail_closed:
        return []
    status, refusal = refusal_status(Refusal.NO_WORKER), Refusal.NO_WORKER
    answer = error_body(status, refusal, refusal_message(refusal))
    script = SCRIPT % {
        "picked": CLUSTER_HEADER,
        "status": status,
        "answer": json.dumps(answer),  # what JSON escapes, Lua reads the same way
    }
    lua = Lua(default_source_code=DataSource(inline_string=script))
    return [HttpFilter(name=FILTER_NAME, typed_config=Any.pack(lua))]
