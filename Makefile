# Every target makes its own environment. Another torch build: make train TORCH="torch==2.11.0 --index-url <url>"
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROCESSES ?= 2
WORKERS ?= 2
# The link between the processes: auto (namespaces where they can be made, else emulator), namespaces, emulator, none.
LINK ?= auto
ARGS ?=

BIN := .venv/bin
PYTHONS := use Python 3.11, 3.12 or 3.13: apt install python3 python3-venv, or make PYTHON=python3.12
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-slow test-sweep test-gpu check wheel format clean

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
	$(BIN)/python -m tests.gpu.probes --output gpu_probes.json
	$(BIN)/python -m tests.gpu.benchmark
	$(BIN)/python -m tests.gpu.row_sums

# The check of the pins waits for the network most of the time: the others run meanwhile.
# In front of `|| :` the shell takes the status of a `kill` that finds nothing left for that of the recipe.
check: .venv/installed
	@set -e; $(BIN)/python tools/check_pins.py "$(TORCH)" & \
	trap 'kill $$! 2> /dev/null || :' EXIT; set -x; \
	$(BIN)/ruff format --check .; \
	$(BIN)/ruff check .; \
	$(BIN)/mypy megatron/training moe_overlap tools pretrain_moe.py; \
	$(BIN)/python tools/check_size.py; \
	wait $$!

# Into dist/: with the models, and with captures of them, so that predictions need no torch (MODELS="a b": of these alone).
# An earlier build/ would bring files into the wheel that the sources no longer have.
wheel: .venv/installed
	$(BIN)/python tools/write_captures.py $(MODELS)
	rm -rf build
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What any Python can read says which one is needed; tools/install.py says the rest.
.venv/installed: setup.py constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "error: PYTHON $(PYTHON): is not installed; $(PYTHONS)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(1)' || \
	{ echo "error: PYTHON $(PYTHON): is `$(PYTHON) -V 2>&1`; $(PYTHONS)" >&2; exit 2; }
	@$(PYTHON) tools/install.py .venv "$(TORCH)"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info checkpoints runs/first
