#!/bin/bash
# CPUs from before AVX and from before AVX-512, by qemu-user: the dispatcher chooses what runs there, and nothing meets
# an instruction that does not.
set -euo pipefail
. "$(dirname "$0")/common.sh"

# on_cpu MODEL ISAS: the dispatcher's tests and one size of each Case, where just these ISAs may run.
on_cpu() {
  local emulated=$python-emulated found
  say "$1"
  # Without what qemu's own translator lacks, about which it would complain at every start.
  emulated_python "$emulated" "$python" qemu-x86_64-static -cpu "$1,-pcid,-invpcid,-x2apic,-tsc-deadline"
  found=$("$emulated" -c 'from lanewise import _ops; print(*filter(_ops.allowed, _ops.compiled()))')
  [ "$found" = "$2" ] || { echo "$1 may run $2, not $found" >&2; exit 1; }
  LANEWISE_TEST_PAGES=readable "$emulated" -m pytest -m "not slow" -p no:cacheprovider \
    tests/test_dispatch.py tests/test_cases.py -k "dispatch or 1000"
}

if [ "$(uname -m)" != x86_64 ]; then
  say "old x86 CPUs: not run, this is $(uname -m)"
  exit
fi
need qemu-user-static
on_cpu Nehalem "scalar"
on_cpu Haswell-noTSX "avx2 scalar"
