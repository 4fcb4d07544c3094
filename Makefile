# Everything runs from a virtual environment in .venv that the targets set up themselves.
# Needed: make, Python 3.11 or newer with venv and its headers, a C compiler.
# `make PYTHON=/path/to/python test` picks a Python.

.DEFAULT_GOAL := help

# A name on PATH is not enough (a version manager's shim may stand for nothing): try it.
PYTHON ?= $(shell python3.11 -c '' >/dev/null 2>&1 && echo python3.11 || echo python3)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
VENV_STAMP := $(VENV)/.created
BASE_STAMP := $(VENV)/.installed-base
DEV_STAMP := $(VENV)/.installed-dev
BUILD_INPUTS := pyproject.toml setup.py shardcast/codec/_kernel.c

# `make test ARGS="-k head -x"`; `make test COVERAGE=1` measures as well.
ARGS ?=
# Without ARGS the whole suite, in parts beside each other; what fails is tried once more, alone, and
# named if it passes then (tests/__main__.py).
SUITE := $(if $(ARGS),pytest $(ARGS),tests)
COVERAGE ?=

# The tests of a real inference engine have an environment of their own, of about 3 GB.
ENGINE_VENV := .venv-engine
ENGINE_STAMP := $(ENGINE_VENV)/.installed

.PHONY: help test engine test-engine demo lint types coverage format clean

help:
	@echo "make test      run the tests (ARGS=... goes to pytest)"
	@echo "make test-engine  the tests that need a real engine; installs vLLM for CPUs first (x86-64, 3 GB)"
	@echo "make demo      a whole tree on this machine, in under a minute"
	@echo "make lint      ruff, formatting, import contracts"
	@echo "make types     mypy, strict"
	@echo "make coverage  the tests with branch coverage, and its gates"
	@echo "make format    let ruff fix and format what it can"
	@echo "make clean     remove everything that the targets made"

$(VENV_STAMP):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, and '$(PYTHON)' is not ($$("$(PYTHON)" --version 2>&1))." >&2; \
	  echo "       Name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || { \
	  echo "error: '$(PYTHON)' has no venv module (on Debian: apt-get install python3-venv)." >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(BASE_STAMP): $(VENV_STAMP) $(BUILD_INPUTS)
	$(PIP) install --quiet --editable .
	@touch $@

$(DEV_STAMP): $(VENV_STAMP) $(BUILD_INPUTS)
	$(PIP) install --quiet --editable '.[dev]'
	@touch $(BASE_STAMP) $@

ifdef COVERAGE
test: $(DEV_STAMP)
	@$(BIN)/coverage erase
	$(BIN)/coverage run -m $(SUITE)
	@$(BIN)/coverage combine --quiet
else
test: $(DEV_STAMP)
	$(BIN)/python -m $(SUITE)
endif

$(ENGINE_STAMP): $(BUILD_INPUTS) tests/engine/install.sh
	@test -x $(ENGINE_VENV)/bin/python || "$(PYTHON)" -m venv --clear $(ENGINE_VENV)
	tests/engine/install.sh $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[dev]'
	@touch $@

engine: $(ENGINE_STAMP)

test-engine: $(ENGINE_STAMP)
	SHARDCAST_ENGINE_TESTS=1 $(ENGINE_VENV)/bin/python -m $(if $(ARGS),pytest --timeout 300 $(ARGS),tests.engine)

coverage:
	@$(MAKE) --no-print-directory test COVERAGE=1
	@echo "coverage of the protocol (gate: 100 %, branches included)"
	$(BIN)/coverage report --include='*/shardcast/protocol/*' --fail-under=100
	@echo "coverage over all (gate: 90 %, branches included)"
	$(BIN)/coverage report --fail-under=90

demo: $(BASE_STAMP)
	$(BIN)/shardcast demo $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV_STAMP)
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(ENGINE_VENV) build dist *.egg-info htmlcov .coverage .coverage.* .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
