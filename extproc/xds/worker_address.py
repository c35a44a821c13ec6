"""Where a worker is reached stays here: absolute URLs of its own in ``Location`` become paths.

``Location`` that tells it in another way is taken out, ``Link`` and ``Refresh`` too.

A web framework builds redirects from the Host that it was asked under, and a worker that was given by name is asked
under that. The route notes on each response what was asked; a script, which does nothing when there is
none of these headers, compares. The path is as good for the client, who may have come by another scheme and name anyway.
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

NOTE_HEADER = "proxy-connection"
"""Base path, host and address of the worker that answered. The name is one that Envoy takes from every response that
leaves it; routes note it on Envoy's own answers too, some of which pass no filter."""

FILTER_NAME = "worker-address"

SCRIPT = """\
local names = {"location", "content-location", "link", "refresh"}

local function bare(authority)
  return (authority:lower():gsub("^.*@", ""):gsub(":80$", ""):gsub(":443$", ""))
end

-- Under which names, with its port, the worker may know itself.
local function worker_names(host, address)
  local ip, port = address:match("^(.*)(:%d+)$")
  local found = {address:lower(), host:lower():gsub(":%d+$", "") .. port}
  if ip:find("^127%.") or ip == "[::1]" then
    found[3] = "localhost" .. port
  end
  return found
end

local function path_at_worker(url, base, host, known)
  local authority, path = url:match("^[hH][tT][tT][pP][sS]?://([^/?#\\\\]*)(.*)$")
  if not authority then
    authority, path = url:match("^//([^/?#\\\\]*)(.*)$")
  end
  if not authority then
    return url
  end
  local asked = bare(authority)
  -- Envoy asks by name without a port; the worker may add its own.
  local own = asked == bare(host)
  for _, name in ipairs(known) do
    own = own or asked == bare(name)
  end
  if not own then
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

local function tells(text, known)
  text = text:lower():gsub("%%(%x%x)", function(code) return string.char(tonumber(code, 16)) end)
  for _, name in ipairs(known) do
    if text:find("%f[%w%.%-%[]" .. name:gsub("%p", "%%%0") .. "%f[%D]") then
      return true
    end
  end
  return false
end

local function hide(headers, note)
  local base, host, address = note:match("^(%S+) (%S+) (%S+:%d+)$")
  if not base then
    return
  end
  local known = worker_names(host, address)
  for _, name in ipairs(names) do
    local said = headers:get(name)
    if said then
      local shown = said
      if name:find("location") then
        shown = path_at_worker(said, base, host, known)
      end
      if tells(shown, known) then
        headers:remove(name)
      elseif shown ~= said then
        headers:remove(name)
        headers:add(name, shown)
      end
    end
  end
end

function envoy_on_response(handle)
  local headers = handle:headers()
  if not upgrades and headers:get(":status") == "101" then
    -- Without a status Envoy takes the answer for invalid and gives one of its own, 502.
    headers:remove(":status")
    return
  end
  for _, name in ipairs(names) do
    if headers:get(name) then
      local note = headers:get("proxy-connection")
      if note then
        hide(headers, note)
      end
      return
    end
  end
end
"""
"""A path that begins with two slashes would name another host, hence the dot."""


def build_worker_address_filter(*, upgrades: bool = False) -> HttpFilter:
    """Return the filter that compares; unless the request *upgrades* it refuses a worker's 101 as well."""
    code = DataSource(inline_string=f"local upgrades = {str(upgrades).lower()}\n{SCRIPT}")
    return HttpFilter(name=FILTER_NAME, typed_config=Any.pack(Lua(default_source_code=code)))


def build_note(base_path: str) -> HeaderValueOption:
    """Return what a route notes on the response of a worker, all of whose paths begin with *base_path*."""
    return HeaderValueOption(
        header=HeaderValue(
            key=NOTE_HEADER, value=f"{base_path or '/'} %REQ(:authority)% %UPSTREAM_REMOTE_ADDRESS%"
        ),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
