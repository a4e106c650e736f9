#!/bin/bash
# The tests on a build with AddressSanitizer and UndefinedBehaviorSanitizer.
set -euo pipefail
. "$(dirname "$0")/common.sh"

say "building with sanitizers"
# Without variable tracking, which takes minutes on the scalar unit; with symbols, for the reports.
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -fno-var-tracking-assignments"
LANEWISE_DEBUG=1 CFLAGS=$flags LDFLAGS=$flags build_package sanitized

say "testing with sanitizers"
# Python and NumPy leak at exit by design; CPython's own allocator would hide accesses beyond what it handed out.
preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$build/sanitized/site \
  "$python" -m pytest -m "not slow and not native" "$@"
