# SPDX-License-Identifier: Apache-2.0
# Two commands: `make demo` and `make test`. Each makes .venv and installs what it needs, once.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# An index that offers CPU builds of torch, where pip's default brings the (much larger) CUDA build: make TORCH_INDEX=URL
TORCH_INDEX ?=
# The demo's photograph; through the environment, so that its name may hold anything.
export IMAGE
PIP := $(PY) -m pip install -q --disable-pip-version-check

GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(GPU),yes)
REQUIREMENTS := requirements/cuda.txt
else
REQUIREMENTS := requirements/cpu.txt
endif

# The wheels are rebuilt whenever a file or a folder of theirs changes, so that a stale copy is never run.
OVERLAY := pyproject.toml $(shell find fastvideo -not -path '*/__pycache__*')
KERNEL := fastvideo-kernel/pyproject.toml

.PHONY: demo test lint overlay clean
.DELETE_ON_ERROR:

demo: $(VENV)/.overlay  ## two videos, two contact sheets and a table in out/
	PYTHONWARNINGS='ignore:Failed to load image Python extension' \
	$(PY) -m fastvideo.pipelines.pan2.demo $(if $(IMAGE),--image "$$IMAGE") $(DEMO_FLAGS)

test: $(VENV)/.overlay lint  ## format, lint, types and every test that this machine can run
	$(PY) -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.overlay
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	git ls-files '*.cu' '*.cuh' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

overlay: $(VENV)/.overlay

$(VENV)/.requirements: requirements/cpu.txt requirements/cpu-no-deps.txt requirements/cuda.txt requirements/dev.txt
	$(PYTHON) -c 'import sys; assert (3, 10) <= sys.version_info < (3, 13), "Python 3.10 to 3.12 is needed: make PYTHON=python3.12"'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') -r $(REQUIREMENTS) -r requirements/dev.txt
	$(if $(GPU),,$(PIP) --no-deps -r requirements/cpu-no-deps.txt)
	touch $@

$(VENV)/.kernel: $(VENV)/.requirements $(KERNEL)
	$(PIP) --no-deps --no-build-isolation -e ./fastvideo-kernel
	touch $@

$(VENV)/.overlay: $(VENV)/.kernel $(OVERLAY)
	rm -rf build
	$(PIP) --no-deps --no-build-isolation --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) build out outputs fastvideo-kernel/*.egg-info *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
