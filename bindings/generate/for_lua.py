"""frameshard.lua: frameshard.h after the preprocessor, without its comments.

It reads the header as for_c.py has just made it, so it comes after that.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from files import BINDINGS, with_region
from manifest import Manifest

LUA = BINDINGS / "lua" / "frameshard.lua"


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    return {LUA: with_region(LUA.read_text(), "declarations", f"ffi.cdef([[\n{declarations(made)}\n]])")}


def declarations(made: dict[Path, str]) -> str:
    """The header's declarations: members of structs in a line each, all else in lines of at most 120 characters."""
    header = made[BINDINGS / "c" / "include" / "frameshard.h"]
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace('extern "C" {', "").replace("FS_API ", "")
    lines = []
    for statement in re.findall(r"[^;{}]+(?:\{[^}]*\}[^;{}]*)?;", text):
        plain = " ".join(statement.split())
        if "struct" in plain and "{" in plain:
            head, body, tail = re.split(r" ?[{}] ?", plain)
            lines += [f"{head} {{", *(f"  {member.strip()};" for member in body.split(";") if member.strip())]
            lines.append(f"}} {tail}")
        else:
            kept = re.sub(r" (?==)|(?<==) | (?=[*}])", "\xa0", plain)  # no line ends before or after these
            lines += [line.replace("\xa0", " ") for line in textwrap.wrap(kept, 120, subsequent_indent="  ")]
    return "\n".join(lines)
