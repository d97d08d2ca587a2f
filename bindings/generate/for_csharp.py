"""The C# binding: numbers and structs of frameshard.h."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import for_c
from files import BINDINGS, with_region
from manifest import Manifest

CORE = BINDINGS / "unity" / "Runtime" / "Core"
TYPES, NATIVE = CORE / "Types.cs", CORE / "Native.cs"

# What a C type is in a blittable struct; pointers are IntPtr.
KINDS = {"uint32_t": "uint", "int32_t": "int", "uint64_t": "ulong", "int64_t": "long", "double": "double"}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    codes = [f"        {pascal(error['name'])} = {error['code']}," for error in manifest["errors"]]
    native = NATIVE.read_text()
    for struct in for_c.structs(manifest):
        native = with_region(native, struct.name, "\n".join(_members(struct)))
    return {TYPES: with_region(TYPES.read_text(), "error codes", "\n".join(codes)), NATIVE: native}


def _members(struct: for_c.Struct) -> Iterator[str]:
    for member in for_c.members(struct):
        yield f"            internal {KINDS.get(member.kind, 'IntPtr')} {pascal(member.name)};"


def pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
