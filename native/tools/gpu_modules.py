"""Builds the GPU modules that CMAKE_ARGS asks for, and prints the directories that they are in, as a CMake list.

A GPU module is one of ggml's GPU backends as a library of its own, compiled from the sdist of the pinned
llama-cpp-python by native/modules. The wheel of llama-cpp-python stays without GPU backends, so one installation can
have several modules. "-DGGML_CUDA=on" and "-DGGML_VULKAN=on" ask for them.

Compiling takes minutes, so modules are kept in ${XDG_CACHE_HOME:-~/.cache}/frameshard/gpu, under a key of what changes
what comes out: version, CMake arguments and machine.
"""

import hashlib
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import tempfile

import headers
import locks
import progress
import vulkan

PROJECT = pathlib.Path(__file__).resolve().parents[1] / "modules"
ABOUT = {"cuda": re.compile(r"-D\w*(CUDA|NCCL)", re.IGNORECASE), "vulkan": re.compile(r"-D\w*(VULKAN|SPIRV)", re.I)}
"""The modules. Each has what CMake arguments begin with that are about this module alone."""


def given() -> list[str]:
    """The arguments in CMAKE_ARGS, split as a shell does."""
    try:
        return shlex.split(os.environ.get("CMAKE_ARGS", ""))
    except ValueError as error:
        sys.exit(f"CMAKE_ARGS cannot be split into arguments: {error}")


def joined(args: list[str]) -> str:
    """The arguments for a key. Only those with spaces are quoted, so that the keys of the others stay."""
    return " ".join(shlex.quote(arg) if " " in arg else arg for arg in args)


def wanted(args: list[str]) -> list[str]:
    """The modules that CMake arguments ask for."""
    return [module for module in ABOUT if is_on(f"GGML_{module.upper()}", args)]


def is_on(option: str, args: list[str]) -> bool:
    """Whether CMake arguments set an option. Of two with one name CMake takes the later."""
    values = [arg.partition("=")[2] for arg in args if re.match(rf"-D{option}(:BOOL)?=", arg)]
    return bool(values) and values[-1].lower() in ("on", "1", "true", "yes")


def for_wheel(args: list[str]) -> list[str]:
    """Those of CMake's arguments that are not about a module: llama-cpp-python is built with these."""
    return [arg for arg in args if not any(about.match(arg) for about in ABOUT.values())]


def for_module(module: str, args: list[str]) -> list[str]:
    """The arguments that a module is built with: all but those about others."""
    # Left to itself, ggml compiles kernels for every GPU since Maxwell: an hour.
    defaults = ["-DCMAKE_CUDA_ARCHITECTURES=native"] if module == "cuda" else []
    others = [about for name, about in ABOUT.items() if name != module]
    return defaults + [arg for arg in args if not any(about.match(arg) for about in others)]


def key(module: str, args: list[str]) -> str:
    parts = [headers.SDIST_SHA256, joined(args), sys.platform, platform.machine()]
    parts += [path.read_text() for path in sorted(PROJECT.iterdir())]
    if module == "cuda":
        parts.append(gpus())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def gpus() -> str:
    """What kernels for the GPUs of this machine depend on; "" where there are none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    except OSError:
        return ""


def build(module: str, args: list[str], final: pathlib.Path) -> None:
    """Makes the directory `final` with a module. It appears complete."""
    # Where headers come from is not a part of the key: ggml takes from them what it finds.
    args = args + (vulkan.cmake_args(args) if module == "vulkan" else [])
    label = f"compiling ggml-{module} of llama-cpp-python {headers.VERSION}, once per machine"
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".build-") as scratch:
        work = pathlib.Path(scratch)
        headers.from_sdist(work / "source", "", lambda path: True)  # with .git, from which ggml takes its commit
        configure = [
            "cmake",
            "-S",
            str(PROJECT),
            "-B",
            str(work / "build"),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        configure += [f"-DGGML_SOURCE={work / 'source' / 'vendor/llama.cpp/ggml'}", f"-DGPU_MODULE={module}", *args]
        run("configuring ggml-" + module, final.with_name(final.name + "-configure.log"), configure)
        run(label, final.with_name(final.name + ".log"), ["cmake", "--build", str(work / "build")])
        install = ["cmake", "--install", str(work / "build"), "--strip", "--component", "gpu_module"]
        subprocess.run([*install, "--prefix", str(work / "made")], stdout=sys.stderr, check=True)
        (work / "made").rename(final)


def run(label: str, log: pathlib.Path, command: list[str]) -> None:
    # The build tools of this environment, whether or not it is activated.
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if status := progress.run(label, log, command, {**os.environ, "PATH": path}):
        sys.exit(status)


def main() -> None:
    args = given()
    made = []
    for module in wanted(args):
        own = for_module(module, args)
        directory = headers.cache_dir() / "gpu"
        final = directory / f"{module}-{headers.VERSION}-{key(module, own)}"
        with locks.locked(directory):
            if not final.is_dir():
                build(module, own, final)
        made.append(final.as_posix())
    print(";".join(made))


if __name__ == "__main__":
    main()
