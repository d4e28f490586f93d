# `make demo` and `make test` are all a newcomer needs; both build the environment first. .ci/run uses the same rules in a fresh one.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m
# Tests run on every core, so each process computes with one thread.
PYTEST = OMP_NUM_THREADS=1 $(RUN) pytest -q -n auto

.PHONY: demo test test-all test-ascend lint install

demo: install
	$(VENV)/bin/deepinfer generate "Once upon a time"

test: install
	$(PYTEST)

test-all: install
	$(PYTEST) -m "slow or not slow"

# The Ascend backend on emulated CANN operators, in an environment of its own (torch_npu hooks into `import torch`).
test-ascend:
	$(PYTHON) tests/ascend/run.py $(if $(ASCEND_VENV),--venv $(ASCEND_VENV))

lint: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	rm -rf build/types && mkdir -p build/types && ln -s ../../backends build/types/deepinfer_backends
	MYPYPATH=build/types $(RUN) mypy -p deepinfer_core -p deepinfer_backends
	$(VENV)/bin/lint-imports --no-logo

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install -q -c constraints.txt -e '.[dev]'
	touch $@
