# Everything works from a clean clone with Python 3.11 and make; a virtual environment is made here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# An environment of its own for accelerators; TORCH is what pip installs there, if it should choose.
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
TORCH ?=
FAULTS ?= 200
MINUTES ?= 90

.PHONY: demo test test-gpu lint format bench soak clean

demo: $(STAMP)  ## probe this machine, plan for it, and train a small GPT on two local workers
	$(BIN)/shardwise train

test: $(STAMP)  ## lint, types, and the whole test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: $(GPU_STAMP)  ## the tests of accelerators on this machine's own, and a report on them (gpu-report.md)
	SHARDWISE_TEST_DEVICE=$$($(GPU_VENV)/bin/python -c "import torch; print(torch.accelerator.current_accelerator().type)") \
		$(GPU_VENV)/bin/python -m pytest tests/accelerator -rs
	$(GPU_VENV)/bin/python -m shardwise doctor --gpu -o gpu-report.md

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## step time and memory beside DDP and FSDP2; the speed of hops
	$(BIN)/python benchmarks/hops.py
	$(BIN)/python benchmarks/step.py

soak: $(STAMP)  ## random faults at random instants over random plans; FAULTS and MINUTES bound it
	$(BIN)/python benchmarks/soak.py --faults $(FAULTS) --minutes $(MINUTES)

# torch comes first and pinned, so that no other package pulls a build with gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0 numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[transformers,dev]"
	touch $(STAMP)

$(GPU_STAMP): pyproject.toml constraints.txt .ci/gpu-environment
	.ci/gpu-environment $(GPU_VENV) $(PYTHON) "$(TORCH)"

clean:
	rm -rf $(VENV) $(GPU_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
