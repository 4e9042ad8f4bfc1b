# Needs Python 3.11 or newer and make. Everything else is installed into .venv, once per change of the two files below.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEMO := .venv/.demo
STAMP := .venv/.ready
# Waiting OpenMP threads sleep instead of spinning: several jobs on one machine slow each other down several times otherwise.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help venv demo test lint soak clean

help:
	@echo "make demo   two examples on the built-in miniature: a sentence, then a picture -> out/*.mp4"
	@echo "make test   set-up, then every test"
	@echo "make lint   ruff check, ruff format --check, mypy"
	@echo "make soak   50 requests, 10 failing, again until SECONDS=600 are up: same bits, no growth, no leftovers"
	@echo "make venv   set-up of everything        make clean   remove .venv, out and caches"

venv: $(STAMP)

# What runs it, and all that tests it.
$(DEMO): EXTRAS :=
$(STAMP): EXTRAS := [parity,serve,dev]
$(DEMO) $(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "twinreel needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS)'
	touch $@

demo: $(DEMO)
	mkdir -p out
	$(BIN)/twinreel generate "a red ball bounces and a low bell rings at every bounce" --seed 4 -o out/sentence.mp4 --overwrite
	$(BIN)/python examples/picture.py out/still.png
	$(BIN)/twinreel generate "starting from <Picture 1>, the green ball slides from right to left on a dark background \
and a high hum is heard as it moves." --first out/still.png -o out/picture.mp4 --overwrite
	@echo; echo "Made out/sentence.mp4 and out/picture.mp4 (from out/still.png), each with a .json report beside it."

test: $(STAMP)
	$(BIN)/python -m pytest -q --durations=15 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

soak: $(STAMP)
	$(BIN)/python tests/soak.py --seconds $(or $(SECONDS),600)
	$(BIN)/python tests/soak_serve.py --seconds $(or $(SECONDS),600)

clean:
	rm -rf .venv out build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
