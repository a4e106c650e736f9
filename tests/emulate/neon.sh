#!/bin/bash
# The tests on aarch64: natively on such a host, elsewhere on Debian's aarch64 CPython under qemu-user, with a
# cross-compiled package.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if [ "$(uname -m)" = aarch64 ]; then
  say "NEON, on this CPU"
  exec "$python" -m pytest -m "not slow"
fi

. tests/emulate/aarch64.sh
fetch_aarch64

say "cross-compiling"
for_aarch64 build_package neon

say "NEON under qemu: replay"
replay "$aarch64/replay" $cross neon qemu-aarch64-static

say "NEON under qemu: tests"
PYTHONPATH=$aarch64/site:$aarch64/packages "$aarch64/python" -m pytest -m "not slow and not native" -p no:cacheprovider "$@"
