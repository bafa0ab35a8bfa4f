# What a contributor needs, each as one command; `make help` lists them.
# Everything is installed into .venv/ and .matrix/ here, and nowhere else. What is installed once is
# not installed again (nor is the network asked) until pyproject.toml or requirements/ change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?=
ARGS ?=
JOBS ?= 2
ROWS ?= $(ALL_ROWS)

EVERYDAY := requirements/py3.11-pl2.0.9.txt
ALL_ROWS := $(patsubst requirements/%.txt,%,$(wildcard requirements/*.txt))

# Micro-batches are small: more threads than processes only wait for each other.
export OMP_NUM_THREADS ?= 1

# $(call find-python,3.11): a shell command that sets $$python, from the PATH or pyenv; PYTHON= names
# the 3.11 itself. A pyenv shim exists for versions that it refuses to start: candidates are tried.
define find-python
python=; for candidate in $(or $(if $(filter 3.11,$(1)),$(PYTHON)),python$(1) \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(1).*/bin/python); do \
  if "$$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' &>/dev/null; \
  then python=$$candidate; break; fi; done; \
if [ -z "$$python" ]; then \
  echo "No Python $(1) found$(if $(PYTHON), (tried PYTHON=$(PYTHON))): make it available as python$(1) or in" \
    "pyenv, or name the 3.11 with PYTHON=/path/to/python."; \
  exit 1; fi
endef

# What Lightning 2.0 has to say of itself on newer torch and setuptools.
LIGHTNING_S_OWN := -W ignore::UserWarning:lightning_fabric \
    -W ignore::FutureWarning:pytorch_lightning.utilities._pytree

.PHONY: help
help: ## List the targets (default)
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: .venv/.demo ## Install into .venv and train examples/digits.py on the emulator; ARGS="--cpu", ...
	@echo "== examples/digits.py $(ARGS)"
	@.venv/bin/python $(LIGHTNING_S_OWN) examples/digits.py $(ARGS)

.PHONY: test
test: check ## Install into .venv, then `make check` and the tests; ARGS="-k digits", JOBS=2
	@echo "== pytest: $(ARGS) with $(JOBS) processes"
	@.venv/bin/python -m pytest -n $(JOBS) $(ARGS)

.PHONY: check
check: .venv/.test ## Lint, format and types: ruff and mypy
	@echo "== ruff check, ruff format --check, mypy"
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

.PHONY: bench
bench: .venv/.test ## Measure what the callback costs against its peers: a table, and runs/benchmarks.json
	@echo "== tests/benchmarks (some minutes)"
	@.venv/bin/python -W ignore -m tests.benchmarks $(ARGS)

# The doctor traces lines itself, and goes on with coverage's tracer beside it if that is in Python.
.PHONY: coverage
coverage: .venv/.test ## What the tests run of the package, by branch: .venv and each row that .matrix holds
	@rm -f .coverage .coverage.*
	@echo "== coverage: pytest with $(JOBS) processes"
	@.venv/bin/python -m coverage run -m pytest -n $(JOBS) --ignore=tests/doctor $(ARGS)
	@COVERAGE_CORE=pytrace .venv/bin/python -m coverage run -m pytest -n $(JOBS) tests/doctor $(ARGS)
	@for python in $(wildcard .matrix/py*/bin/python); do \
	  echo "== coverage: $$python"; $$python -m coverage run -m pytest $(ARGS); done
	@.venv/bin/python -m coverage combine -q
	@.venv/bin/python -m coverage report

.PHONY: mutants
mutants: .venv/.mutants ## Change the core's lines one by one: which change does no test notice? ARGS="wire --again"
	@.venv/bin/python -m tests.mutants $(ARGS)

# pdoc goes by the package's `__all__`, which names no modules (it takes `anchor` and `live` for two,
# which are called as their functions): those with what a user calls, catches or is given.
PUBLIC := captured cost doctor emulator errors history measurement tensor_statistics

.PHONY: docs
docs: .venv/.docs ## Render the docstrings into docs/
	@echo "== pdoc"
	@.venv/bin/python -W ignore -m pdoc --docformat google -o docs ipu_log_callback \
	  '!ipu_log_callback.anchor' '!ipu_log_callback.live' $(PUBLIC:%=ipu_log_callback.%)
	@echo "docs/index.html"

.PHONY: matrix
matrix: ## The tests on every supported pair of versions; ROWS="py3.8-pl1.6.5 ...", default all
	@failed=; for row in $(ROWS); do $(MAKE) row-$$row || failed="$$failed $$row"; done; \
	echo "== matrix"; for row in $(ROWS); do \
	  printf '%-22s %s\n' $$row "$$(tail -n 1 .matrix/$$row.log 2>/dev/null || echo 'not installed')"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

.PHONY: rows
rows: ## Name the rows of the matrix
	@printf '%s\n' $(ALL_ROWS)

.PHONY: clean
clean: ## Remove .venv, .matrix, caches and what the examples wrote
	rm -rf .venv .matrix build dist docs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
	rm -rf .coverage* .mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the everyday environment -----------------------------------------------------------------

.venv/bin/python:
	@echo "== making .venv"
	@$(call find-python,3.11); "$$python" -m venv .venv

# Two steps: with setuptools installed first, nothing is fetched to build the package itself.
.venv/.demo: pyproject.toml $(EVERYDAY) | .venv/bin/python
	@echo "== installing into .venv: $(EVERYDAY), ipu-log-callback[demo] (some minutes the first time)"
	@.venv/bin/python -m pip install -q -r $(EVERYDAY)
	@.venv/bin/python -m pip install -q --no-build-isolation -r $(EVERYDAY) -e ".[demo]"
	@touch $@

.venv/.test: .venv/.demo
	@echo "== installing into .venv: ipu-log-callback[test,check]"
	@.venv/bin/python -m pip install -q --no-build-isolation -r $(EVERYDAY) -e ".[test,check]"
	@touch $@

# mutmut's operators alone: its own interface would bring a newer rich than the tests take.
.venv/.mutants: .venv/.test
	@echo "== installing into .venv: mutmut, libcst"
	@.venv/bin/python -m pip install -q --no-deps mutmut==3.8.1
	@.venv/bin/python -m pip install -q libcst
	@touch $@

.venv/.docs: .venv/.demo
	@echo "== installing into .venv: ipu-log-callback[docs]"
	@.venv/bin/python -m pip install -q --no-build-isolation -r $(EVERYDAY) -e ".[docs]"
	@touch $@

# -- the matrix -------------------------------------------------------------------------------

.PHONY: row-%
row-%: .matrix/%/.installed
	@echo "== $*: pytest with $(JOBS) processes"
	@.matrix/$*/bin/python -m pytest -n $(JOBS) $(ARGS) 2>&1 | tee .matrix/$*.log

# uv resolves the old rows in seconds where pip searches for an hour. pip makes the new ones: it
# takes the CPU build of torch where its configuration offers one, as for .venv.
.PRECIOUS: .matrix/%/.installed
.matrix/%/.installed: requirements/%.txt pyproject.toml | .matrix/uv/bin/uv
	@echo "== $*: installing into .matrix/$*"
	@rm -rf .matrix/$* .matrix/$*.log
	@$(call find-python,$(patsubst py%,%,$(firstword $(subst -, ,$*)))); \
	if [[ $* == py3.11-* ]]; then \
	  "$$python" -m venv .matrix/$*; \
	  .matrix/$*/bin/python -m pip install -q -r $< -e ".[test]"; \
	else \
	  .matrix/uv/bin/uv venv -q --python "$$("$$python" -c 'import sys; print(sys.executable)')" .matrix/$*; \
	  .matrix/uv/bin/uv pip install -q --python .matrix/$*/bin/python -r $< -e ".[test]"; \
	fi
	@touch $@

.matrix/uv/bin/uv:
	@echo "== installing uv into .matrix/uv"
	@$(call find-python,3.11); "$$python" -m venv .matrix/uv
	@.matrix/uv/bin/python -m pip install -q uv
