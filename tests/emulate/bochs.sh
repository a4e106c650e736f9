# under_bochs PROGRAM RECORDING ISA: runs the replay driver on a Linux on an emulated Skylake-X, with real AVX-512
# instructions. Nearly half of the time is the kernel's boot.
under_bochs() {
  local here=$root/tests/emulate/bochs work=$build/bochs
  need bochs bochsbios bochs-term vgabios grub-pc-bin grub-common xorriso mtools cpio
  mkdir -p "$work/initramfs" "$work/disc/boot/grub"
  [ -e "$work/disc/boot/vmlinuz" ] || fetch_kernel "$work"
  gcc -O2 -static -o "$work/initramfs/init" "$here/init.c"
  cp "$1" "$work/initramfs/replay"
  cp "$2" "$work/initramfs/recording"
  (cd "$work/initramfs" && find . | cpio --quiet -o -H newc | gzip -1) >"$work/disc/boot/initramfs"
  sed "s/ISA/$3/" "$here/grub.cfg" >"$work/disc/boot/grub/grub.cfg"
  grub-mkrescue -o "$work/disc.iso" "$work/disc" 2>/dev/null
  rm -f "$work"/*.lock "$work/serial.txt"
  # Debian's Bochs has its debugger built in, which waits for "c"; a guest that switches itself off counts as a panic.
  (cd "$work" && echo c >continue && timeout 1200 bochs -q -f "$here/bochsrc" -rc continue </dev/null >bochs.txt 2>&1) || true
  sed -n '/^replay begins/,$p' "$work/serial.txt"
  grep -q '^replay ended with status 0, signal 0' "$work/serial.txt"
}

# fetch_kernel FOLDER: Debian's kernel for virtual machines, out of its package.
fetch_kernel() {
  local package
  apt update
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:.*cloud-amd64/ { print $2; exit }')
  (cd "$1" && apt-get -qq -o APT::Sandbox::User=root download "$package")
  dpkg-deb --fsys-tarfile "$1/$package"_*.deb | tar -xO --wildcards './boot/vmlinuz-*' >"$1/vmlinuz"
  mv "$1/vmlinuz" "$1/disc/boot/"
  rm "$1/$package"_*.deb
}
