# Shared by the scripts of this folder, which source it: from the repository's root, everything cached under .build.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
build=$root/.build
python=$root/${VENV:-.venv}/bin/python
mkdir -p "$build"

say() { printf '== %s\n' "$*"; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# apt ARGUMENTS: apt-get, one at a time.
apt() {
  as_root flock "$build/apt.lock" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@"
}

# need PACKAGE...: installs the Debian packages that are missing.
need() {
  local missing
  missing=$(for package; do dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"; done)
  [ -n "$missing" ] || return 0
  if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; }; then
    echo "Please install these Debian packages:" $missing >&2
    exit 1
  fi
  say "installing" $missing
  apt update
  apt install -y --no-install-recommends $missing >/dev/null
}

# build_package NAME: builds the package with the environment's CC, CFLAGS, ... into .build/NAME/site.
build_package() {
  "$python" setup.py -q build -b "$build/$1/work" --build-lib "$build/$1/site"
}

# emulated_python COMMAND PYTHON EMULATOR...: writes a command that runs PYTHON under EMULATOR. It is what that Python
# takes for its own executable, so that the processes it starts are emulated too.
emulated_python() {
  local command=$1 real=$2
  shift 2
  printf '#!/bin/sh\nexec %s -0 "$0" %s "$@"\n' "$*" "$real" >"$command"
  chmod +x "$command"
}

# replay FOLDER CC ISA RUNNER...: what the scalar ISA does here, done again on another ISA by a static program that CC
# has built in FOLDER and RUNNER runs.
replay() {
  local folder=$1 cc=$2 isa=$3
  shift 3
  make -s -j "$(nproc)" -f tests/replay/Makefile BUILD="$folder" CC="$cc"
  "$python" tests/replay/record.py "$folder/recording"
  "$@" "$folder/replay" "$folder/recording" "$isa"
}
