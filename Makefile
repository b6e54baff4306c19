# Every target makes its own virtual environment when it is missing; nothing but Python 3.11+ is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
BROUGHT := .venv-brought
HEAVY := .venv-heavy
RAY := .venv-ray
MOTO := .venv-moto

# Compiled modules are kept whatever the environment says: the tests start hundreds of processes that import the package.
export PYTHONDONTWRITEBYTECODE :=
# Modules are compiled when they are first imported: compiling all 20,000 takes most of the time of an installation.
INSTALL := -m pip install --quiet --no-compile

.PHONY: demo test test-all test-main test-heavy test-stores test-slow test-distributed faults faults-diloco promises release-check check lint bench bench-peers brought walk gpu-check browser slurm ray docs docs-serve docs-tables clean

demo: $(READY)
	$(BIN)/onstep demo

# The tests to run while working: minutes on two cores. What starts whole programs is left to test-all.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not process"

# Every test but the long sweeps, as CI runs them. The second environment is made beside the tests of the first.
test-all: test-main $(HEAVY)/.ready
	$(HEAVY)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" tests/heavy

test-main: $(READY) $(MOTO)/.ready
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

# What needs torchao, bitsandbytes and lm-eval: with them installed, transformers and peft take twice as long to import.
test-heavy: $(HEAVY)/.ready
	$(HEAVY)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/heavy

# Runs in object stores with everything that can go wrong, over real sockets; prints what it counted. An hour.
test-stores: $(READY) $(MOTO)/.ready
	$(BIN)/python -m pytest -s tests/mirror

# The long sweeps, which neither of them runs.
test-slow: $(READY)
	ONSTEP_TEST_PATIENCE=1500 $(BIN)/python -m pytest -m slow --timeout=1800

# Every layout of ranks beside one process, over real processes: losses, norms, weights, bytes sent and held.
test-distributed: $(READY)
	$(BIN)/python benchmarks/layouts.py

faults: $(READY)
	$(BIN)/python -m pytest -m "faults or not faults" tests/faults

# DiLoCo with everything that can go wrong, over real processes in every mode and in random walks; prints what it counted.
faults-diloco: $(READY)
	$(BIN)/python -m pytest -s -m "faults or not faults" tests/diloco/faults tests/diloco/protocol/test_random_walks.py

# Every test there is, and, if none fails, the page of promises with what it counted: half an hour on two quiet cores.
promises: $(READY)
	ONSTEP_RESULTS=build/results.json $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(BIN)/python tools/promises.py build/results.json

# Builds the archives of a release, installs the wheel into an empty environment outside of the clone, and tries it.
release-check: $(READY)
	rm -rf build/release
	$(BIN)/python tools/release_check.py build/release

check: lint test-all

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/words.py

bench: $(READY)
	$(BIN)/python benchmarks/peers.py --quick
	$(BIN)/python benchmarks/buckets.py
	$(BIN)/python benchmarks/steady.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/sharded_checkpoint.py
	$(BIN)/python benchmarks/sharded_build.py
	$(BIN)/python benchmarks/diloco_ranks.py
	$(BIN)/python benchmarks/sharded_step.py
	$(BIN)/python benchmarks/trackers.py
	$(BIN)/python benchmarks/log_analysis.py
	$(BIN)/python benchmarks/control.py
	$(BIN)/python benchmarks/diloco.py
	$(BIN)/python benchmarks/diloco_simulator.py
	$(BIN)/python benchmarks/diloco_training.py

# What to run first on a machine with a new GPU: 40 minutes, stops at nothing, lists what failed.
gpu-check: $(READY)
	$(BIN)/python tools/gpu_check.py

# The distribution's Chromium, for the tests of the page; without one, and where this fails, they are skipped by name.
browser:
	@tools/install_packages.sh "chromium chromium-browser google-chrome" chromium

# The distribution's SLURM, of which tests/cluster/slurm start a cluster of their own; as above.
slurm:
	@tools/install_packages.sh slurmctld slurmctld slurmd slurm-client

# Runs on a Ray cluster of this machine, with ranks, drivers and searches that are killed: half an hour.
ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest -s tests/integrations/test_ray_train.py tests/integrations/test_ray_search.py
	$(RAY)/bin/python -m pytest tests/docs/test_examples.py -k on-a-cluster.md

bench-peers: $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/peers.py

# Unmodified scripts of other libraries under transformers and under onstep run, by turns: differences and times.
brought: $(BROUGHT)/.ready
	$(BROUGHT)/bin/python -m tests.brought.compare --turns 3 --kills
	$(BROUGHT)/bin/python -m pytest -s tests/integrations tests/docs/test_pages_of_libraries.py tests/docs/test_preferences.py
	$(BROUGHT)/bin/python -m pytest tests/docs/test_examples.py -k lightning.md

# What ten libraries override and use of a Trainer, read in the sources of their wheels, written into its page of docs/.
walk: $(READY)
	$(BIN)/python tools/walk_libraries.py

# The tables that are read from the code, written into the pages of docs/.
docs-tables: $(READY)
	$(BIN)/python docs/generate.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) $(PEERS) $(BROUGHT) $(HEAVY) $(RAY) $(MOTO) site build dist src/onstep.egg-info

# The CPU build of torch comes first, by its exact version: a range would pull the newest build with CUDA.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --upgrade pip
	$(BIN)/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# The packages of $(VENV), and on top of them those that are heavy to import.
$(HEAVY)/.ready: $(READY) tests/heavy/requirements.txt
	test -x $(HEAVY)/bin/python || $(PYTHON) -m venv $(HEAVY)
	$(HEAVY)/bin/python tests/heavy/stand_on.py $(BIN)/python
	$(HEAVY)/bin/python $(INSTALL) --constraint constraints.txt --requirement tests/heavy/requirements.txt
	touch $@

# The packages of $(VENV), and Ray.
$(RAY)/.ready: $(READY)
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python tests/heavy/stand_on.py $(BIN)/python
	$(RAY)/bin/python $(INSTALL) --constraint constraints.txt "ray[train,tune]==2.60.*"
	touch $@

# The S3 server of tests/mirror/s3, in an environment of its own: botocore refuses our dateutil.
$(MOTO)/.ready: tests/mirror/s3/requirements.txt
	test -x $(MOTO)/bin/python || $(PYTHON) -m venv $(MOTO)
	$(MOTO)/bin/python $(INSTALL) --requirement tests/mirror/s3/requirements.txt
	touch $@

$(PEERS)/.ready: pyproject.toml constraints.txt benchmarks/peers-requirements.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(INSTALL) --upgrade pip
	$(PEERS)/bin/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(PEERS)/bin/python $(INSTALL) --constraint constraints.txt --requirement benchmarks/peers-requirements.txt --editable .
	touch $(PEERS)/.ready

$(BROUGHT)/.ready: pyproject.toml constraints.txt tests/brought/requirements.txt
	test -x $(BROUGHT)/bin/python || $(PYTHON) -m venv $(BROUGHT)
	$(BROUGHT)/bin/python $(INSTALL) --upgrade pip
	$(BROUGHT)/bin/python $(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(BROUGHT)/bin/python $(INSTALL) --constraint constraints.txt --requirement tests/brought/requirements.txt --editable .
	$(BROUGHT)/bin/python $(INSTALL) --no-deps gliner==0.2.29  # it asks for an older transformers, and trains with this one
	touch $(BROUGHT)/.ready
