#!/bin/bash
# CPUs from before AVX-512 and from before AVX, by qemu-user: the dispatcher must choose what runs there, and no
# instruction of a newer ISA may be met on the way.
set -euo pipefail
. "$(dirname "$0")/common.sh"
need qemu-user-static

for cpu in Nehalem Haswell; do
  say "$cpu"
  emulated_python "$python-$cpu" "$python" qemu-x86_64-static -cpu "$cpu"
  "$python-$cpu" -W ignore -c "import lanewise.__main__" 
done
