# BlitzScale on one machine. Needs Python >= 3.11 and make; everything else goes into .venv.
#
#   make up                              serve a demo model with random weights
#   make up ARGS="/models/my-llama --workers 4"

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
	$(if $(shell $(name) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(name))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# What workers compute on: cpu, gpu-cu12 or gpu-cu13 (docs/gpu.md).
DEVICE ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu-cu13,cpu)
CONSTRAINTS := -c constraints.txt -c constraints-$(if $(filter gpu-cu13,$(DEVICE)),cu13,cu12).txt
# PyPI's torch for Linux is that of CUDA 13, with gigabytes of its libraries: any other comes from an index of PyTorch's,
# if that can be reached. TORCH_INDEX= takes it from pip's usual index.
TORCH_INDEX ?= $(addprefix https://download.pytorch.org/whl/,$(patsubst gpu-cu12,cu126,$(filter-out gpu-cu13,$(DEVICE))))
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help up test test-boards test-clients test-containers test-containers-short test-gpu test-kernels test-page test-vllm lint format kubernetes reference boards bench clean install

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

install: $(STAMP) ## Create .venv and install everything into it

$(STAMP): pyproject.toml $(wildcard constraints*.txt)
	@test -n "$(PYTHON)" || { echo "BlitzScale needs Python 3.11 or newer; $$(python3 --version 2>&1) is what 'python3' is here. Install one, or: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "BlitzScale needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(VENV) has a Python older than 3.11: make clean, then again" >&2; exit 1; }
	@echo "installing into $(VENV) ..."
	@if [ -n "$(TORCH_INDEX)" ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --timeout 15 --no-deps \
			--index-url "$(TORCH_INDEX)" "$(TORCH)" \
		|| echo "torch is not to be had from $(TORCH_INDEX): taking it from pip's usual index"; fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[dev,$(DEVICE)]'
	@touch $@

up: $(STAMP) ## Start everything and serve until Ctrl-C (ARGS="MODEL_DIR --workers 4 ...")
	@exec $(BIN)/blitzscale up $(ARGS)

# With byte code kept: each of the test processes, and each service that they start, would compile every module again.
test: $(STAMP) ## Run the tests (ARGS="-k name ...")
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(ARGS)

# One process: there is one deployment. Longer than any other test: it builds images and waits for health checks.
test-containers: $(STAMP) ## Build the images and test docker-compose and the Kubernetes YAML (needs a Docker engine)
	@$(BIN)/python -m tests.containers.engine
	@$(BIN)/python -m pytest -n 0 -s -v --timeout 1800 --maxfail 5 tests/containers $(ARGS)

# A few minutes of it: images as they should be, the whole of Kubernetes' YAML from nothing to an answer, a rollout.
SHORT := test_images or test_kubelet or comes_up or restarted_rollout and gateway

test-containers-short: $(STAMP) ## A few minutes of test-containers
	@$(MAKE) --no-print-directory test-containers ARGS='-k "$(SHORT)"'

AXE := axe-core@4.10.2

test-page: $(STAMP) ## Test the page in a browser (needs Chromium, npm and, for links with a rate, root)
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[page]'
	@test -f build/page/package/axe.min.js || { mkdir -p build/page && cd build/page && npm pack --silent $(AXE) && tar xzf axe-core-*.tgz; }
	@$(BIN)/python -m pytest -n 0 -v tests/page $(ARGS)

# An environment of its own, on top of .venv: gigabytes of compilers and of what only workers on GPUs load.
KERNELS := build/kernels-venv
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(KERNELS)/.installed: tests/kernels/requirements.txt $(wildcard constraints*.txt) | $(STAMP)
	@echo "installing into $(KERNELS) ..."
	@$(BIN)/python -m venv --clear $(KERNELS)
	@site=$$($(BIN)/python -c '$(SITE)') && echo "import site; site.addsitedir('$$site')" \
		> "$$($(KERNELS)/bin/python -c '$(SITE)')/below.pth"
	@$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		-c constraints.txt -c constraints-cu13.txt -r tests/kernels/requirements.txt
	@touch $@

# Where FlashInfer and Triton are installed, these other tests do not pass by.
WITH_KERNELS := $(addprefix tests/services/worker/,device/cuda/test_xxh3.py \
	engine/test_flashinfer_package.py engine/test_flashinfer_signatures.py)

test-kernels: $(KERNELS)/.installed ## Compile kernels for GPUs, and load them, without one (1.9 GB into build/)
	@$(KERNELS)/bin/python -m pytest -n 0 -v tests/kernels $(WITH_KERNELS) $(ARGS)

# vLLM's own environment: no package of it is shared. The torchvision that comes along is of CUDA and does not load.
VLLM := build/vllm

$(VLLM)/.installed: tests/vllm/requirements.txt services/worker/vllm/pyproject.toml | $(STAMP)
	@echo "installing into $(VLLM) ..."
	@$(BIN)/python -m venv --clear $(VLLM)
	@[ -z "$(TORCH_INDEX)" ] || $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --retries 0 \
		--timeout 15 --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH)" || true
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/vllm/requirements.txt
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e services/worker/vllm
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM)/.installed ## Test vLLM as a worker's engine, on the CPU (its environment takes gigabytes in build/)
	@BLITZ_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -n 0 -v tests/vllm $(ARGS)

# An environment of its own, without .venv's packages, of which clients want other versions. All of it is pinned, and so
# nothing is resolved. Made again: tests/clients/requirements.txt says how.
CLIENTS := build/clients

$(CLIENTS)/.installed: $(wildcard tests/clients/*.txt) | $(STAMP)
	@echo "installing into $(CLIENTS) ..."
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		-r tests/clients/constraints.txt
	@touch $@

test-clients: $(CLIENTS)/.installed ## Test other people's clients against a stack (1.3 GB into build/)
	@PYTHONDONTWRITEBYTECODE= $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini -v tests/clients $(ARGS)

# One process: there is one GPU. Tests of a machine without one skip these.
test-gpu: $(STAMP) ## Run the tests that need a GPU, rows of "bench gpu" with little to do (needs CUDA, FlashInfer and CuPy)
	@$(BIN)/python -m pytest -n 0 -v -m gpu $(ARGS)

test-boards: $(STAMP) ## Test the dashboard and the alerts against a stack (needs Prometheus: apt install prometheus)
	@$(BIN)/python -m pytest -n 0 -v tests/boards $(ARGS)

lint: $(STAMP) ## Check style, types, import order, names and wall clocks
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/private_names.py
	@$(BIN)/python .ci/class_names.py
	@$(BIN)/python .ci/wall_clocks.py

format: $(STAMP) ## Put the code into its format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

kubernetes: ## Render compose/kubernetes/rendered again (needs kubectl)
	@python3 .ci/render_kubernetes.py

reference: $(STAMP) ## Make docs/reference again (settings, metrics, commands)
	@$(BIN)/python -m compose.reference

boards: $(STAMP) ## Make compose/observability again
	@$(BIN)/python -m compose.boards

bench: $(STAMP) ## Measure this machine (ARGS="--help" lists what)
	@$(BIN)/blitzscale bench $(ARGS)

clean: ## Remove the environment and all caches
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
