# The two commands of the README. Each sets itself up: a virtual environment of its own, nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -n 2 --dist worksteal

.PHONY: demo test lint bench clean

$(BIN)/mlapatch: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.test: $(BIN)/mlapatch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--group lint --group test --group verify
	@# Of torch's 2,000 modules the tests load some; pip would compile all of them, for half of its time.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import hypothesis, mypy, pytest, torch._dynamo, triton.runtime.interpreter, xdist"
	@touch $@

demo: $(BIN)/mlapatch  ## the whole story on a real SGLang wheel, no GPU needed
	$(BIN)/mlapatch demo

test: $(VENV)/.test  ## style, types and all tests, on real SGLang wheels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# Hundreds of commands start in processes of their own: they find compiled modules, whatever this shell asks for.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.test  ## times of the command line on this machine (bench/README.md)
	$(BIN)/python bench/cli_times.py

clean:
	rm -rf $(VENV)
