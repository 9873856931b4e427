# Every target makes its own environment. Another torch build: make train TORCH="torch==2.11.0 --index-url <url>"
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROCESSES ?= 2
WORKERS ?= 2
# The link between the processes: auto (namespaces where they can be made, else emulator), namespaces, emulator, none.
LINK ?= auto
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-slow test-sweep test-gpu check format clean

train: .venv/installed
	$(BIN)/python tools/first_run.py --processes $(PROCESSES) --link $(LINK) $(ARGS)

# A hundred processes import the same modules: compiled once, whatever the caller's environment says.
test test-slow test-sweep: export PYTHONDONTWRITEBYTECODE =

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

# Two workers leave no core idle; what measures has the machine to itself.
test-slow: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not alone and not sweep" $(ARGS)
	$(BIN)/python -m pytest -m "slow and alone" $(ARGS)

# Every case of what slow tests show a few of: before a release, and behind a change of what they look at.
test-sweep: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m sweep $(ARGS)

# On a machine with GPUs; elsewhere each test is skipped by its name.
test-gpu: .venv/installed
	$(BIN)/python -m pytest tests/gpu -rs $(ARGS)
	$(BIN)/python -m tests.gpu.benchmark

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy megatron/training moe_overlap tools pretrain_moe.py
	$(BIN)/python tools/check_size.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build *.egg-info checkpoints runs/first
