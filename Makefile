# `make demo` and `make test` do all the set-up: a virtual environment in .venv, the package, then the work.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types structure recipes bench docs clean

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'mindstudio-probe>=26.2; sys_platform == "linux"'  # the rest it asks for is not used
	touch .venv/installed

demo: .venv/installed  ## train the built-in model and show what came of it
	$(BIN)/pellucid train recipes/demo.yaml
	$(BIN)/pellucid rollouts outputs/pellucid/demo --limit 3

test: .venv/installed  ## run every test
	$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder  # two cores; many tests wait a lot

lint: .venv/installed
	$(BIN)/ruff check src tests benchmarks examples

types: .venv/installed
	$(BIN)/pyright src

recipes: .venv/installed  ## run each recipe that needs no download for a few steps
	$(BIN)/python -m pytest -q tests/integration/test_recipes.py tests/integration/test_profiling_recipes.py

bench: .venv/installed  ## speed as ratios measured in one run; needs models/smollm2-135m-instruct (examples/convert_smollm2.py)
	cd benchmarks && for name in policy_gap update rollout grpo_step; do \
	  ../$(BIN)/python $$name.py --model $(abspath models/smollm2-135m-instruct) --json $(abspath benchmarks/results.jsonl) || exit 1; done

docs: .venv/installed  ## regenerate the pages that come from the code
	$(BIN)/python -m pellucid.config.describe
	$(BIN)/python -m pellucid.metrics.table > docs/metrics.md

clean:
	rm -rf .venv build src/*.egg-info
