# make serve   answer on http://127.0.0.1:8000 with the embedded default model
# make test    lint, types and the test suite; its last line says what it did not run (card, browser, slow)
# make test-all   the slow tests and the page in a browser too: for every week, and before a release (docs/develop.md)
# make rehearse   every command with the shipped pair, on the device that is there (docs/develop.md)
# All set up everything they need: .venv, the dependencies, the default weights.
# TORCH=cpu   PyTorch's build without CUDA, a tenth of the download on Linux; kept until `make clean` (docs/install.md)

PYTHON ?= python3
TORCH ?= $(if $(wildcard .venv/torch-cpu),cpu)
PORT ?= 8000
ARGS ?=
BIN := .venv/bin
# A process per core, one thread each; a file stays in one process, with what its tests share.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile
# A plain path entry: the default import hook loses to a folder named blockdraft beside a script.
EDITABLE := --config-settings editable_mode=compat
# Bars for a terminal; a log has a line for each package.
PIP := [ -t 1 ] || export PIP_PROGRESS_BAR=off; $(BIN)/python -m pip install --disable-pip-version-check
# PyPI alone serves by default; its PyTorch for Linux brings CUDA along.
ifeq ($(TORCH),cpu)
CHOSEN_TORCH := .venv/torch-cpu
DOWNLOAD := about 0.3 GB
else ifneq ($(TORCH),)
$(error TORCH=$(TORCH) is unknown: TORCH=cpu takes PyTorch's CPU build, none takes PyPI's)
else ifeq ($(shell uname),Linux)
DOWNLOAD := about 3 GB, most of it for NVIDIA cards ('make serve TORCH=cpu': 0.3 GB)
else
DOWNLOAD := about 0.2 GB
endif
# Said before the first package comes.
ANNOUNCE := @[ -e .venv/torch-cpu ] || [ -e .venv/installed ] || \
	echo "Installing into .venv, which takes some minutes, once. To download: $(DOWNLOAD)."

.PHONY: serve test test-all check bench rehearse clean

serve: .venv/installed
	$(BIN)/blockdraft serve --port $(PORT) $(ARGS)

test: check
	$(PYTEST) -m "not slow" $(ARGS)

test-all: check .venv/installed-browser
	$(PYTEST) $(ARGS)

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/blockdraft fetch

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks.cpu $(ARGS)

rehearse: .venv/installed-dev
	$(BIN)/blockdraft fetch
	$(BIN)/python -m benchmarks.rehearsal --quick $(ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "blockdraft needs Python 3.11 or newer; set PYTHON=/path/to/it" >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/torch-cpu: .venv/bin/python constraints.txt
	@if [ -e .venv/installed ] && [ ! -e $@ ]; then \
		echo "PyTorch is there already, from PyPI: 'make clean' first, then TORCH=cpu" >&2; exit 2; fi
	$(ANNOUNCE)
	$(PIP) --index-url https://download.pytorch.org/whl/cpu "$$(grep '^torch==' constraints.txt)"
	touch $@

.venv/installed: .venv/bin/python $(CHOSEN_TORCH) pyproject.toml constraints.txt
	$(ANNOUNCE)
	$(PIP) -c constraints.txt $(EDITABLE) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -c constraints.txt $(EDITABLE) -e '.[dev]'
	touch $@

.venv/installed-browser: .venv/installed-dev
	$(PIP) -c constraints.txt $(EDITABLE) -e '.[dev,browser]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
