# Every command runs in .venv, which is made on the first use and remade when its pins change.
# STACK=next: in .venv-next, with the newest stack.
STACK ?=
ifeq ($(STACK),next)
PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
VENV := .venv-next
LOCK := requirements-next.txt
else
PYTHON ?= python3.11
VENV := .venv
LOCK := requirements.txt
endif
BIN := $(VENV)/bin
PINS := $(shell cksum < $(LOCK) | cut -d' ' -f1)
INSTALLED := $(VENV)/installed-$(PINS)
DATA ?=
TESTS ?= tests
JOBS ?= 2
DEMO ?=
OTHER ?=
UPGRADE ?=
SELECT ?= -m "not slow"
COMPILE := $(BIN)/uv pip compile setup.py --quiet --all-extras --no-annotate --no-header --no-emit-index-url $(UPGRADE)

PYTEST = $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(DATA),--data $(DATA)) \
  $(if $(OTHER),--other-python $(abspath $(OTHER)))

# Without bytecode each start compiles 5,000 modules again, which takes longer than all else about it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install lock demo test test-slow test-next lint format docs clean help

help:              ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/ -/'

install: $(INSTALLED)  ## make .venv with the locked dependencies and this package (editable)

$(INSTALLED):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r $(LOCK) -e .
	$(BIN)/python -W ignore -c 'import diffusion.train'
	rm -f $(VENV)/installed-*
	touch $(INSTALLED)

lock: install      ## pin what setup.py asks for, with all extras, for both stacks; UPGRADE=--upgrade: the newest that fits
	$(COMPILE) --python-version 3.11 --output-file requirements.txt
	$(COMPILE) --python-version 3.12 --override overrides-next.txt --output-file requirements-next.txt

demo: install      ## from drawn shapes to a trained model, images and a report; DEMO="--quick" for a short one
	$(BIN)/python -m demo $(DEMO)

test: install      ## run the tests of a commit, JOBS at a time; DATA=FOLDER adds those on real images, TESTS=PATH chooses some
	$(PYTEST) $(SELECT)

test-slow: install ## run the long tests: several processes, kills, servers
	$(PYTEST) -m slow

test-next: install ## the same on the newest stack; what one stack writes, the other reads, too
	$(MAKE) test STACK=next OTHER=$(BIN)/python

lint: install      ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install    ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install      ## write docs/configuration.md from the dataclasses
	$(BIN)/python scripts/document.py

clean:             ## remove .venv and .venv-next, the demo's runs and caches; other runs stay
	rm -rf .venv .venv-next runs/demo build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
