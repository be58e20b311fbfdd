# make demo: set up and run the main job.  make test: set up and test.  See README.md and CONTRIBUTING.md.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Test files run in this many processes, each with one thread: make test PROCESSES=8. Tests also wait, so five processes
# are right for two cores.
PROCESSES ?= 5
# Hundreds of processes that tests start import Polar; without bytecode files each would compile it again.
unexport PYTHONDONTWRITEBYTECODE
LLAMA ?= $(or $(POLAR_HOME),$(HOME)/.polar)/llama-server/0.3.36

.PHONY: setup demo test-fast quick-tests test tests test-full test-harnesses test-llama test-podman test-foreign coverage lint types format image clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Polar needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Polar and its packages into $(VENV): a few minutes, most of them for PyTorch."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[local,docker,postgres,dev]'
	touch $@

demo: setup
	$(BIN)/polar run swe-task --samples 4
	@echo "To have polar on your PATH: . $(BIN)/activate"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Lint, types, and the tests that start no process, load no model and wait for nothing.
test-fast: lint
	$(MAKE) --jobs 2 types quick-tests

quick-tests: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --processes 2 -m 'not slow and not full and not by_command'

# Everything that needs no service.
test: lint
	$(MAKE) --jobs 2 types tests

tests: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --processes $(PROCESSES) --durations=12 -m 'not full and not by_command'

# The same, and the lines that no test reached.
coverage: setup
	$(BIN)/pytest -m 'not full and not by_command' --cov --cov-report=term:skip-covered

# With real vLLM, harness programs, Docker and PostgreSQL; scripts/with_services.sh installs, starts and stops them.
test-full: setup
	scripts/with_services.sh $(BIN)/pytest -q --processes 3 --durations=25 -m 'full and not by_command'

# OpenHands, aider, terminus-2 and Mistral Vibe: installing takes 4 to 10 minutes, and three of them need Python 3.12.
test-harnesses: setup
	$(BIN)/pytest -m by_command --ignore-glob='*llama*' --ignore-glob='*podman_real*'

# On a real llama-server, which is built once (11 minutes of processor time). Four harnesses play if installed.
test-llama: setup
	test -x $(LLAMA)/bin/llama-server || PYTHON=$(BIN)/python scripts/llama_server.sh install $(LLAMA)
	POLAR_LLAMA=$(LLAMA) $(BIN)/pytest -m by_command tests/engines/test_llamacpp_real.py tests/conformance/test_llama_real.py

# The docker sandbox on rootless Podman. As root it installs Podman and makes an ordinary user.
test-podman: setup
	scripts/rootless_podman.sh $(BIN)/pytest -p no:cacheprovider -k 'docker or podman or nothing_opens' tests/sandboxes tests/rollouts/test_run.py tests/rollouts/test_podman_real.py

# Suites of other projects (AI SDK, LangChain, agent frameworks) against Polar: installing them takes minutes.
test-foreign: setup
	scripts/foreign_suites.sh

image:
	docker build -t polar:latest .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .coverage
