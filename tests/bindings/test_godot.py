"""The Godot addon in the real engine, without a window. `make bindings` gets the engine by bindings/godot/engine.sh."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine_packages import files

from frameshard.testing import fake_engine

REPO = Path(__file__).parents[2]
ENGINE = REPO / "build" / "godot" / "godot"
SAID = """\
npc connection_lost True
launch bad_argument
launch bad_argument
launch model_not_found True
loading read 1 of 2
loading read 2 of 2
model any 16.0 256.0
sentence 'One two.'
sentence 'Three “four”'
answer 'One two. Three “four”' True False
npc bad_argument True
released [64.0, 64.0]
sidecar bad_argument True
sidecar bad_argument True
sidecar bad_argument True
sidecar bad_argument True
sidecar bad_argument True
sidecar bad_argument True
still [64.0, 64.0]
sidecar bad_argument True
sidecar budget_below_floor True
active [32.0, 32.0]
parked [32.0, 0.0]
parked [32.0, 0.0]
parked [48.0, 0.0]
sidecar bad_argument True
loaded True
loaded False
npc bad_save True
engine restarting
npc engine_died True
freed
""".replace("True", "true").replace("False", "false")


def godot(project: Path, env: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ENGINE, "--headless", "--path", project, *arguments], env=env | {"HOME": str(project)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def with_addon(source: Path, project: Path, packages: Path, env: dict[str, str]) -> Path:
    """A copy of a project with the addon of the package, as the editor has imported it."""
    shutil.copytree(source, project, ignore=shutil.ignore_patterns("addons", ".godot"))
    for name, content in files(packages, "frameshard-godot-*.zip").items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    # Where an import without a window meets an extension for the first time, Godot crashes at its end: godot#111048.
    (project / ".godot").mkdir()
    (project / ".godot" / "extension_list.cfg").write_text("res://addons/frameshard/frameshard.gdextension\n")
    imported = godot(project, env, "--import")
    assert imported.returncode == 0, imported.stderr
    assert "ERROR" not in imported.stdout + imported.stderr
    return project


@pytest.fixture
def env(program_env: dict[str, str]) -> dict[str, str]:
    """Without paths of libraries: the addon needs no other file."""
    return {name: value for name, value in program_env.items() if name not in ("LD_LIBRARY_PATH", "FRAMESHARD_LIBRARY")}


def test_the_nodes_talk_by_signals(packages: Path, env: dict[str, str], tmp_path: Path) -> None:
    project = with_addon(REPO / "tests" / "bindings" / "godot", tmp_path / "project", packages, env)
    extra = {"engine": fake_engine(delay_s=0.02, loading=2, poison="poison"), "loading": "on"}
    played = godot(project, env | {"FRAMESHARD_EXTRA": json.dumps(extra)})
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stderr == ""
    assert played.stdout.partition("\n\n")[2] == SAID  # the engine's own line comes first


def test_the_tavern_plays(packages: Path, env: dict[str, str], model_path: Path, tmp_path: Path) -> None:
    project = with_addon(REPO / "samples" / "godot_tavern", tmp_path / "project", packages, env)
    options = ["--device", "emulated", "--python", sys.executable, "--unattended"]
    played = godot(project, env, "--", model_path, *options)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "2 answers; 1 shrinks and 1 grows while she spoke" in played.stdout
    missing = godot(project, env, "--", tmp_path / "no.gguf", *options)
    assert missing.returncode == 1
    assert "model_not_found: " in missing.stderr
