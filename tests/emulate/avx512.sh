#!/bin/bash
# The AVX-512 kernels: natively where the CPU has them. Elsewhere their logic in a build that spells the intrinsics in
# AVX2 (SIMDe), and the real instructions, between guard pages, under Bochs.
set -euo pipefail
. "$(dirname "$0")/common.sh"
say "AVX-512 spelled in AVX2"
[ -d "$build/simde/include" ] || "$python" -m pip -q install --no-deps --target "$build/simde/include" cmeel-simde==0.8.2
CFLAGS="-Wno-psabi -DLANEWISE_SIMDE -I$root/tests/emulate -I$build/simde/include/cmeel.prefix/include" build_package simde
PYTHONPATH=$build/simde/site "$python" -m pytest -m "not slow" -k avx512 --ignore tests/test_replay.py

say "AVX-512 under Bochs"
. tests/emulate/bochs.sh
replay "$build/replay" gcc avx512 under_bochs
