# On a fresh machine: create a virtual environment, install into it, and run.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
MINUTES ?= 9
BIN := $(VENV)/bin

.PHONY: install stress_test gpu gpu-test test lint types unit slow smoke docs clean

stress_test: install
	$(BIN)/python -m dpbench run stress_test $(ARGS)

# Measures on a GPU, the most informative trials first. Uses PYTHON, which needs msgspec beside torch, pandas and
# matplotlib, and installs nothing. Run it again to resume.
gpu:
	$(PYTHON) -m dpbench run evidence --device cuda --minutes $(MINUTES) $(ARGS)

# Runs the tests that need a GPU. Uses PYTHON and installs nothing. PARALLEL="-n 8" runs them in 8 processes; tests that
# need the whole card run afterwards, one by one.
PARALLEL ?=
gpu-test:
	$(PYTHON) -m pytest -m 'gpu and not alone' $(PARALLEL) $(ARGS)
	$(PYTHON) -m pytest -m 'gpu and alone' $(ARGS)

test: lint types unit

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(ARGS)

slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow $(ARGS)

smoke: install
	$(BIN)/python -m dpbench run stress_test --smoke --output $$(mktemp -d)

# Builds the guide, the public interface and, separately, the internal modules from docstrings, for reading offline.
docs: install
	@$(BIN)/python -W ignore -m dpbench.guide.site build/docs

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
