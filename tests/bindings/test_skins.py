"""The C# and Lua bindings without a sidecar: they compile, they match the C header, and Unity's package is complete."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
HEADER = REPO / "bindings" / "c" / "include" / "frameshard.h"
UNITY = REPO / "bindings" / "unity"
TAVERN = "../../samples/unity_tavern/Assets"


NOT_IN_CSHARP = {
    "message",  # C# has fs_chat_message instead
    "vram_needs",  # of the arbiter, which only C and Python have
    "vram_decision",
}


def declarations(text: str) -> list[str]:
    """The C declarations in a text, without differences in spaces and in commas at the end of lists."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" ?([{}(),;*=]) ?", r"\1", text).replace(",}", "}")
    return [part for part in text.split(";") if part]


def header() -> str:
    """The C header after the preprocessor, without comments."""
    plain = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    plain = re.sub(r'#ifdef __cplusplus\n(extern "C" \{|\})\n#endif', "", plain)
    return re.sub(r"^#.*$", "", plain, flags=re.MULTILINE).replace("FS_API ", "")


def pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.lower().split("_"))


def test_lua_declares_what_the_header_does() -> None:
    lua = (REPO / "bindings" / "lua" / "frameshard.lua").read_text()
    (cdef,) = re.findall(r"ffi\.cdef\(\[\[(.*?)\]\]\)", lua, flags=re.DOTALL)
    assert declarations(cdef) == declarations(header())


def test_csharp_lays_structs_out_as_the_header_does() -> None:
    kinds = {"uint32_t": "uint", "int32_t": "int", "uint64_t": "ulong", "int64_t": "long", "double": "double"}
    kinds |= {"fs_status": "int"}
    native = (UNITY / "Runtime" / "Core" / "Native.cs").read_text()
    mirrored = dict(re.findall(r"internal struct (\w+)\n\s+\{(.*?)\}", native, flags=re.DOTALL))
    structs = re.findall(r"typedef struct fs_(\w+) \{(.*?)\}", header(), flags=re.DOTALL)
    structs = [struct for struct in structs if struct[0] not in NOT_IN_CSHARP]
    assert {pascal(name) for name, _ in structs} == set(mirrored)
    for name, body in structs:
        fields = [field.strip() for field in body.split(";") if field.strip()]
        expected = []
        for field in fields:
            kind, _, word = field.rpartition(" ")
            expected.append(("IntPtr" if "*" in field else kinds[kind], pascal(word.lstrip("*"))))
        found = re.findall(r"internal (\w+) (\w+);", mirrored[pascal(name)])
        assert [("uint" if kind == "EventType" else kind, word) for kind, word in found] == expected, name


@pytest.mark.parametrize(
    ("prefix", "file", "name"),
    [
        ("FS_EVENT_", "Native.cs", "EventType"),
        ("FS_LEASE_", "Types.cs", "LeaseState"),
        ("FS_DECISION_", "Types.cs", "LeaseDecision"),
        ("FS_NOTICE_", "Types.cs", "NoticeKind"),
        ("FS_REASON_", "Types.cs", "StopReason"),
        ("FS_ENGINE_", "Types.cs", "EngineState"),
        ("FS_IMAGE_", "Types.cs", "ImageFormat"),
        ("FS_PHASE_", "Types.cs", "Phase"),
        ("FS_LOADING_", "Types.cs", "LoadingStage"),
    ],
)
def test_csharp_numbers_things_as_the_header_does(prefix: str, file: str, name: str) -> None:
    text = (UNITY / "Runtime" / "Core" / file).read_text()
    (body,) = re.findall(rf"enum {name}[^{{]*\{{(.*?)\}}", text, flags=re.DOTALL)
    numbers = dict(re.findall(r"(\w+) = (\d+)", body))
    listed = {pascal(word): number for word, number in re.findall(rf"\b{prefix}(\w+)\s*=\s*(\d+)", header())}
    listed.pop("Died", None)  # FS_ENGINE_DIED is a status
    assert numbers == listed


def test_csharp_names_errors_as_the_header_does() -> None:
    (statuses,) = re.findall(r"enum \{\s*FS_OK = 0,(.*?)\}", header(), flags=re.DOTALL)
    text = (UNITY / "Runtime" / "Core" / "Types.cs").read_text()
    (codes,) = re.findall(r"enum ErrorCode\s*\{(.*?)\}", text, flags=re.DOTALL)
    listed = {pascal(word): number for word, number in re.findall(r"FS_(\w+) = (\d+)", statuses)}
    assert dict(re.findall(r"(\w+) = (\d+)", codes)) == listed


def test_the_unity_package_is_whole() -> None:
    """Every asset has a GUID, by which scenes find components after an update, and assemblies refer to each other."""
    package = json.loads((UNITY / "package.json").read_text())
    samples = [UNITY / sample["path"] for sample in package["samples"]]
    assert all(list(sample.glob("*.cs")) for sample in samples)
    folders = [UNITY / "Samples~", *samples]  # Unity copies what is in them
    assets = [path for path in UNITY.rglob("*") if path.suffix != ".meta" and path not in folders]
    guids = []
    for asset in assets:
        meta = asset.with_name(asset.name + ".meta").read_text()
        (guid,) = re.findall(r"^guid: ([0-9a-f]{32})$", meta, flags=re.MULTILINE)
        guids.append(guid)
        assert ("folderAsset: yes" in meta) == asset.is_dir()
    assert len(set(guids)) == len(assets) == len(list(UNITY.rglob("*.meta")))
    assemblies = [json.loads(path.read_text()) for path in UNITY.rglob("*.asmdef")]
    names = {assembly["name"] for assembly in assemblies}
    assert all(set(assembly["references"]) <= names for assembly in assemblies)


@pytest.mark.skipif(shutil.which("mcs") is None, reason="no C# compiler: apt-get install mono-mcs")
@pytest.mark.parametrize(
    "folders",
    [["Runtime/Core"], ["Runtime/Core", "Runtime", "Editor", "Samples~/Innkeeper", TAVERN]],
    ids=["core", "unity"],
)
def test_csharp_compiles(folders: list[str], tmp_path: Path) -> None:
    """Compiles the core alone, and the core, the components and the samples with stubs of the engine."""
    sources = [path for folder in folders for path in sorted((UNITY / folder).glob("*.cs"))]
    if len(folders) > 1:
        sources += sorted((REPO / "tests" / "unity_stubs").glob("*.cs"))
    # 0649 warns of fields that only the engine's inspector sets.
    command = ["mcs", "-langversion:7", "-warnaserror", "-nowarn:0649", "-target:library", f"-out:{tmp_path}/out.dll"]
    result = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


SCENES = [
    "bindings/unity/Runtime/Prefabs/Innkeeper.prefab",
    "bindings/unity/Samples~/Innkeeper/Innkeeper.unity",
    "samples/unity_tavern/Assets/Tavern.unity",
]


@pytest.mark.parametrize("name", SCENES)
def test_scenes_of_unity_refer_to_what_there_is(name: str) -> None:
    """To objects in the file, to scripts by their GUIDs, and to fields of these scripts; all fields are set."""
    scripts = {}
    for folder in (UNITY, REPO / "samples" / "unity_tavern"):
        for meta in folder.rglob("*.cs.meta"):
            (guid,) = re.findall(r"^guid: (\w+)$", meta.read_text(), flags=re.MULTILINE)
            scripts[guid] = meta.with_suffix("").read_text()
    scene = (REPO / name).read_text()
    assert scene.startswith("%YAML 1.1\n%TAG !u! tag:unity3d.com,2011:\n")
    objects = re.findall(r"^--- !u!(\d+) &(\d+)\n(\w+):\n(.*?)(?=^---|\Z)", scene, flags=re.MULTILINE | re.DOTALL)
    ids = [number for _, number, _, _ in objects]
    assert len(set(ids)) == len(ids) == scene.count("\n--- ")
    inner = re.findall(r"\{fileID: (\d+)\}", scene)
    assert set(inner) - {"0"} <= set(ids)
    components = {}
    for _, number, kind, body in objects:
        if kind == "GameObject":
            for component in re.findall(r"component: \{fileID: (\d+)\}", body):
                components[component] = number
    assert set(components) == {number for _, number, kind, _ in objects if kind != "GameObject"}
    told = 0
    for _, number, kind, body in objects:
        if kind != "GameObject":
            assert f"m_GameObject: {{fileID: {components[number]}}}" in body
        if kind == "MonoBehaviour":
            told += 1
            (guid,) = re.findall(r"m_Script: \{fileID: 11500000, guid: (\w+), type: 3\}", body)
            fields = re.findall(r"^  (\w+):", body.partition("m_EditorClassIdentifier:")[2], flags=re.MULTILINE)
            serialized = re.findall(r"\[SerializeField.*?private \w+ (\w+)", scripts[guid], flags=re.DOTALL)
            assert fields == serialized
    assert told >= 2


def test_the_project_of_unity_takes_the_package() -> None:
    project = REPO / "samples" / "unity_tavern"
    package = json.loads((UNITY / "package.json").read_text())
    taken = json.loads((project / "Packages" / "manifest.json").read_text())["dependencies"][package["name"]]
    path = (project / "Packages" / taken.removeprefix("file:")).resolve()
    assert path == REPO / "build" / "packages" / f"{package['name']}-{package['version']}.tgz"
    scenes = (project / "ProjectSettings" / "EditorBuildSettings.asset").read_text()
    ((scene, guid),) = re.findall(r"path: (.+)\n    guid: (\w+)", scenes)
    assert f"guid: {guid}\n" in (project / f"{scene}.meta").read_text()
