# Everything a contributor runs. Each environment is made once; a stamp inside it remembers what was installed.
PYTHON ?= python3
VENV := .venv
PEER := .venv-peer
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check install --quiet

# Debian keeps the pip that `venv` copies in a package of its own; without it, the system's pip installs one.
make_venv = $(PYTHON) -m venv $(1) || \
	{ $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }

.PHONY: help quickstart test lint format bench
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a small model on two processes"
	@echo "make test         lint, then all tests"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite the code"
	@echo "make bench        this package, the released one and plain PyTorch side by side"

$(BIN)/python:
	$(call make_venv,$(VENV))

$(VENV)/.ready-examples: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing accelerate and what the examples need into $(VENV)"
	$(BIN)/python $(PIP) -c constraints.txt -e '.[examples]'
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing accelerate and what tests and lint need into $(VENV)"
	$(BIN)/python $(PIP) -c constraints.txt -e '.[test,dev]'
	@touch $@ $(VENV)/.ready-examples

$(PEER)/.ready: benchmarks/peer-requirements.txt constraints.txt
	@echo "installing the released package into $(PEER)"
	test -x $(PEER)/bin/python -a -x $(PEER)/bin/pip || $(call make_venv,$(PEER))
	$(PEER)/bin/python $(PIP) -c constraints.txt -r benchmarks/peer-requirements.txt
	@touch $@

# On CPU even where there is a GPU: two processes cannot share one.
quickstart: $(VENV)/.ready-examples
	ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2 examples/quickstart.py

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ARGS goes to pytest: make test ARGS="tests/unit -k sampler"
test: lint
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.ready-examples $(PEER)/.ready
	$(BIN)/python benchmarks/run.py $(ARGS)
