# Every target makes its own .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
READY := $(VENV)/.installed

.PHONY: demo test check bench bench-gpu bench-peers format venv kernels-aot kernels-full chaos fuzz soak

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/headrace demo

# Passive: many test processes share few cores, and a spinning thread pool starves the others.
test: export OMP_WAIT_POLICY := PASSIVE
test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m headrace.worker.bench
	$(BIN)/python -m headrace.worker.bench --schemes
	$(BIN)/python -m headrace.worker.bench.safety

# Kernels and engine on a GPU, at most eight minutes; without one a rehearsal with tiny shapes.
bench-gpu: $(READY)
	$(BIN)/python -m headrace.worker.bench.gpu

# Other engines, each in an environment of its own under ~/.cache/headrace/peers; hours at first.
bench-peers: $(READY)
	$(BIN)/python -m headrace.worker.bench --peers

# Every kernel compiled for sm_75, sm_80 and sm_90 and compared with kernels/data/aot.tsv; no GPU.
kernels-aot: $(READY)
	env -u TRITON_INTERPRET $(BIN)/python -m headrace.kernels.aot

# The cross product of what `make test` covers by pairs, an hour and more in the interpreter.
kernels-full: export OMP_NUM_THREADS := 1
kernels-full: $(READY)
	KERNELS_FULL=1 $(BIN)/python -m pytest tests/kernels -q -o console_output_style=classic

# Everything but the promises is broken for so long; other values: SEED, FSYNC (everysec or always).
chaos: SECONDS ?= 600
chaos: SEED ?= 1
chaos: FSYNC ?= everysec
chaos: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python tests/crash/chaos.py --seconds $(SECONDS) --seed $(SEED) --fsync $(FSYNC)

fuzz: CASES ?= 100000
fuzz: $(READY)
	HEADRACE_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest tests/fuzz

# Full load with worker restarts; memory of worker, client and Redis must level off.
soak: MINUTES ?= 30
soak: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python tests/soak/soak.py --minutes $(MINUTES)
