# `make demo` and `make test` set everything up by themselves in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each worker takes one thread (tests/conftest.py) and up to a gigabyte. One for each processor is right for tests that
# compute. The slow ones wait half of the time for processes and clocks: two, and all in one run, so that some compute
# meanwhile.
PYTEST = $(BIN)/python -m pytest --maxprocesses 8 --dist worksteal
QUICK := unit or smoke
TUF_CONFORMANCE := https://github.com/theupdateframework/tuf-conformance
TUF_CONFORMANCE_COMMIT := eec841c186f81f2d9d8d30460c7e7deefa615f9e

.DEFAULT_GOAL := help
.PHONY: help demo day month docs test test-all figures coverage chaos fuzz tuf-conformance release lint

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(BIN)/fedge: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(BIN)/fedge

demo: $(BIN)/fedge  ## a coordinator, a dozen device processes and a real MQTT broker on this machine, about a minute
	$(BIN)/fedge demo

day: $(BIN)/fedge  ## a day of a fleet: a device falls ill, a backup is restored, a rollout is stopped from the page; one minute
	$(BIN)/python -m tests.day

month: $(BIN)/fedge  ## a month of a fleet that learns, by a clock of its own, undisturbed and with programs killed; ten minutes
	$(BIN)/python -m tests.month

docs: $(BIN)/fedge  ## the documents as a site, into build/site
	mkdir -p build/pages
	ln -sfn $(addprefix $(CURDIR)/,README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE docs examples) build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	! grep -rlE '<(script|link|img|iframe)[^>]*(src|href)="?(https?:)?//' build/site --include='*.html'

test: $(BIN)/fedge  ## the unit tests, one run over each broker and one fault of each kind: about 10 minutes on two cores
	$(PYTEST) -n $(shell nproc) -m "$(QUICK)"

test-all: $(BIN)/fedge  ## all tests but the figures, the slowest first: about half an hour on two cores
	$(PYTEST) -n $(shell expr 2 '*' $$(nproc)) -m "not figures"

figures: $(BIN)/fedge  ## every benchmark script on small inputs, and a cell of each results page made again: ten minutes
	$(PYTEST) -n $(shell nproc) -m figures

coverage: $(BIN)/fedge  ## branch coverage of the unit tests
	$(PYTEST) -n $(shell nproc) -m unit --cov --cov-report=term:skip-covered --cov-report=html

chaos: $(BIN)/fedge  ## federations that are killed, cut off and filled up: MINUTES=60 SEED=1
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)

fuzz: $(BIN)/fedge  ## search for bytes that a decoder cannot take: MINUTES=60 SEED=1
	$(BIN)/python -m pip install --quiet atheris==3.0.0
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)

tuf-conformance: $(BIN)/fedge  ## the suite of TUF's own project against our client of signed repositories
	[ -d $(VENV)/tuf-conformance ] || git clone --quiet $(TUF_CONFORMANCE) $(VENV)/tuf-conformance
	git -C $(VENV)/tuf-conformance checkout --quiet $(TUF_CONFORMANCE_COMMIT)
	cd $(VENV)/tuf-conformance && $(CURDIR)/$(BIN)/python -m pytest -c pyproject.toml tuf_conformance --entrypoint=$(CURDIR)/tests/deploy/tuf_client.sh

release: $(BIN)/fedge  ## the sdist and the wheel, into dist, tried with each extra: EACH=1 for one environment per extra
	$(BIN)/python -m tests.release $(if $(EACH),--each)

lint: $(BIN)/fedge  ## ruff, the formatter, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
