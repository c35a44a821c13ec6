"""The part of HTTP/2 and gRPC that one peer, Envoy, speaks to this service.

Why not a library: grpc.aio costs several times the whole budget of a request, and ``h2`` (pure Python)
more than the budget alone; see ADR 10 for the figures. ``hpack`` does the header compression.
"""
