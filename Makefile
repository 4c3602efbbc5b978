# `make help` lists the targets. Everything happens in .venv, made on first use from pinned requirements.

PYTHON ?= python3
PROMPT = What is the capital of France, and what is it known for?
MODEL =
ARGS =

BIN := .venv/bin
READY := .venv/.ready
TEST_JOBS ?= 2
RUN_PYTEST = -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python $(RUN_PYTEST)
NEWEST = .venv-newest
# llama.cpp's kernel for AMX ends with a segmentation fault (llama-cpp-python 0.3.36, a Xeon), so it is built without.
WITHOUT_AMX = $(if $(shell grep -sm1 amx_tile /proc/cpuinfo),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
# Tests that fill or measure the whole GPU; others only need a few GB of its memory.
GPU_ALONE = tests/runner/sleeping tests/runner/device_memory tests/tools/bench tests/runner/test_no_sync.py \
	tests/runner/speculative/test_drafts_gpu.py

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-gpu test-newest peers lint format setup clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'make run  PROMPT="..."  asks something else; MODEL=folder|file.gguf|org/name asks another model;'
	@echo '          ARGS="--max-tokens 64 --compiler eager" goes to `piecegraph run`.'
	@echo 'make test ARGS="-k dispatcher"  goes to pytest; TEST_JOBS=4 tests in four processes.'
	@echo 'make test-slow TEST_ROUNDS=3  draws three times as many random shapes, faults and schedules as CI does.'
	@echo 'rm .venv-newest/.ready  makes the next test-newest look for newer versions.'
	@echo 'PYTHON=python3.12 chooses the interpreter that .venv is made with.'

run: $(READY) ## set up, then answer PROMPT with the embedded model, or MODEL
	@printf '%s' "$$PROMPT" | $(BIN)/piecegraph run $(ARGS) $(if $(MODEL),'$(MODEL)') -
run: export PROMPT := $(value PROMPT)

test: $(READY) ## set up, then run the tests but the slow ones
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: export TEST_ROUNDS ?= 1
test-slow: $(READY) ## set up, then run the slow tests: long random schedules, families one by one
	$(PYTEST) --dist worksteal -m slow $(ARGS)

test-gpu: $(READY) ## set up, then run the tests of a GPU: TEST_JOBS at a time, then those that need it alone
	$(PYTEST) --dist worksteal -m gpu $(GPU_ALONE:%=--ignore=%) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu $(GPU_ALONE) $(ARGS)

test-newest: $(NEWEST)/.ready ## run `make test` with the newest torch and transformers, in .venv-newest (several gigabytes)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python $(RUN_PYTEST) -m 'not slow' $(ARGS)

lint: $(READY) ## ruff, ruff format, mypy --strict over everything, the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py tests/test_rooms.py tests/test_pages.py

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY) ## only make .venv

$(READY): $(wildcard requirements/*) pyproject.toml
	@PYTHON='$(PYTHON)' bash requirements/install.sh
	@touch $@

$(NEWEST)/.ready: requirements/install_newest.sh requirements/dev.txt requirements/model.txt pyproject.toml
	@PYTHON='$(PYTHON)' NEWEST='$(NEWEST)' bash requirements/install_newest.sh
	@touch $@

peers: .venv-peers/.ready ## build llama.cpp in .venv-peers, a peer of `piecegraph bench compare` (minutes of C++)

.venv-peers/.ready: requirements/peers.txt
	$(PYTHON) -m venv .venv-peers
	CFLAGS='$(WITHOUT_AMX)' CXXFLAGS='$(WITHOUT_AMX)' \
		.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/peers.txt
	.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@

clean: ## remove .venv, .venv-newest, .venv-peers and everything generated
	rm -rf .venv $(NEWEST) .venv-peers build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
