# Every target sets up what it needs, by uv; where there is none, pip installs it into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Where it is set, every start of Python compiles what it imports again: 5 s for torch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: ci help setup train test test-fast lint requirements

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 15

setup:  ## create .venv with what training and its tests need; EXTRAS="dali table" adds packages that errors name, EXTRAS=all all
	@command -v uv >/dev/null || test -x $(BIN)/uv || \
		{ $(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet uv; }
	@PATH="$$PATH:$(BIN)"; { test -x $(BIN)/python || uv venv --quiet --python $(PYTHON) .venv; } && \
	uv pip install --quiet --python $(BIN)/python --constraints requirements.txt \
		--requirements pyproject.toml $(if $(filter all,$(EXTRAS)),--all-extras,$(EXTRAS:%=--extra %) --extra dev)
	@touch .venv/ready

.venv/ready: pyproject.toml requirements.txt
	@$(MAKE) --no-print-directory setup

train: .venv/ready  ## train the default model on the embedded digits
	PATH="$(CURDIR)/$(BIN):$$PATH" $(or $(shell sed -n 's/^Start with `\(.*\)`.*/\1/p' train.py),python train.py)

test: .venv/ready  ## run the quick tests, in as many processes as there are CPUs; SLOW=1: all tests
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		$(if $(SLOW),,-m "not slow")
	@test ! -e /proc/driver/nvidia/version || $(BIN)/python -m pytest -m gpu

test-fast: .venv/ready  ## run the quick tests that start no training
	$(BIN)/python -m pytest -n logical --maxprocesses 8 -m "not slow" $(wildcard $(addprefix tests/test_,architecture.py config.py plan.py index.py task*.py model*.py runtime.py))

lint: .venv/ready  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ci: SLOW = 1
ci: export NO_SKIPS = 1
ci: lint test  ## run everything: what has to pass before a change lands

requirements:  ## pin the newest versions that pyproject.toml allows (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-emit-index-url \
		--custom-compile-command "make requirements" pyproject.toml -o requirements.txt

# Targets of folders that have some.
-include */*.mk
