# Two commands are all a newcomer needs: `make train` and `make test`. Both set up .venv on first use.

# Debian's Python is built with profile-guided optimisation. pyenv's is not, and takes 1.4 times as long for the same program, so
# Debian's is taken where it is there and can make environments. `make test PYTHON=python3.12` takes another.
DEBIANS := $(shell /usr/bin/python3.11 -c 'import ensurepip' 2> /dev/null && echo /usr/bin/python3.11)
PYTHON ?= $(or $(DEBIANS),python3)
# requirements/vllm.in is for Python 3.11; the rest also runs on 3.12 and 3.13.
VLLM_PYTHON ?= $(or $(DEBIANS),python3)
VENV   := .venv
BIN    := $(VENV)/bin
VENV_VLLM := .venv-vllm

.PHONY: help train tinker test test-all tests test-core test-changed test-docs test-fast test-processors vllm try-vllm system lint style types lock bench docs clean

help:
	@echo "make train      set up, then train a tic-tac-toe player from random weights (four minutes)"
	@echo "make tinker     set up, then serve SmolLM2 to Tinker's SDK on port 8000 (docs/tinker-server.md)"
	@echo "make test       set up, then run the checks and tests of the default tier (at its end: how many tests it left out)"
	@echo "make test-all   the same with the extended tests: every test that this machine can run"
	@echo "make test-core  the default tier of the core's tests, without the plug-ins' (under five minutes)"
	@echo "make test-changed  the tests that a change since main can affect, by the imports (SINCE=REVISION: since another)"
	@echo "make test-docs  the tests of the documents: their programs run, their links and tables are right"
	@echo "make test-fast  the unit, contract and golden tests that are quick (a minute)"
	@echo "make test-processors  the exactness tests as other x86_64 processors run them (under three minutes)"
	@echo "make vllm       set up .venv-vllm, the environment of the vLLM server"
	@echo "make system     install redis-server, bubblewrap, podman, cargo, chromium and node, where missing and you are root on Debian"
	@echo "make lint       ruff and mypy"
	@echo "make lock       write the hash-locked requirement files again (pip install uv); LOCKED=1 installs from them"
	@echo "make bench      the orchestration benchmark"
	@echo "make docs       the docs site, with search and API reference, into build/site (VERSION=0.2.0: a version in its menu)"

# Modules are compiled when they are first imported, not all 25,000 when they are installed; so the bytecode must be kept, also
# where the machine's settings say otherwise.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip --disable-pip-version-check install -q --no-compile $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')

# On Linux, PyPI has PyTorch with 2.7 GB of CUDA libraries. Without a GPU:
#   make train TORCH_INDEX=https://download.pytorch.org/whl/cpu    takes the build for CPUs from another index
#   make train TORCH=/path/torch-2.13.0+cpu-….whl                  takes a file (or a URL) of the version in constraints.txt
# `make vllm` and LOCKED=1 install the build for CPUs anyway; TORCH_INDEX tells them where it is. docs/install.md has the sizes.
TORCH ?= torch
TORCH_INDEX ?=

# `make test LOCKED=1`, which is what CI runs, installs exactly the files whose hashes are in requirements/ (scripts/lock.py).
HASHED := --no-deps --no-build-isolation --require-hashes
# Python's own pip may be years old; this one reads indexes in half the time.
NEW_PIP := $(INSTALL) $(HASHED) -r requirements/pip.txt
# What has hashes is installed by uv, in half the time of that; without uv, by pip.
UV := $(INSTALL) $(HASHED) -r requirements/uv.txt
INSTALL_LOCKED := python scripts/install_locked.py $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')

# Environments with packages of their own. The registry finds them through their entry points.
ENVIRONMENTS := $(patsubst %/pyproject.toml,-e %,$(wildcard environments/*/pyproject.toml plugins/*/pyproject.toml))

TRAIN_EXTRAS := hf,local,train,lora,math,serve,smollm2,tensorboard,wandb,plot,pipeline,ray,dev

ifdef LOCKED
$(VENV)/.ready-all: requirements/uv.txt requirements/build.txt requirements/main.txt requirements/torch.txt pyproject.toml environments/*/pyproject.toml plugins/*/pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	-$(BIN)/$(UV)
	$(BIN)/$(INSTALL_LOCKED) $(HASHED) -r requirements/build.txt
	$(BIN)/$(INSTALL_LOCKED) $(HASHED) -r requirements/main.txt
	$(BIN)/$(INSTALL_LOCKED) --no-deps --no-build-isolation -e . $(ENVIRONMENTS)
	touch $@

$(VENV)/.ready: $(VENV)/.ready-all
	touch $@
else
# The stamp is newer than what it depends on exactly when the environment is up to date.
$(VENV)/.ready: pyproject.toml environments/*/pyproject.toml plugins/*/pyproject.toml constraints.txt requirements/no_deps.in requirements/pip.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	-$(BIN)/$(NEW_PIP)
	$(BIN)/$(INSTALL) -c constraints.txt '$(TORCH)' -e '.[$(TRAIN_EXTRAS)]'
	$(BIN)/$(INSTALL) --no-deps $(ENVIRONMENTS) -r requirements/no_deps.in
	touch $@

# Tests also meet other people's packages, PyBoy among them, and build one (hatchling); `make train` does without them.
$(VENV)/.ready-all: pyproject.toml environments/*/pyproject.toml plugins/*/pyproject.toml constraints.txt requirements/no_deps.in requirements/pip.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	-$(BIN)/$(NEW_PIP)
	$(BIN)/$(INSTALL) -c constraints.txt '$(TORCH)' -e '.[$(TRAIN_EXTRAS),search,datasets,tinker,cookbook,others,agents,browser]' hatchling $(ENVIRONMENTS)
	$(BIN)/$(INSTALL) --no-deps -r requirements/no_deps.in
	touch $(VENV)/.ready $@
endif

# vLLM pins its own torch, so it has a separate environment. requirements/vllm.in says what GPU machines do instead. Its first
# import compiles 5,000 modules: here, on a core that would wait for the longer install of the tests.
$(VENV_VLLM)/.ready: requirements/vllm.txt requirements/torch.txt requirements/uv.txt
	test -x $(VENV_VLLM)/bin/python || $(VLLM_PYTHON) -m venv $(VENV_VLLM)
	-$(VENV_VLLM)/bin/$(UV)
	$(VENV_VLLM)/bin/$(INSTALL_LOCKED) $(HASHED) -r requirements/vllm.txt
	-OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python plugins/vllm/tests/warm_vllm.py > /dev/null 2>&1
	touch $@

vllm: $(VENV_VLLM)/.ready

# Where vLLM cannot be installed, its tests are skipped and say so; CI insists on it.
try-vllm:
	@$(MAKE) vllm || { echo "vLLM could not be installed: its tests are skipped." >&2; test -z "$$CI"; }

# A real Redis server for the pipeline, sandboxes and containers for code, a compiler for Rustorio, a browser for the viewer's
# page. Where they cannot be installed, the tests that need them are skipped and say so.
system:
	@sh scripts/install_system.sh redis-server=redis-server bwrap=bubblewrap podman=podman runc=runc cargo=cargo chromium=chromium node=nodejs

train: $(VENV)/.ready
	$(BIN)/python examples/tic_tac_toe/first_run.py

# The server, and what recipes of tinker-cookbook need. pip would name all that the packages of no_deps.in do without.
$(VENV)/.ready-tinker: $(VENV)/.ready
	test -n "$(LOCKED)" || $(BIN)/$(INSTALL) --no-warn-conflicts -c constraints.txt -e '.[cookbook]'
	touch $@

tinker: $(VENV)/.ready-tinker
	$(BIN)/ludic serve --tinker --model smollm2-135m

# Installs run side by side; then the tests, and mypy on what time they leave: some tests hold processes to a time limit.
test:
	$(MAKE) -j 3 -O style try-vllm system
	$(MAKE) -j 2 types tests

# The default tier. What is left out is said at the end of the run (tests/extended.py).
MARKED := not extended and not docs and not diagnostic

test-all:
	$(MAKE) test MARKED="not diagnostic"

# A file's tests share models and servers, so a file stays with one worker; each computes with one thread. Two cores have four
# workers, because many tests wait for processes and time limits.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 30

tests: $(VENV)/.ready-all
	$(PYTEST) -m "$(MARKED)" tests plugins

test-core: $(VENV)/.ready-all
	$(PYTEST) -m "$(MARKED)" tests

SINCE := main

test-changed: $(VENV)/.ready-all
	$(PYTEST) -m "not extended and not diagnostic" $$($(BIN)/python scripts/changed_tests.py $(SINCE))

test-docs: $(VENV)/.ready-all
	$(PYTEST) -m "docs and not extended" tests plugins

test-fast: $(VENV)/.ready-all
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/unit tests/contract tests/golden plugins -m "not integration and not slow and not extended and not docs and not diagnostic"

# Tests whose results depend on how the processor computes matrix products and sums.
EXACTNESS := $(addprefix tests/unit/models/test_,forward.py packed.py prefix_tree.py families.py) plugins/gpu/tests/test_recurrent.py \
	$(addprefix tests/unit/inference/local/test_,exactness.py rows.py adapters.py) tests/unit/training/test_gradients.py \
	tests/golden --ignore tests/golden/test_math_pairs.py

test-processors: $(VENV)/.ready-all
	scripts/processors.sh $(BIN)/pytest -q -n 2 --dist loadfile -m "$(MARKED)" $(EXACTNESS)

lint: style types

style: $(VENV)/.ready-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-all
	nice -n 19 $(BIN)/mypy

lock:
	python3 scripts/lock.py

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/orchestration.py

docs: $(VENV)/.ready
	$(BIN)/$(INSTALL) -c constraints.txt -e '.[docs]'
	$(BIN)/python scripts/docs_site.py $(if $(VERSION),--version $(VERSION))

clean:
	rm -rf $(VENV) $(VENV_VLLM) build .pytest_cache .ruff_cache .mypy_cache .hypothesis
