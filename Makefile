# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# The wheel is rebuilt whenever a file or a folder under fastvideo/ changes, so a stale copy is never tested.
OVERLAY := pyproject.toml $(shell find fastvideo -not -path '*/__pycache__*')

.PHONY: overlay
overlay: $(VENV)/.overlay
$(VENV)/.overlay: $(OVERLAY)
	rm -rf build
	$(PY) -m pip install -q --no-deps --no-build-isolation --force-reinstall .
	touch $@
