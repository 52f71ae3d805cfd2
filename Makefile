# What a user and a maintainer repeat. `make help` lists it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := protocol download kernels text kv console engine router operator pagefleet
EDITABLE := $(addprefix -e ,$(DISTRIBUTIONS))
# uv installs in a fifth of pip's time, and does not read pip's settings: where those name an index, uv's own must name one too.
UV := $(shell command -v uv)
INSTALL = if [ -n "$(UV)" ] && { [ -n "$${UV_DEFAULT_INDEX:-}$${UV_INDEX:-}$${UV_EXTRA_INDEX_URL:-}$${UV_FIND_LINKS:-}" ] || \
	! $(BIN)/pip config list | grep -qE 'index-url|find-links'; }; \
	then VIRTUAL_ENV=$(VENV) uv pip install -q -c constraints.txt $(1); \
	else $(BIN)/pip install --disable-pip-version-check -c constraints.txt $(1) 2>&1 | $(PIP_PROGRESS); fi
# One line per package instead of pip's many.
PIP_PROGRESS := sed -un -e 's/^Collecting \([^ ]*\).*/  found \1/p' -e 's/^Installing collected.*/  installing, half a minute .../p' \
	-e '/^ERROR/p' -e '/^  ERROR/p'

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "pagefleet needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) -V 2>&1); say make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV) && ln -sf bin/python $@

# The kernels of the CPU are compiled along the way, where there is a compiler.
$(VENV)/installed: $(VENV)/python constraints.txt $(DISTRIBUTIONS:%=%/pyproject.toml) kernels/native_build.py $(wildcard kernels/native/*)
	@echo "Installing pagefleet and its libraries (once, one to three minutes)"
	@$(call INSTALL,$(EDITABLE))
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	@echo "Installing what the tests need (once)"
	@$(call INSTALL,-r requirements-dev.txt)
	@touch $@

install: $(VENV)/installed-dev  ## Set everything up in .venv

up: $(VENV)/installed  ## Serve examples/01-quickstart on http://127.0.0.1:8000 until Ctrl-C
	@exec $(BIN)/pagefleet up examples/01-quickstart/inferenceservice.yaml

chat: $(VENV)/installed  ## Talk to what `make up` serves
	@exec $(BIN)/pagefleet chat

# With TEST_AGAIN what failed, in a run that came to its end, runs once more with nothing beside it, and may pass then.
TEST_AGAIN ?=

# Tests wait for processes as often as they compute: one worker more than cores keeps two cores busy.
TEST_WORKERS ?= 3

# Rooms whose tests start no process and load no torch.
PURE := architecture/test_budgets.py architecture/test_docs.py chart engine/core images operator/autoscale operator/plan \
	operator/render protocol router/admission router/prefix router/scheduling text

# Tests start hundreds of processes: each reads the bytecode that the first wrote, wherever this is switched off.
quick test test-all: export PYTHONDONTWRITEBYTECODE =

quick: $(VENV)/installed-dev  ## Lint, and run the pure tests, in under a minute
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest -n 2 -m "not fleet" --hypothesis-profile quick $(PURE:%=tests/%)

test: $(VENV)/installed-dev  ## Run the test suite, but for what is marked nightly
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not nightly" --timings || \
		{ [ $$? = 1 ] && [ -n "$(TEST_AGAIN)" ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -ra; }

test-all: $(VENV)/installed-dev  ## Run every test, on larger shapes and more examples, and print what is covered
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --hypothesis-profile all --timings --timeout 1800 \
		$(filter-out %_pagefleet,$(DISTRIBUTIONS:%=--cov=pagefleet_%)) --cov=pagefleet --cov-report=
	@$(BIN)/coverage report --skip-empty --sort=cover | head -42
	@echo "Covered in all: $$($(BIN)/coverage report --format=total) %"

lint: $(VENV)/installed-dev  ## Format, lint, types and import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

format: $(VENV)/installed-dev  ## Put the code into shape
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

rooms: $(VENV)/python  ## Print the files and lines of every room, and its budget
	@$(BIN)/python -m tests.architecture.rooms

budget: $(VENV)/python  ## Make today's sizes of the rooms their budget
	@$(BIN)/python -m tests.architecture.rooms --write

native: $(VENV)/installed  ## Compile the kernels of the CPU again, and say why where that fails
	@$(BIN)/python kernels/native_build.py

crds: $(VENV)/installed  ## Write crds/, and the chart's copy, from the types in protocol
	@$(BIN)/python -m pagefleet_operator.api.crdgen crds
	@cp crds/*.yaml charts/pagefleet/files/crds/

monitoring: $(VENV)/installed  ## Write the chart's dashboards and alerts from charts/monitoring
	@$(BIN)/python -m charts.monitoring

chart: $(VENV)/installed-dev  ## Render, lint and test the Helm chart; KUBEBUILDER_ASSETS=... adds a real API server
	@$(BIN)/python -m pytest tests/chart tests/kubernetes/test_chart.py

tiny: $(VENV)/installed-dev  ## Train the embedded model again (under half an hour on two cores)
	@$(BIN)/python -m tiny.train

bench: $(VENV)/installed-dev  ## Measure scheduler, router and the way to the first answer on this machine
	@$(BIN)/python bench/scheduler.py
	@$(BIN)/python bench/router.py
	@$(BIN)/python bench/first_answer.py

bench-throughput: $(VENV)/installed-dev  ## Measure the engine against transformers (and vLLM: VLLM_PYTHON=...)
	@$(BIN)/python bench/throughput.py --transformers-python $(BIN)/python $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

bench-picture: $(VENV)/installed-dev  ## Make docs/images/bench-conversations.png and its figures anew: three minutes
	@$(BIN)/python bench/conversations.py --json bench/results/conversations.json

docs: $(VENV)/installed-dev  ## Check that the documents point at things that exist, and that examples print what they say
	@$(BIN)/python -m pytest tests/architecture/test_docs.py tests/examples

site: $(VENV)/installed  ## Build the documentation as a site into build/site
	@$(call INSTALL,-r requirements-site.txt)
	@rm -rf build/site-source && mkdir -p build/site-source
	@git ls-files -z | xargs -0 cp --parents -t build/site-source
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/installed-dev  ## Build wheels and source archives of all distributions into dist/
	@rm -rf dist && $(BIN)/python images/dependencies.py --wheels dist --sdists dist $(DISTRIBUTIONS)
	@cd dist && sha256sum *.whl *.tar.gz > SHA256SUMS

clean:  ## Remove caches and the environment
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help install up chat quick test test-all lint format rooms budget native crds monitoring chart tiny bench bench-picture bench-throughput docs site dist clean
