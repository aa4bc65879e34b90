# Everything works from a clean clone with Python 3.11 and make; a virtual environment is made here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format bench clean

demo: $(STAMP)  ## probe this machine, plan for it, and train a small GPT on two local workers
	$(BIN)/shardwise train

test: $(STAMP)  ## lint, types, and the whole test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

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

# torch comes first and pinned, so that no other package pulls a build with gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0 numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[transformers,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
