"""The C# core in Mono with a real sidecar (apt-get install mono-mcs mono-runtime nunit-console libnunit-cil-dev)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sidecars
from frameshard.testing import fake_engine

REPO = Path(__file__).parents[2]
UNITY = REPO / "bindings" / "unity"
TESTS = REPO / "tests" / "bindings"
CORE = sorted((UNITY / "Runtime" / "Core").glob("*.cs"))
ENGINE = [*(UNITY / "Runtime").glob("*.cs"), *(REPO / "tests" / "unity_stubs").glob("*.cs")]
"""The component of the engine, and what stands in for the engine."""


def compiled(program: Path, *arguments: str | Path) -> Path:
    """Compiles the core and further sources to one program or library. 0649 warns of fields that only C code sets."""
    command = ["mcs", "-langversion:7", "-warnaserror", "-nowarn:0649", f"-out:{program}", *CORE, *arguments]
    subprocess.run(list(map(str, command)), check=True, timeout=120)
    return program


def test_the_package_passes_its_own_tests(program_env: dict[str, str], tmp_path: Path) -> None:
    """The tests are run as by Unity's test runner."""
    library = compiled(tmp_path / "tests.dll", "-target:library", "-pkg:nunit", *UNITY.glob("Tests/Runtime/*.cs"))
    options = ["-nologo", "-noxml", "-domain:None", "-process:Single"]
    result = subprocess.run(
        ["nunit-console", *options, library], env=program_env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Tests run: 13, Errors: 0, Failures: 0, .*\n.*Ignored: 0", result.stdout), result.stdout


def test_the_program_in_the_readme_talks(program_env: dict[str, str], model_path: Path, tmp_path: Path) -> None:
    component, script = re.findall(r"```csharp\n(.*?)```", (UNITY / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "Innkeeper.cs").write_text(script)
    program = compiled(tmp_path / "innkeeper.exe", tmp_path / "Innkeeper.cs")
    result = subprocess.run(
        ["mono", program, model_path, sys.executable], env=program_env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    answers = re.fullmatch(r"You: Good evening!\n(.+)\nYou: Any rooms left\?\n(.+)\n", result.stdout, flags=re.DOTALL)
    assert answers is not None, result.stdout
    assert all(len(answer) > 10 for answer in answers.groups())
    assert len([line for line in script.splitlines() if line.strip(" {}")]) <= 20

    (tmp_path / "Greeter.cs").write_text(component)
    compiled(tmp_path / "greeter.dll", "-target:library", tmp_path / "Greeter.cs", *ENGINE)


def test_the_model_has_the_gpu_while_the_game_is_in_the_background(
    program_env: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    program = compiled(tmp_path / "focus.exe", *ENGINE, TESTS / "ByName.cs", TESTS / "Focus.cs")
    command = ["mono", program, model_path, sys.executable]
    result = subprocess.run(command, env=program_env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0\n1\n0\n"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The components and both samples."""
    samples = [
        UNITY / "Samples~" / "Innkeeper" / "Innkeeper.cs",
        REPO / "samples" / "unity_tavern" / "Assets" / "Tavern.cs",
    ]
    program = tmp_path_factory.mktemp("scene") / "scene.exe"
    return compiled(program, *ENGINE, *samples, TESTS / "ByName.cs", TESTS / "Scene.cs")


def test_objects_of_a_scene_hear_all_that_comes_after_their_start(
    program_env: dict[str, str], model_path: Path, scene: Path
) -> None:
    command = ["mono", scene, model_path, sys.executable]
    result = subprocess.run(command, env=program_env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "ready: True True, loading told: True",
        "Canceled Canceled",
        "heard after the end: 0",
        "RanToCompletion: You are Mira.",
    ]


def test_objects_of_a_scene_hear_why_there_is_no_sidecar(
    program_env: dict[str, str], model_path: Path, scene: Path
) -> None:
    command = ["mono", scene, model_path, "/no/such/python"]
    result = subprocess.run(command, env=program_env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"(\w+) True True \1: .*/no/such/python.*\n", result.stdout), result.stdout


@pytest.mark.parametrize("content", [None, "no library"])
def test_a_library_that_cannot_be_loaded_is_an_error_like_others(
    program_env: dict[str, str], content: str | None, scene: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "libframeshard.so").write_text(content)
    environment = {**program_env, "LD_LIBRARY_PATH": str(tmp_path)}
    command = ["mono", scene, "model.gguf", sys.executable]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("unsupported True True unsupported: the library libframeshard cannot be loaded")


def test_a_thread_that_waits_for_events_lets_others_call(
    program_env: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    program = compiled(tmp_path / "turns.exe", TESTS / "ByName.cs", TESTS / "Turns.cs")
    command = ["mono", program, model_path, sys.executable]
    result = subprocess.run(command, env=program_env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"


def test_the_sample_finds_the_memory_that_a_question_needs(
    program_env: dict[str, str], encoder_path: Path, tmp_path: Path
) -> None:
    sources = [UNITY / "Samples~" / "Memories" / "Memories.cs", TESTS / "ReusedMemory.cs", TESTS / "Remember.cs"]
    program = compiled(tmp_path / "remember.exe", *sources)
    extra = json.dumps({"engine": fake_engine()})
    result = subprocess.run(
        ["mono", program, encoder_path, extra], env=program_env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The key is under the mill.\nI am looking for my dog.\nTrue\n"


def test_calls_of_tools_and_their_results(program_env: dict[str, str], talking_model: Path, tmp_path: Path) -> None:
    program = compiled(tmp_path / "calls.exe", TESTS / "ReusedMemory.cs", TESTS / "ToolCalls.cs")
    command = ["mono", program, sys.executable, talking_model]
    result = subprocess.run(command, env=program_env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout == 'True\nprice {"item":"ale"}\nuser assistant tool\n'


def test_no_sidecar_outlives_its_domain(program_env: dict[str, str], tmp_path: Path) -> None:
    program = compiled(tmp_path / "reload.exe", TESTS / "DomainReload.cs")
    with sidecars.started(
        ["mono", program], env=program_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        sidecars.gone_after(pids, 30.0)
        assert process.poll() is None, "the editor goes on"
        assert len(set(pids)) == 2
        assert process.communicate("\n", timeout=60)[0] == ""
    assert process.returncode == 0
