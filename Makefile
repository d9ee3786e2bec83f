# One command each; `make` alone lists them.
PYTHON ?= python3
ARGS ?=
# One of them waits for Slurm most of the time.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
CORPUS := corpora/stdlib.h5
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install train test bench reproduce lab lab-down lint test-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## make .venv with the pinned versions and .venv/bin/hpctrain (PYTHON=python3)

# torch first and by itself, so that nothing else decides which one is taken.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) is not there; on Debian or Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), and hpctrain needs 3.10 or later;" \
	    "name another with: make install PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make environments; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Installed $(BIN)/hpctrain; '. $(BIN)/activate' puts it on your path."

train: $(STAMP) ## install, build a corpus from Python's own sources, train the default recipe on it
	$(BIN)/hpctrain data stdlib $(CORPUS)
	$(BIN)/hpctrain train gpt-tiny $(ARGS)

# Compiled once, and not by each of hundreds of ranks.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP) ## install (Slurm too, if root), run all tests (ARGS="-k name", WORKERS=3)
	@.ci/slurm
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

bench: $(STAMP) ## measure speed beside other tools; minutes, wants a quiet machine
	$(BIN)/python benchmarks/run.py $(ARGS)

reproduce: $(STAMP) ## the planner over every published table: docs/planner-errors.md and its pictures (ARGS=folder)
	$(BIN)/python -m benchmarks.planner.reproduce $(ARGS)

lab: $(STAMP) ## bring up the practice cluster: a private Slurm of 4 nodes (root; make lab-down ends it)
	@.ci/slurm
	$(BIN)/hpctrain lab up --nodes 4 --gpus 4

lab-down: ## take the practice cluster down
	$(BIN)/hpctrain lab down

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A GPU machine may have no way to install anything: whatever Python is there does.
test-gpu: ## checks on a CUDA machine, without network, at most 8 minutes
	PYTHONPATH=. $(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py $(ARGS)

clean: ## remove .venv, build outputs and caches; keeps corpora/ and runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hpctrain tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
