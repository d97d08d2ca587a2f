"""The packages of engines, as `make packages` lays them out: complete, loadable, and the same bytes each time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from engine_packages import PACKAGES, files, make

from frameshard.testing import fake_engine

REPO = Path(__file__).parents[2]
LOVE = """
local frameshard = require("frameshard")
local engine = io.read("*a")
local sidecar = frameshard.launch({ model = "any", python = arg[1], extra_json = engine })
local job = sidecar:ask("one two three")
while not job.ended do
  sidecar:wait(0.1)
  sidecar:poll()
end
print(job.text)
sidecar:close()
"""


def test_the_same_sources_give_the_same_bytes(native: Path, packages: Path, tmp_path: Path) -> None:
    said = make(native, tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in packages.iterdir()}
    contents = made.pop("CONTENTS.txt").decode()
    assert len(made) == 4
    for name in made:
        assert re.search(rf"^{re.escape(name)}  \d+ bytes  sha256 [0-9a-f]{{64}}$", said, flags=re.MULTILINE)
        assert name in contents


def test_without_a_library_nothing_is_made(tmp_path: Path) -> None:
    command = [sys.executable, str(PACKAGES), "--native", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "Nothing could be built.\n"
    assert not (tmp_path / "out").exists()


def test_what_a_missing_tool_prevents_is_said(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}  # without a compiler
    code = "import libraries, pathlib; print(*libraries.build(pathlib.Path('n'), pathlib.Path('w')), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env | {"PYTHONPATH": str(PACKAGES)}, check=True,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    linux, windows = done.stdout.splitlines()
    assert linux.startswith("no library for linux-x86_64: apt-get install g++ cmake")
    assert windows.startswith("no library for windows-x86_64: apt-get install g++-mingw-w64-x86-64-posix cmake")


def test_unity_gets_a_tarball(packages: Path) -> None:
    found = files(packages, "com.frameshard.unity-*.tgz")
    assert all(name.startswith("package/") for name in found), "npm's layout, which UPM expects"
    about = json.loads(found["package/package.json"])
    assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", about["name"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", about["version"])
    assert re.fullmatch(r"\d{4}\.\d", about["unity"])
    assert [path.name for path in packages.glob("*.tgz")] == [f"{about['name']}-{about['version']}.tgz"]
    for sample in about["samples"]:
        assert any(name.startswith(f"package/{sample['path']}/") for name in found)
    for library in ("libframeshard.so", "frameshard.dll"):
        assert f"package/Runtime/Plugins/x86_64/{library}" in found
    assert b"stands for licences/libzmq.txt" in found["package/Third Party Notices.md"]


def test_every_asset_of_unity_has_its_own_guid(packages: Path) -> None:
    found = files(packages, "com.frameshard.unity-*.tgz")
    assets = {name for name in found if not name.endswith(".meta")}
    folders = {str(parent) for name in assets for parent in Path(name).parents if str(parent) not in (".", "package")}
    folders = {name for name in folders if "~" not in name}  # Unity copies what is in those
    guids = {}
    for name in assets | folders:
        meta = found[f"{name}.meta"].decode()
        (guids[name],) = re.findall(r"^guid: ([0-9a-f]{32})$", meta, flags=re.MULTILINE)
        assert ("folderAsset: yes" in meta) == (name in folders), name
    assert len(set(guids.values())) == len(guids)
    # Scenes of games refer to these, so they may never change.
    assert guids["package/Runtime/FrameshardSidecar.cs"] == "1e6cf60ac4c5d3c9617d6af5ff5f7d91"
    assert guids["package/Runtime/FrameshardNpc.cs"] == "2ee1ce9c8b3f25fca08e6b0c19669740"
    assert guids["package/Runtime/Prefabs/Innkeeper.prefab"] == "35448527e3c208bc641bdc937ee1aee9"
    assert guids["package/Runtime/Plugins/x86_64/libframeshard.so"] == "60c31eeae28da70c503fce5453c8dfc7"
    assert guids["package/Runtime/Plugins/x86_64/frameshard.dll"] == "27ada1c7ae609d009017ea3b07615558"


def test_each_native_library_is_for_its_own_system(packages: Path) -> None:
    found = files(packages, "com.frameshard.unity-*.tgz")
    systems = {"libframeshard.so": ("Linux", "Linux64"), "frameshard.dll": ("Windows", "Win64")}
    for library, (editor, player) in systems.items():
        meta = found[f"package/Runtime/Plugins/x86_64/{library}.meta"].decode()
        assert re.search(rf"Editor: Editor\n.*\n      enabled: 1\n.*\n.*\n.*\n        OS: {editor}\n", meta)
        assert re.findall(r"Standalone: (\w+)\n    second:\n      enabled: 1", meta) == [player]
        assert re.findall(r"Exclude (\w+): 0", meta) == ["Editor", player]


def test_unreal_gets_a_plugin_whose_libraries_are_there(packages: Path) -> None:
    found = files(packages, "frameshard-unreal-*.zip")
    about = json.loads(found["Frameshard/Frameshard.uplugin"])
    assert about["FileVersion"] == 3
    for module in about["Modules"]:
        assert f"Frameshard/Source/{module['Name']}/{module['Name']}.Build.cs" in found
    rules = found["Frameshard/Source/Frameshard/Frameshard.Build.cs"].decode()
    (root,) = re.findall(r"Client = Path\.Combine\(PluginDirectory, (.*)\);", rules)
    client = "/".join(re.findall(r'"(\w+)"', root))
    paths = re.findall(r'Path\.Combine\(Client, "(\w+)", "([\w.]+)"\)', rules)
    assert len(paths) == 4
    for folder, name in paths:
        assert f"Frameshard/{client}/{folder}/{name}" in found
    for header in ("frameshard.h", "frameshard_game.hpp"):
        assert f"Frameshard/{client}/include/{header}" in found


def test_godot_gets_an_addon_whose_libraries_are_there(packages: Path) -> None:
    found = files(packages, "frameshard-godot-*.zip")
    assert all(name.startswith("addons/frameshard/") for name in found)
    about = found["addons/frameshard/frameshard.gdextension"].decode()
    libraries = re.findall(r'^[\w.]+ = "res://(.+)"$', about.partition("[libraries]")[2], flags=re.MULTILINE)
    assert len(libraries) == 2
    assert set(libraries) <= set(found)
    entry = re.findall(r'^entry_symbol = "(\w+)"$', about, flags=re.MULTILINE)
    exported = (REPO / "bindings" / "godot" / "frameshard_godot.map").read_text()
    assert re.findall(r"global: (\w+);", exported) == entry


def test_the_love_module_talks(packages: Path, program_env: dict[str, str], tmp_path: Path) -> None:
    """In LuaJIT, in any folder, with nothing but what the package has."""
    for name, content in files(packages, "frameshard-love-*.zip").items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "main.lua").write_text(LOVE)
    env = {name: value for name, value in program_env.items() if name not in ("FRAMESHARD_LIBRARY", "LD_LIBRARY_PATH")}
    done = subprocess.run(
        ["luajit", tmp_path / "main.lua", sys.executable], env=env | {"LUA_PATH": f"{tmp_path}/?.lua"}, cwd="/",
        input=json.dumps({"engine": fake_engine()}), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one two three\n"
