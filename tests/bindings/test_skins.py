"""What can be said of the C# and Lua skins without a sidecar: they compile, and they see the header as it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
HEADER = REPO / "bindings" / "c" / "include" / "frameshard.h"
UNITY = REPO / "bindings" / "unity"


def declarations(text: str) -> list[str]:
    """C declarations without what differs by taste: space, and commas at the end of a list."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" ?([{}(),;*=]) ?", r"\1", text).replace(",}", "}")
    return [part for part in text.split(";") if part]


def test_lua_declares_what_the_header_does() -> None:
    plain = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    plain = re.sub(r'#ifdef __cplusplus\n(extern "C" \{|\})\n#endif', "", plain)
    plain = re.sub(r"^#.*$", "", plain, flags=re.MULTILINE).replace("FS_API ", "")
    lua = (REPO / "bindings" / "lua" / "frameshard.lua").read_text()
    (cdef,) = re.findall(r"ffi\.cdef\(\[\[(.*?)\]\]\)", lua, flags=re.DOTALL)
    assert declarations(cdef) == declarations(plain)


@pytest.mark.skipif(shutil.which("mcs") is None, reason="no C# compiler: apt-get install mono-mcs")
@pytest.mark.parametrize("folders", [["Runtime/Core"], ["Runtime/Core", "Runtime", "Editor"]], ids=["core", "unity"])
def test_csharp_compiles(folders: list[str], tmp_path: Path) -> None:
    """The core alone, and with the components against stubs of the engine."""
    sources = [path for folder in folders for path in sorted((UNITY / folder).glob("*.cs"))]
    if len(folders) > 1:
        sources += sorted((REPO / "tests" / "unity_stubs").glob("*.cs"))
    # 0649: fields that only the engine's inspector fills
    command = ["mcs", "-langversion:7", "-warnaserror", "-nowarn:0649", "-target:library", f"-out:{tmp_path}/out.dll"]
    result = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
