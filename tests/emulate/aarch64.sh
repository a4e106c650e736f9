# An aarch64 beside this machine: Debian's CPython there under qemu-user, wheels for it, and a compiler to it. Debian's
# packages are only unpacked: no chroot, no second stage, no binfmt.
aarch64=$build/neon
sysroot=$aarch64/root
version=3.11
cross=aarch64-linux-gnu-gcc

fetch_aarch64() {
  need gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static debootstrap
  mkdir -p "$aarch64"
  if [ ! -e "$sysroot/complete" ]; then
    say "fetching Debian's aarch64 CPython"
    rm -rf "$sysroot"
    as_root debootstrap --arch=arm64 --foreign --variant=minbase \
      --include="python$version,libpython$version-dev,libgomp1,libstdc++6" bookworm "$sysroot" >"$aarch64/debootstrap.txt"
    for package in "$sysroot"/var/cache/apt/archives/*.deb; do as_root dpkg-deb -x "$package" "$sysroot"; done
    as_root chown -R "$(id -u)" "$sysroot"
    touch "$sysroot/complete"
  fi
  if [ ! -d "$aarch64/packages" ]; then
    say "fetching aarch64 wheels"
    aarch64_pip --target "$aarch64/packages.part" numpy py-cpuinfo pytest hypothesis ml_dtypes
    mv "$aarch64/packages.part" "$aarch64/packages"
  fi
  emulated_python "$aarch64/python" "$sysroot/usr/bin/python$version" qemu-aarch64-static -L "$sysroot"
}

# aarch64_pip ARGUMENTS: pip install, of wheels that such a machine takes.
aarch64_pip() {
  "$python" -m pip -q install --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    --platform manylinux_2_17_aarch64 "$@"
}

# for_aarch64 COMMAND...: with the environment in which setup.py compiles for it; LDSHARED may name another linker.
for_aarch64() {
  CC="$cross -isystem $sysroot/usr/include" LDSHARED="${LDSHARED:-$cross -shared}" AR=aarch64-linux-gnu-ar \
    CFLAGS="-I$sysroot/usr/include/python$version -I$sysroot/usr/include" \
    _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=".cpython-${version/./}-aarch64-linux-gnu.so" "$@"
}
