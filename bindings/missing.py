"""Fails with the Debian packages that `make bindings` needs and this system lacks."""

from __future__ import annotations

import glob
import shutil
import sys

PROGRAMS = {
    "g++": "g++",
    "pkg-config": "pkg-config",
    "mcs": "mono-mcs",
    "mono": "mono-runtime",
    "nunit-console": "nunit-console",
    "luajit": "luajit",
    "love": "love",
    "Xvfb": "xvfb",
    "xvfb-run": "xvfb",
    "qemu-x86_64": "qemu-user",
}
FILES = {
    "/usr/include/zmq.h": "libzmq3-dev",
    "/usr/include/msgpack.hpp": "libmsgpack-dev",
    "/usr/include/nlohmann/json.hpp": "nlohmann-json3-dev",
    "/usr/include/cjson/cJSON.h": "libcjson-dev",
    "/usr/lib/mono/*/System.Json.dll": "libmono-system-json4.0-cil",
    "/usr/lib/pkgconfig/nunit.pc": "libnunit-cil-dev",
    "/usr/lib/*/lua/5.1/cjson.so": "lua-cjson",
}


def elsewhere(pattern: str) -> bool:
    """Under /usr/local, for those who build their own."""
    return bool(glob.glob(pattern.replace("/usr/", "/usr/local/", 1)))


missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
missing |= {package for pattern, package in FILES.items() if not glob.glob(pattern) and not elsewhere(pattern)}
if missing:
    packages = " ".join(sorted(missing))
    sys.exit(f"The bindings need more than this system has. On Debian or Ubuntu: apt-get install {packages}")
