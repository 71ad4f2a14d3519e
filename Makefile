# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# One torch for reproducible figures; `make demo TORCH='torch>=2.11'` takes another.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed-lambert
LOCAL = . $(BIN)/activate &&

.PHONY: demo test lint format test-slow test-slurm test-gpu bench-prep bench-loader bench-optimizer bench-step bench-checkpoint bench-export bench-sentences five-minute clean

demo: $(STAMP)  ## text to a Hugging Face model on two CPU cores
	$(LOCAL) python -m cluster demo

test: $(STAMP)  ## everything that needs no GPU and no SLURM
	$(LOCAL) python -m pytest -m "not slow and not gpu and not slurm"

lint: $(STAMP)
	$(LOCAL) ruff check . && ruff format --check . && mypy

format: $(STAMP)
	$(LOCAL) ruff check --fix . ; ruff format .

test-slow: $(STAMP)  ## minutes each: kill tests, 8 ranks
	$(LOCAL) python -m pytest -m "slow and not gpu and not slurm"

test-slurm: $(STAMP)  ## a real SLURM of several nodes on this machine (root, apt)
	$(LOCAL) python -m pytest -m slurm tests/slurm

test-gpu: $(STAMP)
	$(LOCAL) python -m pytest -m gpu

bench-prep bench-loader bench-optimizer bench-step bench-checkpoint bench-export bench-sentences: bench-%: $(STAMP)
	$(LOCAL) python -m bench.$* $(ARGS)

five-minute: $(STAMP)  ## the five-minute BERT and its rival, on one GPU
	$(LOCAL) python -m bench.five_minute $(ARGS)

$(STAMP): setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"error: Python {v[0]}.{v[1]} is too old\n  -> make PYTHON=python3.11 (or newer)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools<81" wheel
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev,mpi,downstream]"
	@touch $@

clean:  ## removes the environment; what runs made stays
	rm -rf $(VENV)
