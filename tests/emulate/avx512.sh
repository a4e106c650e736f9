#!/bin/bash
# The AVX-512 unit: natively where the CPU has it. Elsewhere its logic, in a build that spells the intrinsics in AVX2
# (SIMDe), and its real instructions, between guard pages, under Bochs.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if "$python" -c 'import sys; from lanewise import _ops; sys.exit(not _ops.allowed("avx512"))'; then
  say "AVX-512, on this CPU"
  exec "$python" -m pytest -m "not slow" -k "avx512 or replay"
fi

. tests/emulate/bochs.sh
say "AVX-512 under Bochs, beside the next"
replay replay gcc avx512 under_bochs >"$build/bochs.txt" 2>&1 &
bochs=$!

say "AVX-512 spelled in AVX2"
[ -d "$build/simde/include" ] || "$python" -m pip -q install --no-deps --target "$build/simde/include" cmeel-simde==0.8.2
CFLAGS="-DLANEWISE_SIMDE -I$root/tests/emulate -I$build/simde/include/cmeel.prefix/include" build_package simde
PYTHONPATH=$build/simde/site "$python" -m pytest -m "not slow" -k avx512

say "AVX-512 under Bochs"
wait $bochs || { cat "$build/bochs.txt"; exit 1; }
cat "$build/bochs.txt"
