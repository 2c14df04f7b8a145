# Two commands: `make demo` and `make test`. Both set up `.venv` first; nothing else needs to be installed but Python 3.11+.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_PROMPT := Elizabeth looked at him with a smile, and said,
# One thread: the bundled model's operations are too small to share, and a busy core stalls every barrier.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint format bench clean

demo: $(STAMP)
	@printf '\n%s' "$(DEMO_PROMPT)"
	@$(BIN)/uncast generate "$(DEMO_PROMPT)" --max-tokens 160

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pip, not another installer: it finds a local torch build where the machine's configuration names one.
$(STAMP): pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "uncast needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[torch,server,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
