# make run     set up what is missing, then open the window (or the terminal chat where there is no display)
# make test    set up what is missing, then everything that must hold: lint, types, import walls, tests
# make help    the rest

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SET_UP := PYTHON="$(PYTHON)" VENV="$(VENV)" bash packaging/linux/set_up.sh

.PHONY: help run test setup setup-test lint format types pytest slow bench readme screenshot doctor clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: setup ## open Ridgeline
	@$(BIN)/python -m app $(ARGS)

test: setup-test lint types pytest ## lint, types, import walls and the tests

setup: ## virtual environment, system libraries, packages, starter model
	@$(SET_UP) run

setup-test: ## the same with what the tests need
	@$(SET_UP) test

lint: setup-test ## ruff: errors and layout
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .

format: setup-test ## let ruff repair and lay out the code
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

types: setup-test ## mypy
	@$(BIN)/python -m mypy

pytest: setup-test ## the tests that are not slow
	@$(BIN)/python -m pytest $(ARGS)

slow: setup-test ## the slow tests too
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)

bench: setup ## measure this machine with the starter model
	@$(BIN)/python -m app bench $(ARGS)

readme: setup-test ## write the README's generated parts again
	@$(BIN)/python packaging/readme.py

screenshot: setup-test ## draw resources/screenshot.png again
	@$(BIN)/python packaging/screenshot.py

doctor: setup ## what this machine has and lacks
	@$(BIN)/python -m app doctor

clean: ## remove the virtual environment and caches
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
