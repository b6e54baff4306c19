# Every target makes its own virtual environment when it is missing; nothing but Python 3.11+ is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow faults check lint bench docs docs-serve clean

demo: $(READY)
	$(BIN)/onstep train
	@echo
	@echo 'What it makes of "def ":'
	@$(BIN)/onstep generate runs/tiny_gpt "def " --seed 1

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

faults: $(READY)
	$(BIN)/python -m pytest -m "faults or not faults" tests/faults

check: lint test

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/sinks.py
	$(BIN)/python benchmarks/log_analysis.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) site build dist src/onstep.egg-info

# The CPU build of torch comes first, by its exact version: a range would pull the newest build with CUDA.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
