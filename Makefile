# Everything on a fresh machine: a virtual environment of the project's own, the install, the run.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
MINUTES ?= 9
BIN := $(VENV)/bin

.PHONY: install stress_test gpu gpu-test test lint types unit slow smoke docs clean

stress_test: install
	$(BIN)/python -m dpbench run stress_test $(ARGS)

# The figures that a GPU is to give, the most telling first, with PYTHON as it is: nothing is installed. Once more goes on.
gpu:
	$(PYTHON) -m dpbench run evidence --device cuda --minutes $(MINUTES) $(ARGS)

# The tests that need a GPU, on one, with PYTHON as it is. In several processes: PARALLEL="-n 8"; what needs the card to
# itself comes after them, one test after the other.
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

# The guide, the public interface and, apart, internal modules: from docstrings, to be read offline.
docs: install
	@$(BIN)/python -W ignore -m dpbench.guide.site build/docs

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
