#!/bin/bash
# The tests on aarch64: natively on such a host, elsewhere on Debian's aarch64 CPython under qemu-user, with a
# cross-compiled package. Debian's packages are only unpacked: no chroot, no second stage, no binfmt.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if [ "$(uname -m)" = aarch64 ]; then
  say "NEON, on this CPU"
  exec "$python" -m pytest -m "not slow"
fi

need gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static debootstrap
here=$build/neon
sysroot=$here/root
version=3.11
mkdir -p "$here"

if [ ! -e "$sysroot/complete" ]; then
  say "fetching Debian's aarch64 CPython"
  rm -rf "$sysroot"
  as_root debootstrap --arch=arm64 --foreign --variant=minbase \
    --include="python$version,libpython$version-dev,libgomp1,libstdc++6" bookworm "$sysroot" >"$here/debootstrap.txt"
  for package in "$sysroot"/var/cache/apt/archives/*.deb; do as_root dpkg-deb -x "$package" "$sysroot"; done
  as_root chown -R "$(id -u)" "$sysroot"
  touch "$sysroot/complete"
fi

if [ ! -d "$here/packages" ]; then
  say "fetching aarch64 wheels"
  "$python" -m pip -q install --target "$here/packages.part" --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    --platform manylinux_2_17_aarch64 numpy py-cpuinfo pytest hypothesis ml_dtypes
  mv "$here/packages.part" "$here/packages"
fi

say "cross-compiling"
cc=aarch64-linux-gnu-gcc
CC="$cc -isystem $sysroot/usr/include" LDSHARED="$cc -shared" AR=aarch64-linux-gnu-ar \
  CFLAGS="-I$sysroot/usr/include/python$version -I$sysroot/usr/include" \
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=".cpython-${version/./}-aarch64-linux-gnu.so" \
  build_package neon

say "NEON under qemu: replay"
replay "$here/replay" $cc neon qemu-aarch64-static

say "NEON under qemu: tests"
emulated_python "$here/python" "$sysroot/usr/bin/python$version" qemu-aarch64-static -L "$sysroot"
PYTHONPATH=$here/site:$here/packages "$here/python" -m pytest -m "not slow and not native" -p no:cacheprovider "$@"
