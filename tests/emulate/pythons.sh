#!/bin/bash
# Every supported Python that is here: a wheel from the sdist in an empty folder, pip install ., and pip install -e .,
# each tried; then the fast tests. On the oldest Python they are the Cases, with the oldest NumPy.
set -euo pipefail
. "$(dirname "$0")/common.sh"

# find_python VERSION: from PATH or pyenv, nothing if there is none.
find_python() {
  local candidate
  for candidate in $(type -ap "python$1") "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

try() {
  (cd / && "$1" -c 'import lanewise, numpy; assert lanewise.argmax(numpy.float32([1, 3, 2])) == 1; print(lanewise.__file__)')
}

test_python() {
  local work=$build/pythons/$1 pip
  rm -rf "$work"
  "$2" -m venv "$work/venv"
  pip="$work/venv/bin/python -m pip --disable-pip-version-check -q"
  $pip install "$root[test]" && try "$work/venv/bin/python"
  $pip install -e "$root" && try "$work/venv/bin/python"
  $pip uninstall -y lanewise
  (mkdir "$work/empty" && cd "$work/empty" && $pip wheel --no-deps "$build/pythons"/lanewise-*.tar.gz)
  $pip install "$work/empty"/lanewise-*.whl && try "$work/venv/bin/python"
  if [ "$1" = 3.10 ]; then
    $pip install "numpy==1.25.*"
    "$work/venv/bin/python" -m pytest -m "not slow" tests/test_cases.py tests/test_faults.py
  else
    "$work/venv/bin/python" -m pytest -m "not slow"
  fi
}

rm -rf "$build/pythons"
"$python" setup.py -q sdist -d "$build/pythons"
for version in 3.10 3.11 3.12 3.13; do
  found=$(find_python $version)
  if [ -n "$found" ]; then
    say "Python $version"
    test_python $version "$found"
  else
    say "Python $version: not here"
  fi
done
