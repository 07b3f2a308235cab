# Every command runs in .venv, which is made on the first use and made anew when its lock changes.
# LOWEST=1: in .venv-lowest, with the lowest versions that setup.py allows, and streaming-community in Streaming's place.
LOWEST ?=
ifdef LOWEST
VERSIONS := 3.11 3.12 3.13
VENV := .venv-lowest
LOCK := $(VENV)/requirements.txt
LOCKED := setup.py overrides.txt Makefile
else
VERSIONS := 3.13 3.12 3.11 3.14
VENV := .venv
LOCK := requirements.txt
LOCKED := $(LOCK)
endif
# The first version that this machine has, also as a folder of pyenv.
PYTHON ?= $(shell for version in $(VERSIONS); do \
  for python in python$$version $(HOME)/.pyenv/versions/$$version.*/bin/python$$version; do \
    $$python -c 'import ensurepip' 2> /dev/null && echo $$python && exit; done; done)
BIN := $(VENV)/bin
PINS := $(shell cat $(LOCKED) | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/installed-$(PINS)
DATA ?=
TESTS ?= tests
# Two a core where the memory is enough (4 GB each): with one, many tests only wait for a process to start or to end.
JOBS ?= $(shell awk -v most=$$((2 * $$(nproc))) '/MemAvailable/ { jobs = int($$2 / 4e6); print (jobs > most ? most : jobs < 2 ? 2 : jobs) }' /proc/meminfo)
DEMO ?=
OTHER ?=
UPGRADE ?=
SELECT ?= -m "not slow"
COMPILE := $(BIN)/uv pip compile setup.py --quiet --all-extras --override overrides.txt --python-version 3.11 \
  --no-annotate --no-header --no-emit-index-url

PYTEST = $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(DATA),--data $(DATA)) \
  $(if $(OTHER),--other-python $(abspath $(OTHER)))

# Without bytecode each start compiles 5,000 modules again, which takes longer than all else about it.
unexport PYTHONDONTWRITEBYTECODE

# Threads of OpenMP that wait without sleeping take the cores of other processes: where two share them, for ten times as long.
export OMP_WAIT_POLICY ?= passive

.PHONY: install lock demo test test-slow test-lowest audit lint format docs clean help

help:              ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/ -/'

install: $(INSTALLED)  ## make .venv with the locked dependencies and this package (editable)

$(INSTALLED):
	$(or $(PYTHON),$(error Python 3.11 to 3.14 is needed: install one, or name one with PYTHON=PATH)) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(if $(LOWEST),$(COMPILE) --resolution lowest-direct --output-file $(LOCK))
	$(if $(LOWEST),sed -i 's/^mosaicml-streaming==.*/streaming-community==0.14.2/' $(LOCK))
	$(BIN)/uv pip install --quiet --no-config --python $(BIN)/python --no-deps -r $(LOCK) -e .  # [tool.uv] would lift the pins.
	$(BIN)/python -W ignore -c 'import diffusion.train'
	touch $(INSTALLED)

lock: install      ## pin what setup.py asks for, with all extras; UPGRADE=--upgrade: the newest that fits
	$(COMPILE) --universal --generate-hashes $(UPGRADE) --output-file requirements.txt

demo: install      ## from drawn shapes to a trained model, images and a report; DEMO="--quick" for a short one
	$(BIN)/python -m demo $(DEMO)

test: install      ## run the tests of a commit, JOBS at a time; DATA=FOLDER adds those on real images, TESTS=PATH chooses some
	$(PYTEST) $(SELECT)

test-slow: install ## run the long tests: several processes, kills, servers
	$(PYTEST) -m slow

test-lowest: install  ## run the tests on the lowest versions; what one environment writes, the other reads
	$(MAKE) test LOWEST=1 OTHER=$(BIN)/python

audit: install     ## name known advisories of the locked versions; needs the index of PyPI
	$(BIN)/uvx --quiet pip-audit --strict --disable-pip --requirement requirements.txt

lint: install      ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install    ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install      ## write docs/configuration.md from the dataclasses
	$(BIN)/python scripts/document.py

clean:             ## remove the environments, the demo's runs and caches; other runs stay
	rm -rf .venv .venv-lowest runs/demo build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
