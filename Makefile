# make demo          install, build the weights, serve, ask, hear the answer in reply.wav
# make serve         the same server, until Ctrl-C
# make test          everything that must pass
# make test-vllm     the part of it that needs vLLM, in an environment above the other one
# make perf          perf_analyzer against a pipeline: client/bench/perf_analyzer/
# make soak          load and faults for a quarter of an hour: tests/soak/soak.py
# make plans         Code2Wav of qwen3_omni as an ONNX file; ARGS="--checkpoint DIR --tensorrt": build/plans.py
# make setup weights prometheus lint format clean
#
# PYTHON, VENV           the interpreter to use, and where to install
# VLLM_VENV              where to install vLLM, which wants another numpy than Triton's stub: build/venv_above.py
# TORCH_INDEX            an index to install torch and torchvision from, where the usual one gives CUDA builds
# PIPELINE               for demo, serve and perf
# URL                    for perf: the gRPC address of a server that runs, instead of one of its own
# PROMPT, AUDIO, OUT     for demo: the question, typed or spoken, and the file for the answer
# ARGS                   for serve, for pytest, for perf, for plans and for soak
# JOBS                   how many files of tests run at once; servers wait, so more than there are cores

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
JOBS ?= 3
TORCH_INDEX ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install -qq --disable-pip-version-check --no-compile -c requirements.lock
SERVE_READY := $(VENV)/.installed-serve
TEST_READY := $(VENV)/.installed-test
PLANS_READY := $(VENV)/.installed-plans
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_READY := $(VLLM_VENV)/.installed
TO_SERVE := server,smoltalk,qwen3-omni
TO_TEST := $(TO_SERVE),client,bench,test,dev
# What tests need holds what serving needs: where they are asked for, one installation is enough.
FOR_TESTS := $(filter test% lint prometheus format,$(MAKECMDGOALS))
TEST_ENV := OMP_NUM_THREADS=1 TRITONE_VLLM_PYTHON=$(abspath $(VLLM_PYTHON))
SOURCES := backends client tests build

.PHONY: demo serve test test-main test-vllm test-vllm-thinker perf soak plans setup weights prometheus lint format clean
.DEFAULT_GOAL := demo

demo: $(SERVE_READY) weights
	@$(BIN)/python build/demo.py --pipeline '$(PIPELINE)' --prompt "$$PROMPT" --audio "$$AUDIO" --out "$$OUT"
export PROMPT AUDIO OUT

serve: $(SERVE_READY) weights
	@$(BIN)/tritone serve $(PIPELINE) $(ARGS)

test: $(TEST_READY)
	@$(MAKE) -j4 weights lint prometheus $(VLLM_READY)
	@$(MAKE) -j2 test-main test-vllm-thinker

test-main: $(TEST_READY) $(VLLM_READY)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-vllm: test-vllm-thinker
	$(TEST_ENV) $(BIN)/python -m pytest tests/server/test_vllm.py $(ARGS)

# In a process of its own, and behind tests that look at clocks.
test-vllm-thinker: $(VLLM_READY) weights
	$(TEST_ENV) nice -n 5 $(VLLM_PYTHON) -m pytest -q tests/vllm

perf: $(SERVE_READY) weights
	@$(BIN)/python build/perf.py --pipeline '$(PIPELINE)' --url '$(URL)' $(ARGS)

soak: $(SERVE_READY)
	$(BIN)/python tests/soak/soak.py $(ARGS)

plans: $(PLANS_READY) weights
	@$(BIN)/python build/plans.py $(ARGS)

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

define install
	$(if $(TORCH_INDEX),$(INSTALL) --index-url '$(TORCH_INDEX)' torch torchvision)
	@echo 'installing into $(VENV), once; a few minutes'
	$(INSTALL) -e '.[$1]'
	@touch $@
endef

$(SERVE_READY): pyproject.toml requirements.lock | $(if $(FOR_TESTS),$(TEST_READY),$(BIN)/python)
	$(if $(FOR_TESTS),@touch $@,$(call install,$(TO_SERVE)))

$(TEST_READY): pyproject.toml requirements.lock | $(BIN)/python
	$(call install,$(TO_TEST))

$(PLANS_READY): pyproject.toml requirements.lock | $(SERVE_READY)
	$(INSTALL) -e '.[server,smoltalk,qwen3-omni,plans]'
	@touch $@

$(VLLM_READY): requirements-vllm.lock build/venv_above.py $(TEST_READY)
	@echo 'installing vLLM into $(VLLM_VENV), once; a minute'
	$(BIN)/python build/venv_above.py $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r requirements-vllm.lock
	@touch $@
