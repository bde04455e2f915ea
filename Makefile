# Everything a person runs. `make demo` and `make test` set up what they need on a machine that has Python 3.11 or newer.
# The Kafka parts need Java 17 and Maven, the browser tests Debian's chromium; without them those parts say so and are skipped.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help setup demo test lint check-types unit bench-ingest bench-attribution bench-bridge bench-router bench-reuse bench-truth constraints clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(INSTALLED) ## the environment in .venv, with pinned and hashed packages

$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Warmwatch needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "This Python has no venv; on Debian: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@echo "Installing the pinned packages (about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

# make demo                       until Ctrl-C, dashboard in the browser
# make demo KAFKA=1               the same over a real Kafka
# make demo SECONDS=60 HEADLESS=1 that long without dashboard; prints a summary, fails unless every request is accounted for
demo: $(INSTALLED) ## a fleet of mock workers with everything else, and the dashboard
	@$(BIN)/warmwatch demo $(if $(filter-out 0,$(KAFKA)),--kafka) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(filter-out 0,$(HEADLESS)),--headless)

test: lint check-types unit ## all checks and tests

lint: $(INSTALLED) ## style and import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports

check-types: $(INSTALLED) ## mypy, strict
	@$(BIN)/mypy

unit: $(INSTALLED) ## pytest, Kafka and browser included where they can run
	@$(BIN)/pytest

bench-ingest: $(INSTALLED) ## Kafka -> published DuckDB, block events a second
	@$(BIN)/python -m bench.bench_ingest

bench-attribution: $(INSTALLED) ## why tokens were computed again: requests and block events a second, memory
	@$(BIN)/python -m bench.bench_attribution

bench-bridge: $(INSTALLED) ## engine's ZMQ -> stream, blocks a second
	@$(BIN)/python -m bench.bench_bridge

# make bench-router               about fifteen minutes
# make bench-router QUICK=1       about two
bench-router: $(INSTALLED) ## our router beside its peers, and the decision alone
	@$(BIN)/python -m bench.bench_router $(if $(filter-out 0,$(QUICK)),--quick)
	@$(BIN)/python -m bench.bench_decision $(if $(filter-out 0,$(QUICK)),--quick)

bench-reuse: $(INSTALLED) ## reuse curves on the public traces: speed, and errors beyond the memory budget
	@$(BIN)/python -m bench.bench_reuse

bench-truth: $(INSTALLED) ## causes of the collector against the simulator's full knowledge, block by block
	@$(BIN)/python -m bench.bench_truth

constraints: ## pin anew (needs uv); review the change before you commit it
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	  --extra all --group dev pyproject.toml -o constraints.txt

clean: ## remove the environment and caches, not data
	rm -rf $(VENV) .state/bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
