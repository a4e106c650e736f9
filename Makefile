# make demo, make test: see README.md. Everything is installed into $(VENV) and built there or in .build; only the
# emulations ask the system for packages.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
SOURCES = setup.py pyproject.toml $(wildcard csrc/* csrc/kernels/* pkg/lanewise/*.pyx pkg/lanewise/*.pxd)
LINTERS = ruff==0.17.6 mypy==2.4.1 clang-format==20.1.8
COMPILED = $(patsubst pkg/lanewise/%.pyx,lanewise.%,$(wildcard pkg/lanewise/*.pyx))

all: test

$(VENV)/built: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@

$(VENV)/linters: Makefile $(VENV)/built
	$(PY) -m pip install -q --disable-pip-version-check $(LINTERS)
	touch $@

demo: $(VENV)/built
	$(PY) -m lanewise demo

bench: $(VENV)/built
	$(PY) -m lanewise bench

test: $(VENV)/built
	$(PY) -m pytest -m "not slow"

test-slow: $(VENV)/built
	$(PY) -m pytest -m slow

test-neon test-avx512 test-old-cpu sanitize test-pythons: $(VENV)/built
	VENV=$(VENV) tests/emulate/$(subst -,_,$(@:test-%=%)).sh

lint: $(VENV)/linters
	$(VENV)/bin/ruff check && $(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy pkg && MYPYPATH=pkg $(PY) -m mypy.stubtest $(COMPILED)
	git ls-files "*.[ch]" | xargs $(VENV)/bin/clang-format --dry-run -Werror

clean:
	rm -rf $(VENV) .build build dist pkg/*.egg-info pkg/lanewise/*.c pkg/lanewise/*.so .*_cache .hypothesis

.PHONY: all demo bench test test-slow test-neon test-avx512 test-old-cpu sanitize test-pythons lint clean
