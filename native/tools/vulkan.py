"""What a build of ggml-vulkan needs on this system, checked before it is compiled for minutes.

The pinned ggml-vulkan needs C++ headers of Vulkan 1.3.272 or newer (``vk::LayerSettingEXT``). Debian 12 has 1.3.239.
There the headers come from Debian 13's libvulkan-dev: apt fetches it from the system's own mirror, checks its
signature, and it is unpacked in the user's cache. Nothing is installed. The loader, glslc and the SPIR-V headers are
those of the system, or of the SDK that VULKAN_SDK names.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import headers

OLDEST = (1, 3, 272)
PACKAGES = "apt-get install libvulkan-dev glslc spirv-headers"
OLDEST_MESA = (25, 0)  # the oldest that is known to work
MESA_PACKAGE = "apt-get install mesa-vulkan-drivers"
NEWER_RELEASE = "trixie"  # Debian 13
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def cmake_args(given: list[str]) -> list[str]:
    """Further arguments that a build with ggml-vulkan needs here. Ends the program with a message if it cannot work."""
    if missing := missing_tools(given):
        sys.exit(
            f"A build with Vulkan needs {', '.join(missing)}, found neither in this system nor in VULKAN_SDK. "
            f"On Debian or Ubuntu: {PACKAGES}. Elsewhere: the Vulkan SDK, with VULKAN_SDK set."
        )
    if is_given("Vulkan_INCLUDE_DIR", given):
        return []
    version = header_version([each / "include" for each in prefixes()])
    if version >= OLDEST:
        return []
    found, needed = (".".join(map(str, each)) for each in (version, OLDEST))
    print(f"Vulkan headers {found} are older than {needed}, which ggml-vulkan needs", file=sys.stderr, flush=True)
    try:
        return [f"-DVulkan_INCLUDE_DIR={newer_headers()}"]
    except (OSError, subprocess.CalledProcessError, LookupError) as error:
        sys.exit(
            f"Newer ones could not be had from Debian 13 ({error}). Set VULKAN_SDK to a Vulkan SDK of {needed} or "
            "newer, or unpack a newer libvulkan-dev (dpkg -x FILE DIR) and add "
            "-DVulkan_INCLUDE_DIR=DIR/usr/include to CMAKE_ARGS."
        )


def prefixes() -> list[pathlib.Path]:
    """Where the SDK or the system keeps its files, the SDK first."""
    return [pathlib.Path(each) for each in (os.environ.get("VULKAN_SDK"), "/usr", "/usr/local") if each]


def missing_tools(given: list[str]) -> list[str]:
    """The names of tools and libraries that are neither found nor given as CMake arguments."""
    path = os.pathsep.join([*(str(each / "bin") for each in prefixes()), os.environ.get("PATH", os.defpath)])
    found = {
        ("glslc", "Vulkan_GLSLC_EXECUTABLE"): shutil.which("glslc", path=path) is not None,
        ("the Vulkan loader (libvulkan)", "Vulkan_LIBRARY"): exists("lib*/libvulkan.*", "lib/*/libvulkan.so"),
        ("SPIR-V headers", "SPIRV-Headers_DIR"): exists(
            "share/cmake/*/SPIRV-HeadersConfig.cmake", "lib*/**/cmake/*/SPIRV-HeadersConfig.cmake"
        ),
    }
    return [name for (name, option), there in found.items() if not there and not is_given(option, given)]


def exists(*patterns: str) -> bool:
    return any(next(each.glob(pattern), None) for each in prefixes() for pattern in patterns)


def is_given(option: str, given: list[str]) -> bool:
    return any(re.match(rf"-D{option}(:[A-Z]+)?=", arg) for arg in given)


def header_version(directories: list[pathlib.Path]) -> tuple[int, int, int]:
    """Of the first Vulkan headers in these directories; zeros if there are none."""
    for directory in directories:
        core = directory / "vulkan" / "vulkan_core.h"
        if core.is_file():
            text = core.read_text(errors="replace")
            complete = re.search(r"define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(0, (\d+), (\d+),", text)
            patch = re.search(r"define VK_HEADER_VERSION (\d+)", text)
            if complete and patch:
                return int(complete[1]), int(complete[2]), int(patch[1])
    return 0, 0, 0


def newer_headers() -> pathlib.Path:
    """Include directory of Debian 13's libvulkan-dev, filled on first use.

    :raises LookupError: this is not a Debian system with package lists (apt-get update).
    """
    final = headers.cache_dir() / "vulkan-headers" / NEWER_RELEASE
    if final.is_dir():
        return final / "usr" / "include"
    targets = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages", "Label: Debian"]
    mirrors = [line.split()[1] for line in output(targets).splitlines() if line.startswith("Debian ")]
    if not mirrors:
        raise LookupError("apt has no package lists of a Debian mirror: apt-get update")
    print(f"taking the Vulkan headers from Debian's {NEWER_RELEASE}", file=sys.stderr, flush=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        work = pathlib.Path(scratch)
        for folder in ("lists/partial", "cache/archives/partial", "root"):
            (work / folder).mkdir(parents=True)
        (work / "sources").write_text(f"deb [signed-by={KEYRING}] {mirrors[0]} {NEWER_RELEASE} main\n")
        apt = ["apt-get", "-q", "-o", f"Dir::Etc::sourcelist={work}/sources", "-o", "Dir::Etc::sourceparts=/dev/null"]
        apt += ["-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache"]
        apt += ["-o", "APT::Sandbox::User=root"]  # its own user may not write into the user's cache
        output([*apt, "update"])
        output([*apt, "download", f"libvulkan-dev/{NEWER_RELEASE}"], work)
        output(["dpkg-deb", "-x", str(next(work.glob("libvulkan-dev_*.deb"))), str(work / "root")])
        if header_version([work / "root" / "usr" / "include"]) < OLDEST:
            raise LookupError(f"{NEWER_RELEASE} has no newer ones")
        try:
            (work / "root").rename(final)
        except OSError:
            if not final.is_dir():  # else another build was faster
                raise
    return final / "usr" / "include"


def output(command: list[str], directory: pathlib.Path | None = None) -> str:
    run = subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    return run.stdout.decode(errors="replace")


def check_software_vulkan() -> None:
    """Ends the program with a message if Mesa's software Vulkan is not installed, or too old."""
    given = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    places = [pathlib.Path(each) / "vulkan/icd.d" for each in ("/usr/share", "/usr/local/share", "/etc")]
    files = [pathlib.Path(each) for each in given.split(os.pathsep)] if given else []
    files = files or [file for place in places for file in sorted(place.glob("lvp_icd*.json"))]
    found = next((file for file in files if "lvp" in file.name and file.is_file()), None)
    if found is None:
        sys.exit(f"Mesa's software Vulkan (lavapipe) is missing. On Debian or Ubuntu: {MESA_PACKAGE}")
    version = mesa_version(pathlib.Path(json.loads(found.read_text())["ICD"]["library_path"]))
    if version is not None and version < OLDEST_MESA:
        here, needed = (".".join(map(str, each)) for each in (version, OLDEST_MESA))
        sys.exit(
            f"Mesa's software Vulkan here ({found}) is {here}. {needed} or newer is needed: of older ones 22.3 was "
            "tried, and it crashes under the shard device, in a thread of its own. On Debian 12, with its backports "
            f"among apt's sources: {MESA_PACKAGE.replace('install', 'install -t bookworm-backports')}. Or name "
            "another one's file: VK_DRIVER_FILES=DIR/lvp_icd.json make vulkan"
        )


def mesa_version(library: pathlib.Path) -> tuple[int, int] | None:
    """Major and minor version of a driver of Mesa, as it would tell a program; None if its file does not show it."""
    if not library.is_absolute():  # the dynamic loader looks for it
        library = next(pathlib.Path("/usr").glob(f"lib*/**/{library.name}"), library)
    try:
        told = re.search(rb"Mesa (\d+)\.(\d+)\.", library.read_bytes())
    except OSError:
        return None
    return (int(told[1]), int(told[2])) if told else None


if __name__ == "__main__":
    check_software_vulkan()
    cmake_args(["-DGGML_VULKAN=on"])
