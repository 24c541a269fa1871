# Everything a fresh machine needs: `make demo` and `make test`. `make help` lists the rest.
#
#   PYTHON=python3.12        another interpreter for the virtual environment
#   TORCH_INDEX=<url>        package index to take PyTorch from (its CPU build is enough and far smaller)
#   SWARM_LLAMA_SOURCE=<dir> an unpacked llama.cpp of the pinned version instead of the download

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.DELETE_ON_ERROR:
.PHONY: help demo demo-glm test test-slow lint format bench proto wheel install-size clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(STAMP): pyproject.toml setup.py
	@echo "== virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== PyTorch and build tools"
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install "setuptools>=77" cmake ninja
	@echo "== engine: patched llama.cpp, a few minutes the first time"
	$(BIN)/python -m shim.build
	@echo "== glm-swarm and its dependencies"
	$(BIN)/python -m pip install --no-build-isolation -e ".[dev]"
	@touch $@

demo: $(STAMP) ## three nodes on this machine answer a question
	$(BIN)/python -m shim.build
	$(BIN)/python -m swarm.demo

demo-glm: $(STAMP) ## the same with a tiny GLM-5.2, which has to know the answer
	$(BIN)/python -m shim.build
	$(BIN)/python -m swarm.demo --model glm-tiny --expect Paris

test: $(STAMP) lint ## the whole test suite
	$(BIN)/python -m shim.build
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP) ## the tests that take longer
	$(BIN)/python -m shim.build
	$(BIN)/python -m pytest -m slow

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## what a hop costs on this machine
	$(BIN)/python -m bench.hop_overhead

proto: $(STAMP) ## regenerate swarm_pb2 from the schema
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. swarm/protocol/swarm.proto

wheel: $(STAMP) ## dist/*.whl with the engine inside
	$(BIN)/python -m build

install-size: $(STAMP) ## what an installation from the wheel downloads, takes and lasts
	$(BIN)/python -m bench.install $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

clean: ## remove what this checkout made (caches in the home directory stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
