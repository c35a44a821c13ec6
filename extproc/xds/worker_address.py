"""Where a worker is reached stays here: absolute URLs of its own in ``Location`` become paths.

A web framework builds redirects from the Host that it was asked under, and a worker that was given by name is asked
under that. The route notes on each response what was asked; a script, which does nothing when there is
no ``Location``, compares. The path is as good for the client, who may have come by another scheme and name anyway.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any

NOTE_HEADER = "x-router-asked"
"""Base path, host and address of the worker that answered. No client sees it, since its name is one of ours."""

FILTER_NAME = "worker-address"

SCRIPT = """\
local names = {"location", "content-location"}

local function bare(authority)
  return (authority:lower():gsub("^.*@", ""):gsub(":80$", ""):gsub(":443$", ""))
end

local function path_at_worker(url, note)
  local authority, path = url:match("^[hH][tT][tT][pP][sS]?://([^/?#\\\\]*)(.*)$")
  if not authority then
    authority, path = url:match("^//([^/?#\\\\]*)(.*)$")
  end
  if not authority then
    return url
  end
  local base, host, address = note:match("^(%S+) (%S+) (%S+:%d+)$")
  if not base then
    return url
  end
  local asked = bare(authority)
  -- Envoy asks by name without a port; the worker may add its own.
  if asked ~= bare(host) and asked ~= bare(address) and asked ~= bare(host .. address:match(":%d+$")) then
    return url
  end
  if base ~= "/" and path:sub(1, #base) == base and (path .. "/"):find("^[/?#]", #base + 1) then
    path = path:sub(#base + 1)
  end
  if path:sub(1, 1) ~= "/" then
    path = "/" .. path
  end
  if path:find("^/[/\\\\]") then
    path = "/." .. path
  end
  return path
end

function envoy_on_response(handle)
  local headers = handle:headers()
  for _, name in ipairs(names) do
    local url = headers:get(name)
    local note = url and headers:get("x-router-asked")
    if note then
      local shown = path_at_worker(url, note)
      if shown ~= url then
        headers:replace(name, shown)
      end
    end
  end
end
"""
"""A path that begins with two slashes would name another host, hence the dot."""


def build_worker_address_filter() -> HttpFilter:
    """Return the filter that compares."""
    code = DataSource(inline_string=SCRIPT)
    return HttpFilter(name=FILTER_NAME, typed_config=Any.pack(Lua(default_source_code=code)))


def build_note(base_path: str) -> HeaderValueOption:
    """Return what a route notes on the response of a worker, all of whose paths begin with *base_path*."""
    return HeaderValueOption(
        header=HeaderValue(
            key=NOTE_HEADER, value=f"{base_path or '/'} %REQ(:authority)% %UPSTREAM_REMOTE_ADDRESS%"
        ),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
