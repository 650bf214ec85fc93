# make demo          install, build the weights, serve, ask, hear the answer in reply.wav
# make serve         the same server, until Ctrl-C
# make test          everything that must pass
# make test-vllm     what needs vLLM, in an environment of its own: four minutes more
# make perf          perf_analyzer against a pipeline: client/bench/perf_analyzer/
# make soak          load and faults for a quarter of an hour: tests/soak/soak.py
# make plans         Code2Wav of qwen3_omni as an ONNX file; ARGS="--checkpoint DIR --tensorrt": build/plans.py
# make test-plans    the tests of plans, with TensorRT for RTX, which `make test` does not install
# make setup weights prometheus lint format clean
#
# PYTHON, VENV           the interpreter to use, and where to install
# VLLM_VENV              where to install vLLM, which wants another numpy than Triton's stub
# TORCH_INDEX            an index to install torch and torchvision from, where the usual one gives CUDA builds
# PIPELINE               for demo, serve and perf
# URL                    for perf: the gRPC address of a server that runs, instead of one of its own
# PROMPT, AUDIO, OUT     for demo: the question, typed or spoken, and the file for the answer
# ARGS                   for serve, for pytest, for perf, for plans and for soak
# JOBS                   how many files of tests run at once

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PIPELINE ?= smoltalk
OUT ?= reply.wav
PROMPT ?=
AUDIO ?=
URL ?=
ARGS ?=
JOBS ?= 2
TORCH_INDEX ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install -qq --disable-pip-version-check --no-compile -c requirements.lock
SERVE_READY := $(VENV)/.installed-serve
TEST_READY := $(VENV)/.installed-test
PLANS_READY := $(VENV)/.installed-plans
TENSORRT_READY := $(VENV)/.installed-tensorrt
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALL := $(VLLM_BIN)/pip install -qq --disable-pip-version-check --no-compile
VLLM_READY := $(VLLM_VENV)/.installed
SOURCES := backends client tests build

.PHONY: demo serve test test-vllm perf soak plans test-plans setup weights prometheus lint format clean
.DEFAULT_GOAL := demo

demo: $(SERVE_READY) weights
	@$(BIN)/python build/demo.py --pipeline '$(PIPELINE)' --prompt "$$PROMPT" --audio "$$AUDIO" --out "$$OUT"
export PROMPT AUDIO OUT

serve: $(SERVE_READY) weights
	@$(BIN)/tritone serve $(PIPELINE) $(ARGS)

test: $(TEST_READY)
	@$(MAKE) -j3 weights lint prometheus
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-vllm: $(TEST_READY) $(VLLM_READY) weights
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/vllm $(ARGS)
	TRITONE_VLLM_PYTHON=$(abspath $(VLLM_BIN)/python) $(BIN)/python -m pytest tests/server/test_vllm.py $(ARGS)

perf: $(SERVE_READY) weights
	@$(BIN)/python build/perf.py --pipeline '$(PIPELINE)' --url '$(URL)' $(ARGS)

soak: $(SERVE_READY)
	$(BIN)/python tests/soak/soak.py $(ARGS)

plans: $(PLANS_READY) weights
	@$(BIN)/python build/plans.py $(ARGS)

test-plans: $(TENSORRT_READY)
	$(BIN)/python -m pytest tests/unit/speech/test_plans.py $(ARGS)

setup: $(SERVE_READY)

weights: $(SERVE_READY)
	@$(BIN)/python build/smoltalk.py
	@$(BIN)/python build/qwen3_omni_tiny.py

prometheus: $(TEST_READY)
	@$(BIN)/python build/prometheus_tools.py

lint: $(TEST_READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(TEST_READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) $(VLLM_VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 on this machine; install one or give PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SERVE_READY): pyproject.toml requirements.lock | $(BIN)/python
	$(if $(TORCH_INDEX),$(INSTALL) --index-url '$(TORCH_INDEX)' torch torchvision)
	@echo 'installing into $(VENV), once; a few minutes'
	$(INSTALL) -e '.[server,smoltalk,qwen3-omni]'
	@touch $@

$(TEST_READY): pyproject.toml requirements.lock | $(SERVE_READY)
	$(INSTALL) -e '.[server,smoltalk,qwen3-omni,client,bench,test,dev]'
	@touch $@

$(PLANS_READY): pyproject.toml requirements.lock | $(SERVE_READY)
	$(INSTALL) -e '.[server,smoltalk,qwen3-omni,plans]'
	@touch $@

$(TENSORRT_READY): pyproject.toml requirements.lock | $(TEST_READY)
	$(INSTALL) -e '.[tensorrt]'
	@touch $@

$(VLLM_READY): pyproject.toml requirements-vllm.lock
	@echo 'installing vLLM into $(VLLM_VENV), once; two minutes'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_INSTALL) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') -c requirements-vllm.lock torch
	$(VLLM_INSTALL) --no-deps -r requirements-vllm.lock
	$(VLLM_INSTALL) --no-deps -e .
	@touch $@
