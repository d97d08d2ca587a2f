#!/bin/sh
# Cross-compiles the C client for Windows on Debian and runs its tests under Wine: build.sh [DIRECTORY]
# Needs: apt-get install g++-mingw-w64-x86-64-posix wine64 cmake ninja-build pkg-config autoconf automake libtool \
#        libmsgpack-dev nlohmann-json3-dev dpkg-dev
# Compiles libzmq and libsodium from Debian's source packages, which it fetches once into DIRECTORY.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
mkdir -p "${1:-build/windows}"
work=$(readlink -f -- "${1:-build/windows}")
prefix=$work/prefix
toolchain=$here/mingw-w64.cmake
export PKG_CONFIG_LIBDIR="$prefix/lib/pkgconfig" WINEPREFIX="$work/wine" WINEDEBUG=-all

missing=
for program in x86_64-w64-mingw32-g++-posix wine cmake ninja pkg-config autoreconf libtoolize dpkg-source; do
  command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
  echo "Missing on this system:$missing (the head of $0 says what to install)" >&2
  exit 1
fi

source_of() { # PACKAGE: fetches and unpacks a Debian source package; prints its path
  if ! ls -d "$work/$1"/*/ >/dev/null 2>&1; then
    mkdir -p "$work/$1" "$work/apt/lists" "$work/apt/cache"
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    echo "deb-src http://deb.debian.org/debian $codename main" > "$work/apt/sources.list"
    set -- "$1" -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- \
      -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root
    (package=$1; shift; cd "$work/$package" && apt-get "$@" update && apt-get "$@" source "$package") \
      > "$work/$1.log" 2>&1 || { tail "$work/$1.log" >&2; exit 1; }
  fi
  ls -d "$work/$1"/*/ | head -n 1
}

if [ ! -f "$prefix/lib/libsodium.a" ]; then
  cd "$(source_of libsodium)"
  echo "building libsodium"
  { autoreconf -fi && ./configure --host=x86_64-w64-mingw32 CC=x86_64-w64-mingw32-gcc-posix --prefix="$prefix" \
      --disable-shared --disable-ssp --disable-pie --quiet && make -s -j2 install; } > "$work/libsodium-build.log" 2>&1 \
    || { tail "$work/libsodium-build.log" >&2; exit 1; }
fi
if [ ! -f "$prefix/lib/libzmq.a" ]; then
  cd "$(source_of zeromq3)"
  echo "building libzmq"
  # Without ipc, which libzmq can build for Windows only with Microsoft's compiler. Clients use tcp there.
  { cmake -S . -B "$work/zeromq3-build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_POLICY_VERSION_MINIMUM=3.5 -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_PREFIX_PATH="$prefix" \
      -DCMAKE_FIND_ROOT_PATH="$prefix" -DBUILD_SHARED=OFF -DBUILD_TESTS=OFF -DWITH_PERF_TOOL=OFF -DWITH_DOCS=OFF \
      -DENABLE_CPACK=OFF -DENABLE_WS=OFF -DWITH_TLS=OFF -DWITH_LIBSODIUM_STATIC=ON -DENABLE_PRECOMPILED=OFF \
      -DZMQ_HAVE_IPC=OFF && ninja -C "$work/zeromq3-build" -j2 install; } > "$work/libzmq-build.log" 2>&1 \
    || { tail "$work/libzmq-build.log" >&2; exit 1; }
fi

# Only these headers of /usr/include may be used. The others belong to Linux.
mkdir -p "$prefix/headers"
for header in msgpack msgpack.hpp nlohmann; do ln -sfn /usr/include/$header "$prefix/headers/$header"; done
cmake -S "$here/.." -B "$work/client" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" -DFRAMESHARD_TESTS=ON \
  -DFRAMESHARD_EXAMPLES=ON -DMSGPACK_INCLUDE="$prefix/headers" -DNLOHMANN_JSON_INCLUDE="$prefix/headers" > "$work/client.log"
ninja -C "$work/client" -j2
cd "$work/client"
wine ./codec_vectors.exe "$(winepath -w "$here/../../vectors")"
wine ./host.exe
