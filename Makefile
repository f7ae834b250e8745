# One environment per Python, installed when it is missing or when what it is made from has changed.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile -c constraints.txt
LEAN := $(VENV)/.installed-lean
FULL := $(VENV)/.installed-full
MADE_FROM := pyproject.toml constraints.txt

# Collectives on virtual CPU devices deadlock without a wide thread pool; JAX reads NPROC when it starts.
TEST_ENV = NPROC=32 JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu}

.PHONY: help demo test test-slow test-b200 lint bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /make \1|/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(LEAN) ## switch layouts in the middle of a batch, on this machine
	@$(BIN)/splash demo

test: $(FULL) ## the fast tests
	@$(TEST_ENV) $(BIN)/python -m pytest -m "not slow"

test-slow: $(FULL) ## the slow tests
	@$(TEST_ENV) $(BIN)/python -m pytest -m slow || [ $$? -eq 5 ] # 5: there are none

test-b200: $(FULL) ## the slow tests of kernels that need JAX 0.12, and so Python 3.12: B200's, and interpreted Mosaic GPU
	@$(TEST_ENV) $(BIN)/python -m pytest -m slow -k "b200 or blackwell or makes_bf16 or race" tests/kernels
	@$(TEST_ENV) $(BIN)/python -m pytest -m slow -k stands_on_wgmma tests/kernels/test_mla_decode_compiled.py # JAX 0.12 compiles Mosaic for one chip a process

lint: $(FULL) ## ruff and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(LEAN) ## measure decode and prefill on this machine
	@$(BIN)/python scripts/bench_engine.py --skip-hf

clean: ## remove everything that make made
	rm -rf .venv .venv-py* .cache .pytest_cache .ruff_cache .hypothesis build dist splash_demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "splash-jax needs Python 3.11 or newer: make PYTHON=python3.13")'
	@echo "make: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(LEAN): $(MADE_FROM) | $(BIN)/python
	@echo "make: installing splash-jax into $(VENV) (about a minute, once)"
	@$(PIP) -e .
	@touch $@

$(FULL): $(MADE_FROM) | $(BIN)/python
	@echo "make: installing splash-jax with its test and lint tools into $(VENV) (a minute or two, once)"
	@$(PIP) -e '.[test,dev]'
	@touch $(LEAN) $@
