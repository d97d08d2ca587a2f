"""What is in the package of each engine, and where the engine expects it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from archive import Files

ROOT = Path(__file__).parents[2]
BINDINGS = ROOT / "bindings"
UNITY_NAME = "com.frameshard.unity"


def version() -> str:
    return re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[0]


def packages(native: Path) -> dict[str, Files]:
    """The files of each package by its file name. `native` has the libraries, as libraries.py makes them."""
    made = {
        f"{UNITY_NAME}-{version()}.tgz": unity(native),
        f"frameshard-unreal-{version()}.zip": unreal(native),
        f"frameshard-love-{version()}.zip": love(native),
    }
    if any(native.glob("*/*frameshard_godot.*")):
        made[f"frameshard-godot-{version()}.zip"] = godot(native)
    return made


def godot(native: Path) -> Files:
    """To be unpacked in a project's folder."""
    files = _tree(BINDINGS / "godot" / "addons", "addons")
    addon = "addons/frameshard"
    files[f"{addon}/README.md"] = (BINDINGS / "godot" / "README.md").read_bytes()
    for path in sorted(native.glob("*/*frameshard_godot.*")):
        files[f"{addon}/bin/{path.name}"] = path.read_bytes()
    return files | {f"{addon}/{name}": content for name, content in _papers(native).items()}


def love(native: Path) -> Files:
    """One module and the library beside it, to be unpacked beside main.lua or the .love file."""
    files = {"frameshard.lua": (BINDINGS / "lua" / "frameshard.lua").read_bytes(), **_papers(native)}
    return files | {path.name: path.read_bytes() for path in _libraries(native)}


def unreal(native: Path) -> Files:
    """To be unpacked in a project's Plugins folder."""
    files = _tree(BINDINGS / "unreal", "Frameshard")
    third_party = "Frameshard/ThirdParty/frameshard"
    for header in ("frameshard.h", "frameshard_game.hpp"):
        files[f"{third_party}/include/{header}"] = (BINDINGS / "c" / "include" / header).read_bytes()
    for path in _libraries(native, imports=True):
        folder = "bin" if path.suffix == ".dll" else "lib"
        files[f"{third_party}/{folder}/{path.name}"] = path.read_bytes()
    return files | {f"Frameshard/{name}": content for name, content in _papers(native).items()}


def unity(native: Path) -> Files:
    """A UPM tarball: all is in a folder `package`, and all assets have GUIDs."""
    files = _tree(BINDINGS / "unity", "package")
    plugins = "package/Runtime/Plugins/x86_64"
    for path in _libraries(native):
        files[f"{plugins}/{path.name}"] = path.read_bytes()
    papers = _papers(native)
    files["package/LICENSE.md"] = papers["LICENSE"]
    files["package/Third Party Notices.md"] = papers["THIRD_PARTY_LICENCES.txt"]
    files |= {
        f"{folder}.meta": _meta(folder, FOLDER) for folder in ("package/Runtime/Plugins", plugins)
    }  # the other folders have theirs in the tree
    for name in [name for name in files if name.startswith(plugins + "/") or name.endswith(".md")]:
        if f"{name}.meta" not in files:
            files[f"{name}.meta"] = _meta(name, _importer(name))
    return files


def _libraries(native: Path, *, imports: bool = False) -> list[Path]:
    kinds = (".so", ".dll", ".a") if imports else (".so", ".dll")
    found = [*native.glob("linux-x86_64/libframeshard.*"), *native.glob("windows-x86_64/*frameshard.*")]
    return sorted(path for path in found if path.suffix in kinds)


def _papers(native: Path) -> Files:
    """The licence, and those of what is inside the libraries."""
    notices = [f"==== {path.stem} ====\n\n{path.read_text()}" for path in sorted((native / "licences").glob("*.txt"))]
    head = (
        "The native libraries contain the following. libzmq is linked statically, as the exception at the end of its\n"
    )
    head += "licence allows.\n\n"
    return {
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "THIRD_PARTY_LICENCES.txt": (head + "\n".join(notices)).encode(),
    }


def _tree(folder: Path, prefix: str) -> Files:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


# ---- Unity's .meta files --------------------------------------------------------------------------------------------

FOLDER = """folderAsset: yes
DefaultImporter:
  externalObjects: {}
"""
TEXT = """TextScriptImporter:
  externalObjects: {}
"""
TAIL = """  userData:
  assetBundleName:
  assetBundleVariant:
"""


def guid(path: str) -> str:
    """A GUID that stays the same from version to version: it comes from the path in the package alone."""
    return hashlib.md5(f"{UNITY_NAME}/{path}".encode(), usedforsecurity=False).hexdigest()


def _meta(name: str, importer: str) -> bytes:
    path = name.removeprefix("package/")
    return f"fileFormatVersion: 2\nguid: {guid(path)}\n{importer}{TAIL}".encode()


def _importer(name: str) -> str:
    if name.endswith(".so"):
        return _plugin("Linux", "Linux64")
    return _plugin("Windows", "Win64") if name.endswith(".dll") else TEXT


def _plugin(system: str, player: str) -> str:
    """A native library for the editor on one system and the players of that system."""
    excluded = "".join(
        f"        Exclude {name}: {0 if name in ('Editor', player) else 1}\n"
        for name in ("Editor", "Linux64", "OSXUniversal", "Win", "Win64")
    )
    return f"""PluginImporter:
  externalObjects: {{}}
  serializedVersion: 2
  iconMap: {{}}
  executionOrder: {{}}
  defineConstraints: []
  isPreloaded: 0
  isOverridable: 0
  isExplicitlyReferenced: 0
  validateReferences: 1
  platformData:
  - first:
      : Any
    second:
      enabled: 0
      settings:
{excluded}  - first:
      Any:
    second:
      enabled: 0
      settings: {{}}
  - first:
      Editor: Editor
    second:
      enabled: 1
      settings:
        CPU: x86_64
        DefaultValueInitialized: true
        OS: {system}
  - first:
      Standalone: {player}
    second:
      enabled: 1
      settings:
        CPU: x86_64
"""


def listing(name: str, files: Files, digest: str, size_bytes: int) -> str:
    """A package with its hash, and its files with theirs."""
    lines = [f"{name}  {size_bytes} bytes  sha256 {digest}"]
    for path, content in sorted(files.items()):
        lines.append(f"  {hashlib.sha256(content).hexdigest()}  {len(content):>9}  {path}")
    return "\n".join(lines) + "\n"
