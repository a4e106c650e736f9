# make demo, make test: see README.md. Everything is installed into $(VENV), nothing outside it is touched.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
SOURCES = setup.py pyproject.toml $(wildcard csrc/* csrc/kernels/* pkg/lanewise/*.pyx pkg/lanewise/*.pxd)

all: test

$(VENV)/built: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@

test: $(VENV)/built
	$(PY) -m pytest -m "not slow"

.PHONY: all test
