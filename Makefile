# make serve   answer on http://127.0.0.1:8000 with the embedded default model
# make test    lint, types and the test suite; its last line says what it did not run (card, browser, slow)
# make test-all   the slow tests and the page in a browser too: for every week, and before a release (docs/develop.md)
# make coverage   the suite, and how much of the package it runs (docs/develop.md)
# make docs    docs/ as a site, in site/
# make rehearse   every command with the shipped pair, on the device that is there (docs/develop.md)
# All set up everything they need: .venv, the dependencies, the default weights.
# TORCH=cpu or TORCH=cuda   PyTorch's build, where the choice by the machine's cards is not the one you want;
#                           kept until `make clean` (docs/install.md)

PYTHON ?= python3
KEPT_TORCH := $(shell cat .venv/torch 2>/dev/null)
TORCH ?= $(KEPT_TORCH)
PORT ?= 8000
ARGS ?=
BIN := .venv/bin
# A process per core, one thread each; a file stays in one process, with what its tests share. Compiled tests
# are kept for the next run even where the shell forbids it: to rewrite their asserts takes each process 15 s.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile
# A plain path entry: the default import hook loses to a folder named blockdraft beside a script.
EDITABLE := --config-settings editable_mode=compat
# Bars for a terminal; a log has a line for each package.
PIP := [ -t 1 ] || export PIP_PROGRESS_BAR=off; $(BIN)/python -m pip install --disable-pip-version-check
ifneq ($(KEPT_TORCH),$(if $(KEPT_TORCH),$(TORCH)))
$(error TORCH=$(TORCH): .venv has the build for $(KEPT_TORCH) already: 'make clean' first)
endif
# PyPI's build is CUDA's on Linux and the CPU's elsewhere; its dependencies come with ours, from PyPI.
CPU_INDEX := https://download.pytorch.org/whl/cpu
IS_LINUX := $(filter Linux,$(shell uname))

.NOTPARALLEL:  # checks come before tests
.PHONY: serve test test-all suite coverage check setup lint format types weights docs bench rehearse clean

serve: .venv/installed
	$(BIN)/blockdraft serve --port $(PORT) $(ARGS)

test: check suite

test-all: check .venv/installed-browser .venv/installed-dflash
	$(PYTEST) $(ARGS)

suite: .venv/installed-dev
	$(PYTEST) -m "not slow" $(ARGS)

coverage: .venv/installed-dev
	$(PYTEST) -m "not slow" --cov --cov-report=term:skip-covered $(ARGS)

check: setup lint format types weights

setup: .venv/installed-dev

lint: .venv/installed-dev
	$(BIN)/ruff check .

format: .venv/installed-dev
	$(BIN)/ruff format --check --quiet .

# mypy takes one core: in a fresh clone another one compiles the tests meanwhile.
types: .venv/installed-dev
	@[ -d tests/__pycache__ ] || $(PYTEST) -n 0 --collect-only > /dev/null 2>&1 & $(BIN)/mypy; code=$$?; wait; exit $$code

weights: .venv/installed-dev
	$(BIN)/blockdraft fetch

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks.cpu $(ARGS)

rehearse: .venv/installed-dev
	$(BIN)/blockdraft fetch
	$(BIN)/python -m benchmarks.rehearsal --quick $(ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "blockdraft needs Python 3.11 or newer; set PYTHON=/path/to/it" >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/torch: .venv/bin/python constraints.txt
	@$(PYTHON) scripts/choose_torch.py $(CPU_INDEX) $(TORCH) > $@.chosen
	[ -z "$(IS_LINUX)" ] || [ "$$(cat $@.chosen)" != cpu ] || { \
		$(PIP) --no-deps --index-url $(CPU_INDEX) "$$(grep '^torch==' constraints.txt)"; }
	@mv $@.chosen $@

.venv/installed: .venv/torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt $(EDITABLE) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -c constraints.txt $(EDITABLE) -e '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed
	$(PIP) -c constraints.txt $(EDITABLE) -e '.[docs]'
	touch $@

.venv/installed-browser: .venv/installed-dev
	$(PIP) -c constraints.txt $(EDITABLE) -e '.[dev,browser,deploy]'
	touch $@

# Packages that tests compare drafters with; only files that need no other package are used.
.venv/installed-dflash: .venv/installed-dev
	$(PIP) --no-deps dflash==0.1.0 speculators==0.9.0 specforge==0.2.0
	touch $@

clean:
	rm -rf .venv build dist site .coverage *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
