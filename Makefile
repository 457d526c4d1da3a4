# Two commands: `make demo` and `make test`. Both set up .venv first; they need Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Twice quiet: an index that is configured and absent is no news. Most modules are never imported.
INSTALL := $(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
RUN ?= runs/demo
SOAK ?= 600
GPU_PYTHON ?= python3
GPU_OUT ?= runs/gpu
PYTHON_OF_GPUS ?= python3.12
MINUTES ?= 9
# Images often set it; every process would compile torch anew, which takes longer than to import it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo lint test quick nightly mutants soak bench gpu rehearsal published docs dist clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable '.[dgl,dev]'
	touch $@

demo: .venv/.installed  ## measure this machine, then plan, simulate, run on two ranks and validate the embedded default
	rm -rf $(RUN) && mkdir -p $(RUN)
	$(BIN)/gnnplan measure --ranks 2 -o $(RUN)/cluster.yaml > /dev/null
	$(BIN)/gnnplan plan --cluster $(RUN)/cluster.yaml --model sage --layers 3 --hidden 256 -o $(RUN)/plan.json
	$(BIN)/gnnplan simulate $(RUN)/plan.json --trace $(RUN)/simulated
	$(BIN)/gnnplan run $(RUN)/plan.json --epochs 30 --out $(RUN)/trained
	$(BIN)/gnnplan validate $(RUN)/trained

lint: .venv/.installed  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

test: lint  ## style, types, tests
	$(PYTEST)

quick: lint  ## style, types, and the first case of each fast test that starts no process
	$(PYTEST) -m "not nightly and not processes and not slow and not again"

nightly: lint  ## the full products of which `make test` runs a cover, and all examples
	GNNPLAN_NIGHT=1 $(PYTEST) -m ""

mutants: .venv/.installed  ## small faults, one by one; prints those that no test notices
	$(BIN)/python tests/mutants.py

soak: .venv/.installed  ## trainings under random faults for $(SOAK) seconds; SEED=7 repeats those of a seed
	OMP_NUM_THREADS=1 $(BIN)/python tests/executor/soak.py --seconds $(SOAK) $(if $(SEED),--seed $(SEED))

bench: .venv/.installed  ## timings: ratios measured side by side, never asserted
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planner.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/simulator.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/spine.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/minibatch.py ddp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/minibatch.py split

gpu:  ## what only a GPU can show, with the torch of $(GPU_PYTHON), in $(MINUTES) minutes; STAGES=more: what these had no time for
	$(GPU_PYTHON) benchmarks/gpu.py all --out $(GPU_OUT) --minutes $(MINUTES) $(if $(STAGES),--stages $(STAGES))

.venv-gpu/.installed: pyproject.toml
	$(PYTHON_OF_GPUS) -m venv .venv-gpu
	.venv-gpu/bin/pip install --quiet --quiet --disable-pip-version-check --no-compile torch==2.11.0 torch_geometric==2.8.0 'numpy==2.5.*' pytest-timeout pytest-xdist --editable '.[testing]'
	touch $@

rehearsal: .venv-gpu/.installed  ## all stages of `make gpu` on the CPU, and the executor's tests, with a GPU machine's Python 3.12 and torch 2.11 with CUDA (5 GB)
	OMP_NUM_THREADS=1 GNNPLAN_NIGHT=1 .venv-gpu/bin/pytest -m "" tests/test_gpu_rehearsal.py
	OMP_NUM_THREADS=1 .venv-gpu/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/executor

published: .venv/.installed  ## printed figures predicted again: errors and choices
	$(BIN)/python benchmarks/published.py table
	$(BIN)/python benchmarks/published.py others

docs: .venv/.installed  ## the documentation as a site, in build/site; broken links are errors
	$(INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: .venv/.installed  ## the source distribution, and the wheel that it makes, in dist/
	rm -rf dist build
	$(BIN)/python -m build --no-isolation > /dev/null
	ls dist

clean:
	rm -rf .venv .venv-gpu runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
