"""The sidecar beside Envoy: picks the worker of each request over ext_proc and is Envoy's xDS server.

Read in this order: ``exchange`` (one request), ``router`` (the pick), ``pool`` (workers and leases),
``xds`` (what Envoy is told), then the shells ``service``, ``admin``, ``launcher`` and ``main``.
"""

__version__ = "0.1.0"
