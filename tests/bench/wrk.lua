-- Sends one request over and over; prints figures as one JSON line.
-- Arguments: a file with the body, then name=value for each header.
function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  for i = 2, #args do
    local name, value = args[i]:match("^([^=]+)=(.*)$")
    wrk.headers[name] = value
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "duration_s": %f, "p50_ms": %f, "p99_ms": %f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
