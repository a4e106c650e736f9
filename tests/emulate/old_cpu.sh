#!/bin/bash
# CPUs from before AVX and from before AVX-512, by qemu-user: the dispatcher chooses what runs there, and nothing meets
# an instruction that does not.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if [ "$(uname -m)" != x86_64 ]; then
  say "old x86 CPUs: not run, this is $(uname -m)"
  exit
fi

need qemu-user-static
# Without what qemu's own translator lacks, about which it would complain at every start.
without=,-pcid,-invpcid,-x2apic,-tsc-deadline
for cpu in Nehalem Haswell-noTSX$without; do
  say "${cpu%%,*}"
  emulated_python "$python-emulated" "$python" qemu-x86_64-static -cpu "$cpu"
  "$python-emulated" -c 'from lanewise import _ops; print(*filter(_ops.allowed, _ops.compiled()))'
  "$python-emulated" -m pytest -m "not slow" -p no:cacheprovider tests/test_dispatch.py tests/test_cases.py -k "dispatch or 1000"
done
