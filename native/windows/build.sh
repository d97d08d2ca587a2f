#!/bin/sh
# Cross-compiles llama.cpp and the shard device for Windows on Debian and runs the native tests under Wine:
# build.sh [DIRECTORY]. In DIRECTORY/llama/bin are then llama.cpp's libraries with the compiler's, and in DIRECTORY/device
# is frameshard_device.dll.
# Needs: apt-get install g++-mingw-w64-x86-64-posix wine wine64 cmake ninja-build, and a Python with pip in PATH.
# The first run takes about 5 minutes on 2 cores.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
mkdir -p "${1:-build/windows}"
work=$(readlink -f -- "${1:-build/windows}")
toolchain=$here/../../bindings/c/windows/mingw-w64.cmake
tools=$here/../tools
export WINEPREFIX="$work/wine" WINEDEBUG=-all

missing=
for program in x86_64-w64-mingw32-g++-posix wine cmake ninja python3; do
  command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
  echo "Missing on this system:$missing (the head of $0 says what to install)" >&2
  exit 1
fi
logged() { # LOG COMMAND...: prints the end of the log if the command fails
  log=$work/$1
  shift
  "$@" > "$log" 2>&1 || { tail -n 40 "$log" >&2; echo "failed: $* (log: $log)" >&2; exit 1; }
}

source=$work/llama-cpp-python
[ -d "$source" ] || python3 "$tools/headers.py" --source "$source"
# _WIN32_WINNT: ggml uses functions of Windows 7 that Debian's MinGW hides without it.
flags=$(cd "$tools" && python3 -c 'import llama_wheel; print(*llama_wheel.LEAN, *llama_wheel.HASWELL)')
# shellcheck disable=SC2086 # flags are words
logged llama-cmake.log cmake -S "$source/vendor/llama.cpp" -B "$work/llama-build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS=-D_WIN32_WINNT=0x0601 -DCMAKE_INSTALL_PREFIX="$work/llama" \
  -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_MTMD=ON -DLLAMA_OPENSSL=OFF $flags
echo "building llama.cpp (log: $work/llama-build.log)"
logged llama-build.log ninja -C "$work/llama-build" -j2 install
for library in libstdc++-6.dll libgcc_s_seh-1.dll libgomp-1.dll libwinpthread-1.dll; do
  cp "$(x86_64-w64-mingw32-g++-posix -print-file-name=$library)" "$work/llama/bin/"
done
mkdir -p "$work/llama/licences"
cp /usr/share/doc/gcc-mingw-w64-base/copyright "$work/llama/licences/gcc-mingw-w64.txt"
cp /usr/share/doc/mingw-w64-common/copyright "$work/llama/licences/mingw-w64.txt"

# Wine's server ends with the last program, and a program that starts at that moment fails. So it stays for a minute.
mkdir -p "$WINEPREFIX"
wineserver -p60 < /dev/null > /dev/null 2>&1 || true # it runs already
# A first start of Wine prints lines, which CMake would take for output of a program.
wine cmd /c exit >/dev/null 2>&1 || true
WINEPATH=$(winepath -w "$work/llama/bin")
export WINEPATH
logged device-cmake.log cmake -S "$here/.." -B "$work/device" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" \
  -DCMAKE_CROSSCOMPILING_EMULATOR="$here/wine.sh" -DCMAKE_FIND_ROOT_PATH="$work/llama" -DFRAMESHARD_TESTS=ON \
  -DLLAMA_CPP_INCLUDE="$work/llama/include" -DLLAMA_CPP_LIB="$work/llama/lib" \
  -DGGML_INTERNAL_INCLUDE="$(cd "$tools" && python3 -c 'import headers; print(headers.internal())')"
ninja -C "$work/device" -j2
x86_64-w64-mingw32-strip --strip-debug "$work/device/frameshard_device.dll" # 0.6 of 22 MiB stay
OMP_WAIT_POLICY=passive ctest --test-dir "$work/device" -j2 --timeout 600 --output-on-failure
