#!/bin/sh
# Cross-compiles the C client for Windows on Debian and runs its tests under Wine: build.sh [DIRECTORY]
# Needs: apt-get install g++-mingw-w64-x86-64-posix wine wine64 cmake ninja-build pkg-config autoconf automake libtool \
#        libmsgpack-dev nlohmann-json3-dev dpkg-dev
# libzmq and libsodium come from ../dependencies.sh.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
mkdir -p "${1:-build/windows}"
work=$(readlink -f -- "${1:-build/windows}")
prefix=$work/prefix
export PKG_CONFIG_LIBDIR="$prefix/lib/pkgconfig" WINEPREFIX="$work/wine" WINEDEBUG=-all

command -v wine >/dev/null || { echo "Missing on this system: wine (the head of $0 says what to install)" >&2; exit 1; }
# Wine's server ends with the last program, and a program that starts at that moment fails. So it stays for a minute.
mkdir -p "$WINEPREFIX"
wineserver -p60 < /dev/null > /dev/null 2>&1 || true # it runs already
"$here/../dependencies.sh" windows "$work"
cmake -S "$here/.." -B "$work/client" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$here/mingw-w64.cmake" -DFRAMESHARD_TESTS=ON \
  -DFRAMESHARD_EXAMPLES=ON -DMSGPACK_INCLUDE="$prefix/headers" -DNLOHMANN_JSON_INCLUDE="$prefix/headers" > "$work/client.log"
ninja -C "$work/client" -j2
cd "$work/client"
run=$here/../../../native/windows/wine.sh
"$run" ./codec_vectors.exe "$(winepath -w "$here/../../vectors")"
"$run" ./host.exe
