# make demo, make test: see README.md. Everything is installed into $(VENV) and built there or in .build; only the
# emulations (tests/emulate) ask the system for packages.
PYTHON ?= python3
export VENV ?= .venv
PY = $(VENV)/bin/python
PIP = $(PY) -m pip install -q --disable-pip-version-check
SOURCES = setup.py pyproject.toml $(wildcard csrc/* csrc/kernels/* pkg/lanewise/*.pyx pkg/lanewise/*.pxd)
COMPILED = $(patsubst pkg/lanewise/%.pyx,lanewise.%,$(wildcard pkg/lanewise/*.pyx))
DROPINS = $(patsubst tests/compat/%/requirements.txt,%,$(wildcard tests/compat/*/requirements.txt))
LINTERS = ruff==0.17.6 mypy==2.4.1 clang-format==20.1.8

all: test

$(VENV)/built: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/linters: Makefile $(VENV)/built
	$(PIP) $(LINTERS)
	touch $@

$(VENV)/peers: pyproject.toml $(VENV)/built
	$(PIP) -e ".[bench]"
	touch $@

demo: $(VENV)/built
	$(PY) -m lanewise demo

# a real model chats: make generate ARGS=--compare
generate: .build/generate/installed $(VENV)/built
	OPENBLAS_NUM_THREADS=1 PYTHONPATH=pkg .build/generate/bin/python examples/generate $(ARGS)

.build/generate/installed: examples/generate/requirements.txt examples/generate/no-deps.txt | $(VENV)/built
	$(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -r $<
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $(word 2,$^)
	touch $@

bench: $(VENV)/peers
	$(PY) -m bench && $(PY) -m bench --peers

test: $(VENV)/built
	$(PY) -m pytest -m "not slow"

test-slow: $(VENV)/built
	$(PY) -m pytest -m slow

test-neon: $(VENV)/built
	tests/emulate/neon.sh

test-avx512: $(VENV)/built
	tests/emulate/avx512.sh

test-old-cpu: $(VENV)/built
	tests/emulate/old_cpu.sh

test-pythons: $(VENV)/built
	tests/emulate/pythons.sh

sanitize: $(VENV)/built
	tests/emulate/sanitize.sh

sanitize-slow: $(VENV)/built
	tests/emulate/sanitize.sh -m slow -k "Long or for_long" tests/test_pool.py tests/test_kvcache.py

wheels: $(VENV)/built
	tests/emulate/wheels.sh

test-compat: $(DROPINS:%=test-compat-%)

test-compat-%: $(VENV)/built
	tests/compat/run.sh $*

lint: $(VENV)/linters
	$(VENV)/bin/ruff check && $(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy pkg && MYPYPATH=pkg $(PY) -m mypy.stubtest $(COMPILED)
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard csrc/*.[ch] csrc/kernels/*.h tests/*/*.[ch] tests/*/*/*.c)

clean:
	rm -rf $(VENV) .build build dist pkg/*.egg-info pkg/lanewise/*.c pkg/lanewise/*.so .*_cache .hypothesis

.PHONY: all demo generate bench test test-slow test-neon test-avx512 test-old-cpu test-pythons test-compat sanitize sanitize-slow wheels lint clean
