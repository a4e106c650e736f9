#!/bin/bash
# The AVX-512 kernels: natively where the CPU has them. Elsewhere their logic in a build that spells the intrinsics in
# AVX2 (SIMDe), and the real instructions, between guard pages, under Bochs.
set -euo pipefail
. "$(dirname "$0")/common.sh"
. tests/emulate/bochs.sh

if "$python" -c 'import sys; from lanewise import _ops; sys.exit(not _ops.allowed("avx512"))'; then
  say "AVX-512, on this CPU"
  LANEWISE_ISA=avx512 "$python" -m pytest -m "not slow"
  exit
fi

say "AVX-512 under Bochs: replay"
record_and_build_replay
bochs_replay "$build/replay/replay" "$build/recording"

say "AVX-512 spelled in AVX2: the tests"
[ -d "$build/simde/include" ] || "$python" -m pip install -q --no-deps --target "$build/simde/include" cmeel-simde==0.8.2
CFLAGS="-DLANEWISE_SIMDE -I$root/tests/emulate -I$build/simde/include/cmeel.prefix/include" build_package simde
PYTHONPATH=$build/simde/site "$python" -m pytest -m "not slow"
