# `make demo` and `make test` set everything up by themselves in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint

$(BIN)/fedge: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(BIN)/fedge

demo: $(BIN)/fedge
	$(BIN)/fedge demo

test: $(BIN)/fedge
	$(BIN)/python -m pytest

lint: $(BIN)/fedge
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
