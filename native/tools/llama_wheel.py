"""Builds the pinned llama-cpp-python once per machine and prints the path of the wheel.

Compiling llama.cpp takes minutes, so the wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/frameshard/wheels under a key of
everything that changes what comes out: version, CMake arguments, interpreter and system. CMAKE_ARGS from the
environment has further arguments; those about CUDA and Vulkan are for gpu_modules.py.

On x86-64 ggml is compiled for Haswell, not for the CPU that builds it: the same files then run on every later CPU, and
a bundle can carry them. It also leaves AMX out, which gcc 12 compiles wrongly: it drops the stores that prepare
_tile_loadconfig, and the process dies in ggml_backend_amx_mul_mat. With -DGGML_NATIVE=ON in CMAKE_ARGS the build is for
this CPU, and its key has the CPU's features too.
"""

import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import sys
import tempfile

import gpu_modules
import headers
import locks
import progress

# Of llama.cpp only the libraries are used.
LEAN = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TOOLS", "EXAMPLES", "TESTS", "SERVER")]

# Named one by one: with SOURCE_DATE_EPOCH in the environment ggml's own defaults leave all of them out.
HASWELL = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{part}=ON" for part in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"))]


def cpu_features() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")


def cmake_args(given: list[str]) -> list[str]:
    """All arguments for CMake, those given last: of two with one name CMake takes the later."""
    args = list(LEAN)
    if platform.machine().lower() in ("x86_64", "amd64"):
        args += HASWELL
    return args + given


def key(args: list[str]) -> str:
    """What the wheel is kept under. The CPU's features are part of it if they may change what is compiled."""
    parts = [headers.VERSION, gpu_modules.joined(args), sys.implementation.cache_tag, sys.platform, platform.machine()]
    portable = "-DGGML_NATIVE=OFF"
    if portable not in args or any("native" in arg.lower() for arg in args if arg != portable):
        parts.append(cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def build(directory: pathlib.Path, args: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        requirement = pathlib.Path(scratch) / "sdist.txt"
        requirement.write_text(f"llama-cpp-python=={headers.VERSION} --hash=sha256:{headers.SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir"]
        command += ["--no-binary", "llama-cpp-python", "--no-build-isolation"]
        command += ["--wheel-dir", scratch, "--requirement", str(requirement)]
        # The build tools of this environment, whether or not it is activated.
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, "CMAKE_ARGS": shlex.join(args), "PATH": path}
        label = f"compiling llama-cpp-python {headers.VERSION}, once per machine"
        if status := progress.run(label, directory / "build.log", command, env):
            sys.exit(status)
        for wheel in pathlib.Path(scratch).glob("*.whl"):
            shutil.move(wheel, directory / wheel.name)


def main() -> None:
    args = cmake_args(gpu_modules.for_wheel(gpu_modules.given()))
    directory = headers.cache_dir() / "wheels" / f"{headers.VERSION}-{key(args)}"
    with locks.locked(directory):
        if not list(directory.glob("*.whl")):
            build(directory, args)
        print(next(directory.glob("*.whl")))


if __name__ == "__main__":
    main()
