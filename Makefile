# Everything a person or CI runs. `make` alone lists it.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
UP_FLAGS ?=
FAST = $(BIN)/pytest -m 'not engines' -n auto

.DEFAULT_GOAL := help
.PHONY: help up setup peers test test-fast check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "hotprefix needs Python 3.11 or newer; none was found"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

up: $(STAMP) ## two real engines and a gateway; Ctrl-C stops them (UP_FLAGS="--engine sim" without vLLM)
	@$(BIN)/hotprefix up $(UP_FLAGS)

setup: $(STAMP) ## set up the engine and the model, start nothing
	@$(BIN)/hotprefix setup

peers: $(STAMP) ## set up what benchmarks compare with (LMCache, about 3.5 GB)
	@$(BIN)/hotprefix peers lmcache

test: $(STAMP) ## every test, those with two real engines too
	@status=0; $(BIN)/hotprefix setup || status=$$?; \
	case $$status in \
		0) $(FAST) && HOTPREFIX_REQUIRE_ENGINES=1 $(BIN)/pytest -m engines ;; \
		3) $(FAST) && $(BIN)/pytest -m engines ;; \
		*) exit $$status ;; \
	esac

test-fast: $(STAMP) ## the tests that need no real engine
	@$(FAST)

check: $(STAMP) ## lint, format, types, and the house's rules
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/pytest -q tests/test_house.py

clean: ## remove all that was built, the engine and the model too
	rm -rf $(VENV) .hotprefix build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
