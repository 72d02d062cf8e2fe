# Every target sets up what it needs; uv is used if it is installed, pip otherwise.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup train test test-fast bench gpu-check lint requirements

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 15

setup: .venv/ready  ## create .venv with the pinned dependencies

.venv/ready: requirements.txt
	@if command -v uv >/dev/null; then \
		uv venv --quiet --allow-existing --python $(PYTHON) .venv && \
		uv pip install --quiet --python $(BIN)/python -r requirements.txt; \
	else \
		$(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet -r requirements.txt; \
	fi
	@touch $@

train: setup  ## train the default model on the embedded digits
	$(BIN)/python train.py

test: setup  ## run all tests, in as many processes as there are CPUs
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile
	@test ! -e /proc/driver/nvidia/version || $(BIN)/python -m pytest -m gpu

test-fast: setup  ## run the tests that start no training
	$(BIN)/python -m pytest $(addprefix tests/test_,config.py documents.py plan.py index.py tasks.py models.py runtime.py)

bench: setup  ## measure this machine and draw a report, with FULL=1 at the published sizes
	$(BIN)/python -m benchmarks $(if $(FULL),full=true)

gpu-check: setup  ## check on this machine's GPUs what only they can show, within 20 minutes
	$(BIN)/python -m benchmarks.gpu_check

lint: setup  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

requirements:  ## pin the newest versions that pyproject.toml allows (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --extra dev --extra bench --extra export --no-emit-index-url \
		--custom-compile-command "make requirements" pyproject.toml -o requirements.txt
