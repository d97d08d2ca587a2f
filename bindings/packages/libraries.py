"""The native libraries of the packages: one file for each system, with all that the client needs inside.

In the folder of a system, such as ``linux-x86_64``, is what ``LIBRARIES`` names; what could not be built is missing.
``licences`` beside it has the licences of what is inside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

BINDINGS = Path(__file__).parents[1]
LIBRARIES = {
    "linux-x86_64": ("libframeshard.so", "godot/libframeshard_godot.so"),
    "windows-x86_64": ("frameshard.dll", "libframeshard.dll.a", "godot/frameshard_godot.dll"),
}
PROGRAMS = {
    "linux-x86_64": ("g++", "cmake", "ninja", "pkg-config", "autoreconf", "libtoolize", "dpkg-source", "apt-get"),
    "windows-x86_64": (
        "x86_64-w64-mingw32-g++-posix", "cmake", "ninja", "pkg-config", "autoreconf", "libtoolize", "dpkg-source",
        "apt-get",
    ),
}  # fmt: skip
HEADERS = ("/usr/include/msgpack.hpp", "/usr/include/nlohmann/json.hpp")
DEBIAN = {
    "x86_64-w64-mingw32-g++-posix": "g++-mingw-w64-x86-64-posix",
    "autoreconf": "autoconf automake",
    "libtoolize": "libtool",
    "dpkg-source": "dpkg-dev",
    "ninja": "ninja-build",
    "/usr/include/msgpack.hpp": "libmsgpack-dev",
    "/usr/include/nlohmann/json.hpp": "nlohmann-json3-dev",
}


def build(folder: Path, work: Path) -> list[str]:
    """Builds into `folder`, with files on the way in `work`. Returns a sentence for each thing that cannot be built."""
    shutil.rmtree(folder, ignore_errors=True)
    skipped, buildable = [], []
    for system in LIBRARIES:
        missing = [name for name in PROGRAMS[system] if shutil.which(name) is None]
        missing += [header for header in HEADERS if not Path(header).is_file()]
        if missing:
            packages = " ".join(dict.fromkeys(DEBIAN.get(name, name) for name in missing))
            skipped.append(f"no library for {system}: apt-get install {packages}")
        else:
            buildable.append(system)
    godot: Path | None = work / "godot"
    if buildable and subprocess.run([BINDINGS / "godot" / "engine.sh", godot], check=False).returncode:
        skipped.append("no Godot addon: it is compiled with a header that Godot 4 writes")
        godot = None
    for system in buildable:
        _build(system, folder, work / system.split("-")[0], godot)
    return skipped


def _build(system: str, folder: Path, work: Path, godot: Path | None) -> None:
    """`godot` is the folder of Godot's header; without it the addon's library is not built."""
    kind = system.split("-")[0]
    print(f"building for {system} (logs in {work})", flush=True)
    script = BINDINGS / "c" / "dependencies.sh"
    if subprocess.run([script, kind, work], check=False).returncode:
        raise SystemExit(f"failed: {script} {kind} {work}")
    prefix = work / "prefix"
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "FRAMESHARD_ONE_FILE": "ON",
        "MSGPACK_INCLUDE": prefix / "headers",
        "NLOHMANN_JSON_INCLUDE": prefix / "headers",
        "FRAMESHARD_GODOT": godot or "",
    }
    if kind == "windows":
        options["CMAKE_TOOLCHAIN_FILE"] = BINDINGS / "c" / "windows" / "mingw-w64.cmake"
    made = work / "package"
    command = ["cmake", "-S", BINDINGS / "c", "-B", made, "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items())]
    environment = os.environ | {"PKG_CONFIG_LIBDIR": str(prefix / "lib" / "pkgconfig")}
    _logged(work / "package-cmake.log", command, environment)
    command = ["ninja", "-C", made, "-j2", "frameshard", *(["frameshard_godot"] if godot else [])]
    _logged(work / "package-build.log", command, environment)
    strip = "x86_64-w64-mingw32-strip" if kind == "windows" else "strip"
    for name in LIBRARIES[system]:
        if name.startswith("godot/") and godot is None:
            continue
        target = folder / system / Path(name).name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made / name, target)
        if target.suffix in (".so", ".dll"):
            subprocess.run([strip, "--strip-unneeded", target], check=True)
    shutil.copytree(prefix / "licences", folder / "licences", dirs_exist_ok=True)


def _logged(log: Path, command: list[str | Path], environment: dict[str, str]) -> None:
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise SystemExit("\n".join([*log.read_text().splitlines()[-30:], f"failed: see {log}"]))
