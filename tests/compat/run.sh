#!/bin/bash
# run.sh NAME: the drop-ins for one package, tested against that package in an environment of their own, which holds
# what tests/compat/NAME/requirements.txt says, and no-deps.txt, if there is one, without what its packages ask for.
# lanewise comes from pkg, where the caller has built it.
set -euo pipefail
. "$(dirname "$0")/../emulate/common.sh"
name=$1
here=$root/tests/compat/$name
home=$build/compat/$name
shift
[ -e "$here/requirements.txt" ] || { echo "no drop-in $name: there are $(ls tests/compat | grep -v '\.')" >&2; exit 1; }

wanted=$(cat "$here/requirements.txt" "$here/no-deps.txt" 2>/dev/null) || true
if [ "$wanted" != "$(cat "$home/installed" 2>/dev/null)" ]; then
  say "installing what $name needs"
  rm -rf "$home"
  "$python" -m venv "$home"
  "$home/bin/python" -m pip -q --disable-pip-version-check install -r "$here/requirements.txt" pytest numpy py-cpuinfo ml_dtypes
  if [ -e "$here/no-deps.txt" ]; then
    "$home/bin/python" -m pip -q --disable-pip-version-check install --no-deps -r "$here/no-deps.txt"
  fi
  echo "$wanted" >"$home/installed"
fi
# Not this folder itself: its folders would pass for the packages they are named after. One thread for the others: on
# busy cores torch's wait for one another, and tests of caches took minutes.
OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH=$root/pkg:$root/tests/compat/shared "$home/bin/python" -m pytest "$here" "$@"
