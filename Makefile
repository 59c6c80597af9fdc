# make demo   the whole job on real weights and data (about ten minutes on two cores, set-up included)
# make test   the tests, in parallel
# Everything lives in .venv; nothing is installed twice (stamps in .venv say what it holds).

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
HOST_PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
SOURCES_C := $(shell find lamella -name '*.c' -o -name '*.h' 2>/dev/null)
ARGS ?=

.PHONY: demo test test-slow test-distributed test-engines test-serve test-web test-log docs web engines bench lint format clean

demo: $(VENV)/.installed
	$(PY) -m lamella demo $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not engines and not serve and not web and not trackers" $(ARGS)

test-slow: $(VENV)/.dev
	$(PY) -m pytest -m "slow and not gpu and not engines and not serve and not web and not trackers" --timeout 1800 $(ARGS)

# Everything that runs several processes, 20 random kills among it.
test-distributed: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "distributed and not gpu" --timeout 1800 $(ARGS)

# Exports of real models in other engines (docs/engines.md); those whose environment is there.
test-engines: $(VENV)/.dev
	$(PY) -m pytest -m engines --timeout 1800 tests/engines $(ARGS)

# A running server: 50 clients for ten minutes while adapters are swapped, a fuzzed API.
test-serve: $(VENV)/.dev
	$(PY) -m pytest -m serve --timeout 1800 tests/serve tests/loadtest $(ARGS)

# Pages in headless Chromium.
test-web: $(VENV)/.dev
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }
	@command -v npm >/dev/null && $(MAKE) --no-print-directory web/node_modules || echo "no npm: the page is not checked with axe"
	$(PY) -m pytest -m web --timeout 600 tests/report $(ARGS)

# The documentation as a site, in build/site; broken links fail.
docs: .docs-venv/.made
	.docs-venv/bin/python -m mkdocs build --quiet

.docs-venv/.made: requirements-docs.txt
	$(HOST_PYTHON) -m venv .docs-venv
	.docs-venv/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

# The charts of the page of runs: needs Node, and writes a file that is committed.
web: web/node_modules
	cd web && npm run build

web/node_modules: web/package.json web/package-lock.json
	cd web && npm ci --no-audit --no-fund
	touch $@

# A run's figures in real trackers.
test-log: .log-venv/.made
	OMP_NUM_THREADS=1 .log-venv/bin/python -m pytest -m trackers tests/track $(ARGS)

# It sees what .venv holds: what is its own comes first.
.log-venv/.made: requirements-log.txt $(VENV)/.dev
	$(HOST_PYTHON) -m venv .log-venv
	.log-venv/bin/python -c "import sysconfig; from pathlib import Path; own = Path(sysconfig.get_path('purelib')); \
		(own / 'project.pth').write_text(str(Path('$(VENV)').resolve() / own.relative_to(Path('.log-venv').resolve())) + '\n')"
	.log-venv/bin/pip install --quiet --disable-pip-version-check -r requirements-log.txt
	touch $@

# vLLM stops at start-up beside torchvision, torchaudio or torchcodec of another torch.
engines: .engines/llama.cpp/.made .engines/vllm/.made .engines/mlx/.made .engines/transformers-serve/.made

.engines/llama.cpp/.made: requirements-llama-cpp.txt
	$(HOST_PYTHON) -m venv .engines/llama.cpp
	.engines/llama.cpp/bin/pip install --quiet --disable-pip-version-check -r requirements-llama-cpp.txt
	touch $@

.engines/vllm/.made: requirements-vllm.txt
	$(HOST_PYTHON) -m venv .engines/vllm
	.engines/vllm/bin/pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.engines/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.engines/mlx/.made: requirements-mlx.txt
	$(HOST_PYTHON) -m venv .engines/mlx
	.engines/mlx/bin/pip install --quiet --disable-pip-version-check -r requirements-mlx.txt
	touch $@

.engines/transformers-serve/.made: requirements-serve.txt
	$(HOST_PYTHON) -m venv .engines/transformers-serve
	.engines/transformers-serve/bin/pip install --quiet --disable-pip-version-check -r requirements-serve.txt
	touch $@

bench: $(VENV)/.dev
	$(PY) -m bench.kernels
	$(PY) -m bench.attention
	$(PY) -m bench.experts
	$(PY) -m bench.quantize
	$(PY) -m bench.layers
	$(PY) -m bench.memory
	$(PY) -m bench.checkpoint
	$(PY) -m bench.scale
	$(PY) -m bench.size
	$(PY) -m bench.shared
	$(PY) -m bench.hetero
	$(PY) -m bench.plan_times
	$(PY) -m bench.plan_memory
	$(PY) -m bench.plan
	$(PY) -m bench.merge
	$(PY) -m bench.serve
	$(PY) -m bench.train

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .bench-venv* .log-venv .docs-venv web/node_modules .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs stores
	find lamella -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@test -n "$(HOST_PYTHON)" || { echo "error: no Python 3.11 or later found" >&2; exit 2; }
	$(HOST_PYTHON) -m venv $(VENV)
	touch $@

# requirements.txt alone: what the demo needs. The package's own build compiles the C kernels.
$(VENV)/.required: requirements.txt | $(VENV)/.created
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.installed: $(VENV)/.required pyproject.toml $(wildcard setup.py) $(SOURCES_C)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
