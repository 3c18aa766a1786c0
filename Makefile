# kvferry: `make help` lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN_READY := $(VENV)/.ready-run
export PYTHON TORCH_INDEX
export PYTHONSAFEPATH := 1
NODE_PACKAGES := containerd runc containernetworking-plugins nftables conntrack iproute2 procps
PROTOS := $(wildcard proto/kvferry/v1/*.proto)
CPP := $(wildcard kernels/cpu/*.[ch]pp kernels/cpu/*/*.[ch]pp)

.PHONY: release fuzz endurance siege sanitize help run setup redis test check format lint types layers proto golden verify lock bench bench-gpu bench-tiers bench-transfer bench-turns bench-hints bench-ranks bench-batches bench-bursts bench-adapters bench-constraints bench-cache-map bench-flow bench-gateway bench-resume bench-state bench-tenants bench-hostile-schemas bench-routing bench-scheduler bench-speculation train-head bench-moe bench-peers bench-picker bench-async-steps bench-steps bench-calibration bench-tls results explore faults test-clients test-long test-gpu test-cluster cluster-assets test-policies zero-loss cluster-up cluster-down image node-tools coverage clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUN_READY) ## set-up if needed, then `kvferry demo`: one request through prefill, hand-off and decode (ARGS="--connector nixl")
	@$(BIN)/kvferry demo $(ARGS)

setup: $(READY) redis ## .venv with everything `run` and `test` need; quick when nothing changed
	@echo "$(VENV) is ready"

# Never fails: without redis-server the tests of the redis tier fail with the same message.
redis: ## redis-server for the tests, from the distribution, if it can be installed
	@if command -v redis-server >/dev/null; then exit 0; fi; \
	as=; test "$$(id -u)" = 0 || as="sudo -n"; \
	if command -v apt-get >/dev/null && { test -z "$$as" || $$as true 2>/dev/null; }; then \
	  echo "installing redis-server, for the tests of the redis tier"; \
	  get() { $$as timeout 300 env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends redis-server >/dev/null 2>&1; }; \
	  get || { $$as timeout 120 apt-get update -qq >/dev/null 2>&1 && get; } || true; \
	  { $$as systemctl disable --now redis-server || $$as service redis-server stop; } >/dev/null 2>&1 || true; \
	fi; \
	command -v redis-server >/dev/null || echo "no redis-server: the tests of the redis tier will fail; install it with: apt-get install redis-server"

# One environment for running and testing; `run` needs a part of it.
$(shell tests/harness/set_up.sh modules)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard kernels/cpu/* kernels/cpu/*/* $(VENV)/.modules)
$(RUN_READY): requirements-build.lock requirements-run.lock $(SOURCES)
	@tests/harness/set_up.sh $$(if test -e $(READY); then echo test; else echo run; fi)

$(READY): requirements-build.lock requirements.lock $(SOURCES)
	@tests/harness/set_up.sh test

# Tests of one process run on all cores, those of whole stacks alone; with ARGS, one pytest runs what they select.
QUICK := not gpu and not cluster and not node and not scale and not long
test: $(READY) redis ## all tests that need no GPU and no cluster, except those of `make test-long`
ifdef ARGS
	@$(BIN)/python -m pytest -m "$(QUICK)" $(ARGS)
else
	@parallel=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(QUICK)" -n auto --maxprocesses 4 --dist worksteal \
	  tests/unit tests/contract || parallel=$$?; \
	$(BIN)/python -m pytest -m "$(QUICK) and not alone" -n auto --maxprocesses 2 --dist loadfile \
	  tests/integration || parallel=$$?; \
	$(BIN)/python -m pytest -m "$(QUICK) and alone" tests/integration tests/faults tests/fuzz && exit $$parallel
endif

check: $(READY) lint types layers verify ## format, lint, types, layers, generated files fresh

format: $(READY) ## rewrite the code in the house format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/clang-format -i $(CPP)

lint: $(READY)
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .
	@$(BIN)/python -m harness.house.sizes
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

types: $(READY)
	@$(BIN)/mypy

layers: $(READY) ## the import contracts of imports.toml
	@$(BIN)/lint-imports --config imports.toml

proto: $(READY) ## regenerate the gRPC code
	@$(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=proto --grpc_python_out=proto --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto $(PROTOS)

golden: $(READY) ## rewrite tests/golden and the generated parts of docs; review the diff
	@$(BIN)/python -m harness.house.golden write

verify: $(READY) ## check that generated files match their sources
	@$(BIN)/python -m harness.house.golden verify

RESOLVE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes
EXTRAS := $(foreach extra,serve nixl encryption bench operator picker state traces,--extra $(extra))
lock: $(READY) ## resolve the dependencies into requirements.lock and its parts for set-up (ARGS="--upgrade")
	@$(RESOLVE) pyproject.toml $(EXTRAS) --group dev -o requirements.lock $(ARGS)
	@$(RESOLVE) pyproject.toml $(EXTRAS) --group build -c requirements.lock -o requirements-run.lock
	@$(RESOLVE) --group build -c requirements.lock -o requirements-build.lock
	@$(RESOLVE) --group release -o requirements-release.lock $(ARGS)

release: $(READY) ## sdist, wheels, chart, SBOM and checksums of this commit in build/release; docs/releasing.md (ARGS="--image", "--fold")
	@PYTHONPATH=tests $(BIN)/python -m harness.release $(ARGS)

bench: $(READY) ## the benchmarks; rows appended to tests/bench/results/*.csv
	@$(BIN)/python tests/bench/bench_line.py $(ARGS)

explore: $(READY) ## every state of small hand-off scenarios, also with seeded bugs (ARGS="--faults 2"); docs/explorer.md
	@$(BIN)/python -m harness.explorer $(ARGS)

bench-transfer: $(READY) ## every connector against its bound; rows appended to tests/bench/results/transfer.csv
	@$(BIN)/python tests/bench/bench_transfer.py $(ARGS)

bench-turns: $(READY) redis ## an evicted prompt, loaded from each tier and recomputed; tests/bench/results/turns.csv
	@$(BIN)/python tests/bench/bench_turns.py $(ARGS)

bench-hints: $(READY) redis ## agents that wait for tools, with and without hints about the cache, in turn; tests/bench/results/hints.csv
	@$(BIN)/python tests/bench/bench_hints.py $(ARGS)

bench-ranks: $(READY) ## a model in one process and in two ranks, in turn; tests/bench/results/ranks.csv
	@$(BIN)/python tests/bench/bench_ranks.py $(ARGS)

bench-bursts: $(READY) ## inter-token latency under bursts of long prompts, disaggregated and aggregated; tests/bench/results/bursts.csv
	@$(BIN)/python tests/bench/bench_bursts.py $(ARGS)

bench-batches: $(READY) ## latencies of a client alone and beside a batch, in turn; tests/bench/results/batches.csv
	@$(BIN)/python tests/bench/bench_batches.py $(ARGS)

bench-tls: $(READY) ## hand-off and inter-token times with and without TLS between processes, in turn; tests/bench/results/tls.csv
	@$(BIN)/python tests/bench/bench_tls.py $(ARGS)

bench-constraints: $(READY) ## decode steps with and without constraints, in turn; tests/bench/results/constraints.csv
	@$(BIN)/python tests/bench/bench_constraints.py $(ARGS)

bench-adapters: $(READY) ## steps and prompts with and without LoRA adapters, in turn; tests/bench/results/adapters.csv
	@$(BIN)/python tests/bench/bench_adapters.py $(ARGS)

bench-cache-map: $(READY) ## the gateway's map of caches: intake, memory, lookups; tests/bench/results/cache_map.csv
	@$(BIN)/python tests/bench/bench_cache_map.py $(ARGS)

train-head: $(READY) ## an EAGLE-3 head for the embedded model, on one core (ARGS="--folder DIR")
	@nice $(BIN)/python tests/bench/train_head.py $(ARGS)

bench-speculation: $(READY) ## speculation by workload and batch size, in turn with none; tests/bench/results/speculation.csv
	@$(BIN)/python tests/bench/bench_speculation.py $(ARGS)

bench-gateway: $(READY) ## the gateway's overhead and streamed tokens, with a stub worker; tests/bench/results/gateway.csv
	@$(BIN)/python tests/bench/bench_gateway.py $(ARGS)

bench-resume: $(READY) ## what records of streams cost a gateway, in pairs; tests/bench/results/resume.csv
	@$(BIN)/python tests/bench/bench_resume.py $(ARGS)

bench-state: $(READY) ## what shared quotas cost a request, and what gateways admit; tests/bench/results/state.csv
	@$(BIN)/python tests/bench/bench_state.py $(ARGS)

bench-tenants: $(READY) ## latencies beside a tenant that sends a hundred times its quota; tests/bench/results/tenants.csv
	@$(BIN)/python tests/bench/bench_tenants.py $(ARGS)

bench-hostile-schemas: $(READY) ## latencies beside costly constraints; tests/bench/results/hostile_schemas.csv
	@$(BIN)/python tests/bench/bench_hostile_schemas.py $(ARGS)

bench-flow: $(READY) ## the gateway's flow controller: time per request, with and without a queue; tests/bench/results/flow.csv
	@$(BIN)/python tests/bench/bench_flow.py $(ARGS)

bench-picker: $(READY) ## the endpoint picker: picks a second over gRPC, and the time that it adds through Envoy; tests/bench/results/picker.csv
	@$(BIN)/python tests/bench/bench_picker.py $(ARGS)

bench-routing: $(READY) ## routing policies in the simulator, on five workloads; tests/bench/results/routing.csv
	@$(BIN)/python tests/bench/bench_routing.py $(ARGS)

bench-scheduler: $(READY) ## time to plan a step, by policy and number of requests; tests/bench/results/scheduler.csv
	@$(BIN)/python tests/bench/bench_scheduler.py $(ARGS)

results: $(READY) ## the papers' results, reproduced; docs/results.md and build/results.json; about 15 minutes (ARGS="--only H4")
	@$(BIN)/python -m harness.results $(ARGS)

bench-calibration: $(READY) ## simulated against live latencies, workers of this machine; tests/bench/results/calibration.csv; half an hour
	@$(BIN)/python tests/bench/bench_calibration.py $(ARGS)

bench-async-steps: $(READY) ## idle time between a worker's steps, asynchronous steps on and off, in turn; tests/bench/results/async_steps.csv
	@$(BIN)/python tests/bench/bench_async_steps.py $(ARGS)

bench-steps: $(READY) ## time of steps by their work, and the device profile of the simulator; tests/bench/results/steps.csv
	@$(BIN)/python tests/bench/bench_steps.py $(ARGS)

bench-moe: $(READY) ## mixtures of experts beside transformers and llama.cpp on this CPU, in turn; tests/bench/results/moe.csv
	@$(BIN)/python tests/bench/bench_moe.py $(ARGS)

bench-peers: $(READY) ## comparison with vLLM, OpenVINO GenAI and llama.cpp on this CPU; tests/bench/results/peers.csv; over an hour
	@$(BIN)/python tests/bench/peers/run.py --csv tests/bench/results/peers.csv $(ARGS)

test-long: $(READY) redis ## thousands of requests over each transport and tier, all faults injected into running stacks: minutes (some need root)
	@$(BIN)/python -m pytest -m "long and not cluster" $(ARGS)

endurance: $(READY) ## all features at once for 10 minutes, each answer compared with the request alone (ARGS="--seconds 60")
	@$(BIN)/python -m harness.endurance $(ARGS)

siege: $(READY) ## hostile clients against `kvferry up`, and the latency of a canary; 10 minutes (ARGS="--seconds 60")
	@$(BIN)/python -m harness.siege $(ARGS)

test-clients: $(READY) ## quick starts of client libraries, benchmarks and agents, each in build/clients, against `kvferry up`; installs several GB once (ARGS="openai litellm")
	@$(BIN)/python -m harness.clients.matrix $(ARGS)

fuzz: $(READY) ## fuzzers of everything that comes from outside, an hour each (ARGS="--seconds 600 --target gguf")
	@$(BIN)/python -m harness.fuzz $(ARGS)

faults: $(READY) redis ## the fault injection alone; rewrites docs/faults.md
	@$(BIN)/python -m pytest -m long tests/faults $(ARGS)
	@$(BIN)/python -m harness.faults

bench-tiers: $(READY) redis ## Redis and disk as tiers; rows appended to tests/bench/results/tiers.csv
	@$(BIN)/python tests/bench/bench_tiers.py $(ARGS)

sanitize: $(READY) ## the compiled kernels under the address, undefined-behaviour and thread sanitizers: minutes of compiling
	@for sanitizer in address,undefined,float-cast-overflow thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$sanitizer -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DKVFERRY_SANITIZE=$$sanitizer \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) >/dev/null && \
	  $(BIN)/ninja -C build/sanitize-$$sanitizer kvferry_check && echo "$$sanitizer:" && build/sanitize-$$sanitizer/kvferry_check || exit 1; \
	done

coverage: $(READY) ## branch coverage by the unit tests; fails where a pure module has less than 95 %
	@mkdir -p build
	@$(BIN)/python -m pytest tests/unit -q --cov --cov-report=json:build/coverage.json $(ARGS)
	@$(BIN)/python -m harness.house.pure_coverage build/coverage.json

# Compiled kernels, not interpreted ones; without a GPU each test is skipped and says so.
test-gpu: $(READY) ## the tests marked gpu, with compiled kernels on the GPU of this machine
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu $(ARGS)

# Rows are appended as they come: a run that is cut short leaves what it has.
bench-gpu: $(READY) ## all kernels, decode steps of an 8B shape, comparison with transformers, on the GPU of this machine; under 9 minutes; tests/bench/results/gpu.csv
	@TRITON_INTERPRET=0 timeout 540 $(BIN)/python tests/bench/bench_gpu.py $(ARGS)

cluster-assets: $(READY) node-tools ## the binaries of a real Kubernetes and Prometheus, built once with Go (about 15 minutes) into the user's cache
	@$(BIN)/python -m harness.kube build control node tools
	@$(BIN)/python -m harness.prometheus

test-cluster: cluster-assets ## the tests on a real Kubernetes on this machine, as root with a node
	@$(BIN)/python -m harness.kube.side_by_side $(ARGS)

zero-loss: $(READY) node-tools ## rollouts, kills and scaling of a pool under load, and the table of docs/operations.md; minutes, as root
	@$(BIN)/python -m harness.kube build control node tools >/dev/null
	@$(BIN)/python -m pytest -m "long and not policies" tests/cluster $(ARGS)
	@$(BIN)/python -m harness.pools

test-policies: cluster-assets ## the NetworkPolicies of a pool on a node that enforces them, as root; builds kube-router once (3 minutes)
	@if ! command -v ipset >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing iptables and ipset"; \
	  timeout 300 env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends iptables ipset >/dev/null 2>&1 || true; \
	fi
	@$(BIN)/python -m pytest -m policies tests/cluster $(ARGS)

cluster-up: $(READY) node-tools ## start the same cluster in build/cluster to try kvferry; continue with docs/try-on-kubernetes.md
	@$(BIN)/python -m harness.kube build control node tools >/dev/null
	@$(BIN)/python -m harness.kube up build/cluster --node --model smollm2-135m-instruct $(ARGS)

cluster-down: $(READY) ## stop that cluster
	@$(BIN)/python -m harness.kube down build/cluster

image: $(READY) ## build/image/kvferry.tar: an OCI archive with kvferry and all that it needs, built without a daemon (ARGS=--cuda)
	@$(BIN)/python -m harness.kube image build/image/kvferry.tar $(ARGS)

# Never a reason to fail: without them the tests of the node are skipped, and say why.
node-tools: ## containerd and other packages of a node, from the distribution, if they can be installed
	@have() { test -e /usr/lib/cni/bridge && for tool in containerd runc nft conntrack ip sysctl; do command -v $$tool >/dev/null || return 1; done; }; \
	if have; then exit 0; fi; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing $(NODE_PACKAGES), for a node of the tests' cluster"; \
	  get() { timeout 300 env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(NODE_PACKAGES) >/dev/null 2>&1; }; \
	  get || { timeout 120 apt-get update -qq >/dev/null 2>&1 && get; } || true; \
	  { systemctl disable --now containerd || service containerd stop; } >/dev/null 2>&1 || true; \
	fi; \
	have || echo "no node: as root, apt-get install $(NODE_PACKAGES)"

clean: ## remove the environment and all build output
	@if test -e build/cluster/state.json && test -x $(BIN)/python; then $(BIN)/python -m harness.kube down build/cluster; fi
	@rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
