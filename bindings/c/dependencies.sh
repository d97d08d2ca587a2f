#!/bin/sh
# Builds libsodium and libzmq as static libraries for a client that has them inside:
# dependencies.sh linux|windows DIRECTORY. It makes DIRECTORY/prefix, with the licences of what ends in the client.
# For Windows also cJSON, for the conformance runners.
# Needs Debian or Ubuntu, and: apt-get install g++ cmake ninja-build pkg-config autoconf automake libtool dpkg-dev \
#        libmsgpack-dev nlohmann-json3-dev, for Windows also g++-mingw-w64-x86-64-posix
# Compiles Debian's source packages, which it fetches once into DIRECTORY.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
system=$1
mkdir -p "$2"
work=$(readlink -f -- "$2")
prefix=$work/prefix
export PKG_CONFIG_LIBDIR="$prefix/lib/pkgconfig"

compiler=g++
autotools=--with-pic
flags=-DCMAKE_POSITION_INDEPENDENT_CODE=ON
if [ "$system" = windows ]; then
  compiler=x86_64-w64-mingw32-g++-posix
  autotools="--host=x86_64-w64-mingw32 CC=x86_64-w64-mingw32-gcc-posix"
  # Without ipc, which libzmq can build for Windows only with Microsoft's compiler. Clients use tcp there.
  flags="-DCMAKE_TOOLCHAIN_FILE=$here/windows/mingw-w64.cmake -DCMAKE_FIND_ROOT_PATH=$prefix -DZMQ_HAVE_IPC=OFF"
fi

missing=
for program in $compiler cmake ninja pkg-config autoreconf libtoolize dpkg-source; do
  command -v $program >/dev/null || missing="$missing $program"
done
for header in msgpack.hpp nlohmann/json.hpp; do
  [ -f /usr/include/$header ] || missing="$missing $header"
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

# shellcheck disable=SC2086 # flags are words
if [ ! -f "$prefix/lib/libsodium.a" ]; then
  cd "$(source_of libsodium)"
  echo "building libsodium"
  { autoreconf -fi && ./configure $autotools --prefix="$prefix" --disable-shared --disable-ssp --disable-pie --quiet \
      && make -s -j2 install; } > "$work/libsodium-build.log" 2>&1 || { tail "$work/libsodium-build.log" >&2; exit 1; }
fi
# shellcheck disable=SC2086
if [ ! -f "$prefix/lib/libzmq.a" ]; then
  cd "$(source_of zeromq3)"
  echo "building libzmq"
  { cmake -S . -B "$work/zeromq3-build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
      -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_PREFIX_PATH="$prefix" -DBUILD_SHARED=OFF \
      -DBUILD_TESTS=OFF -DWITH_PERF_TOOL=OFF -DWITH_DOCS=OFF -DENABLE_CPACK=OFF -DENABLE_WS=OFF -DWITH_TLS=OFF \
      -DWITH_LIBSODIUM=ON -DENABLE_CURVE=ON -DWITH_LIBSODIUM_STATIC=ON -DENABLE_PRECOMPILED=OFF $flags \
      && ninja -C "$work/zeromq3-build" -j2 install; } > "$work/libzmq-build.log" 2>&1 \
    || { tail "$work/libzmq-build.log" >&2; exit 1; }
fi

# What conformance runs read their commands with. On Linux it is the system's.
if [ "$system" = windows ] && [ ! -f "$prefix/lib/libcjson.a" ]; then
  cd "$(source_of cjson)"
  echo "building cJSON"
  # shellcheck disable=SC2086
  { cmake -S . -B "$work/cjson-build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
      -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF -DENABLE_CJSON_TEST=OFF \
      -DENABLE_CUSTOM_COMPILER_FLAGS=OFF $flags \
      && ninja -C "$work/cjson-build" install; } > "$work/cjson-build.log" 2>&1 \
    || { tail "$work/cjson-build.log" >&2; exit 1; }
fi

# Only these headers of /usr/include may be used. For Windows, the others are wrong.
mkdir -p "$prefix/headers" "$prefix/licences"
for header in msgpack msgpack.hpp nlohmann; do ln -sfn /usr/include/$header "$prefix/headers/$header"; done
cp "$(source_of libsodium)/LICENSE" "$prefix/licences/libsodium.txt"
cp "$(source_of zeromq3)/COPYING.LESSER" "$prefix/licences/libzmq.txt"
cp /usr/share/doc/libmsgpack-dev/copyright "$prefix/licences/msgpack.txt"
cp /usr/share/doc/nlohmann-json3-dev/copyright "$prefix/licences/nlohmann-json.txt"
