"""Builds the pinned llama-cpp-python once per machine and prints the path of the wheel.

Compiling llama.cpp takes minutes, so the wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/frameshard/wheels under a key of
everything that changes what comes out: version, CMAKE_ARGS, interpreter, system, and the CPU's features, since ggml is
compiled for the CPU it is built on. CMAKE_ARGS from the environment chooses the GPU, as llama-cpp-python documents:
"-DGGML_CUDA=on", "-DGGML_VULKAN=on" or "-DGGML_METAL=on".
"""

import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import sys
import tempfile

import headers
import progress

# Of llama.cpp only the libraries are used.
LEAN = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TOOLS", "EXAMPLES", "TESTS", "SERVER")]


def cpu_features() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")


def build(directory: pathlib.Path, cmake_args: str) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        requirement = pathlib.Path(scratch) / "sdist.txt"
        requirement.write_text(f"llama-cpp-python=={headers.VERSION} --hash=sha256:{headers.SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir"]
        command += ["--no-binary", "llama-cpp-python", "--no-build-isolation"]
        command += ["--wheel-dir", scratch, "--requirement", str(requirement)]
        # The build tools of this environment, whether or not it is activated.
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, "CMAKE_ARGS": cmake_args, "PATH": path}
        label = f"compiling llama-cpp-python {headers.VERSION}, once per machine"
        if status := progress.run(label, directory / "build.log", command, env):
            sys.exit(status)
        for wheel in pathlib.Path(scratch).glob("*.whl"):
            shutil.move(wheel, directory / wheel.name)


def main() -> None:
    cmake_args = " ".join([*LEAN, *os.environ.get("CMAKE_ARGS", "").split()])
    system = [sys.implementation.cache_tag, sys.platform, platform.machine(), cpu_features()]
    parts = [headers.VERSION, cmake_args, *system]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    directory = headers.cache_dir() / "wheels" / f"{headers.VERSION}-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build in {directory}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(directory.glob("*.whl")):
            build(directory, cmake_args)
        print(next(directory.glob("*.whl")))


if __name__ == "__main__":
    main()
