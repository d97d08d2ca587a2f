"""``frameshard bundle``: a bundle runs on a machine on which nothing is installed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import marshal
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import trio

import fake_modules
import frameshard
import sidecars
from frameshard import cli, cpu
from frameshard.wire import launch

try:
    metadata.distribution("frameshard")
except metadata.PackageNotFoundError:
    pytest.skip("run from the source tree: a bundle is made of what pip installed", allow_module_level=True)


def bundle(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "frameshard", "bundle", *map(str, args), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=sidecars.DEADLINE_S, **options)


def refusal(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 2, result.stderr
    return dict(json.loads(result.stdout)["error"])


@pytest.fixture(scope="module")
def bundled(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A bundle that was moved after it was made, and its manifest."""
    made = tmp_path_factory.mktemp("made") / "bundle"
    result = bundle(made, "--model", model_path, "--with-models")
    assert result.returncode == 0, result.stderr
    place = tmp_path_factory.mktemp("a game's place") / "npc"
    shutil.move(made, place)
    return place, json.loads(result.stdout)


@contextlib.contextmanager
def launched(place: Path, config: dict[str, Any], directory: Path) -> Iterator[launch.ConnectInfo]:
    """Runs the sidecar of a bundle in a directory, on the emulated device."""
    command = [place / "sidecar" / "python", "-m", "frameshard.broker"]
    options: dict[str, Any] = {"cwd": directory, "env": {"PATH": "/usr/bin:/bin"}}
    with sidecars.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as sidecar:
        assert sidecar.stdin is not None
        assert sidecar.stdout is not None
        sidecar.stdin.write(json.dumps({"device": "emulated", "n_threads": 1, **config}).encode() + b"\n")
        sidecar.stdin.flush()
        yield launch.parse_ready(sidecar.stdout.readline())
        sidecar.stdin.close()
        assert sidecar.wait(sidecars.DEADLINE_S) == 0


def files_of(pid: int) -> set[str]:
    """The files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {parts[5] for parts in (line.split(maxsplit=5) for line in lines) if len(parts) == 6 and parts[5][0] == "/"}


def test_the_command_takes_nothing_from_where_it_is_called(
    bundled: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("open('mark', 'w')")
    command = (bundled[0] / "frameshard").read_text()
    assert " -m " not in command  # the bundle sets PYTHONSAFEPATH, which Python 3.10 ignores
    said = subprocess.run([bundled[0] / "frameshard", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.startswith("frameshard"), said.stderr
    assert not (tmp_path / "mark").exists()


def test_the_bundle_talks_with_nothing_else_there(bundled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    place, _ = bundled
    connect_file = tmp_path / "connect.json"
    config = {"model": str(next((place / "models").iterdir())), "connect_file": str(connect_file)}
    with launched(place, config, tmp_path):

        async def talk() -> str:
            with trio.fail_after(60):
                async with frameshard.connect(connect_file) as client:
                    stats = (await client.stats()).broker
                    assert stats.engine_pid is not None
                    here = {sys.prefix, sys.base_prefix} - {"/usr"}
                    for pid in (stats.pid, stats.engine_pid):
                        mapped = files_of(pid)
                        assert any(name.startswith(str(place)) for name in mapped)
                        assert not [name for name in mapped if any(name.startswith(f"{home}/") for home in here)]
                    answer = await client.ask("Hello!", sampling=frameshard.Sampling(max_tokens=8)).completed()
                    return str(answer.text)

        assert trio.run(talk)


@pytest.mark.usefixtures("own_runtime_directory")
def test_optional_parts_work_in_a_bundle(model_path: Path, tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    made = bundle(place, "--with", "fallback,http,top,vision")
    assert made.returncode == 0, made.stderr
    packages = {"httpx", "hypercorn", "jsonschema", "pillow", "rich", "starlette"}
    assert packages <= set(json.loads(made.stdout)["packages"])
    assert packages <= {path.name for path in (place / "licences").iterdir()}
    config = {"model": str(model_path), "http": "127.0.0.1:0", "fallback": "http://127.0.0.1:9/v1"}
    with launched(place, config | {"fallback_model": "any"}, tmp_path) as info:
        request = urllib.request.Request(
            f"{info.http_url}/models", headers={"Authorization": f"Bearer {info.http_key}"}
        )
        with urllib.request.urlopen(request, timeout=sidecars.DEADLINE_S) as response:
            assert json.load(response)["data"]
    command = [
        place / "sidecar" / "python",
        "-c",
        "import io, PIL.Image as i; i.new('L', (9, 9)).save(io.BytesIO(), 'PNG')",
    ]
    drawn = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert drawn.returncode == 0, drawn.stderr
    command = [place / "frameshard", "top"]
    alone = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}  # else it may find a sidecar of another program
    shown = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=sidecars.DEADLINE_S
    )
    assert shown.returncode == 2
    assert "no sidecar serves" in shown.stderr


def test_optional_parts_are_left_out_of_a_bundle(bundled: tuple[Path, dict[str, Any]]) -> None:
    assert not {"httpx", "hypercorn", "jsonschema", "pillow", "rich", "starlette"} & set(bundled[1]["packages"])


def test_optional_parts_may_be_given_one_by_one() -> None:
    args = cli.build_parser("bundle").parse_args(["bundle", "there", "--with", "http", "--with", "top,vision"])
    assert args.extras == ["http", "top", "vision"]


def test_a_part_that_no_bundle_has_is_refused(tmp_path: Path) -> None:
    error = refusal(bundle(tmp_path / "b", "--with", "http,dev"))
    assert "'dev' is none of fallback, http, top, vision" in error["message"]
    assert not (tmp_path / "b").exists()


def test_a_part_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    site = Path(str(metadata.distribution("frameshard").locate_file("")))
    (tmp_path / "site").mkdir()
    for entry in site.iterdir():
        if not entry.name.startswith("hypercorn-"):
            (tmp_path / "site" / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", "-m", "frameshard", "bundle", tmp_path / "b", "--with", "http", "--json"]
    here = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, str(tmp_path / "site")]))}
    error = refusal(
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    )
    assert error["name"] == "unsupported"
    assert "hypercorn is not installed here" in error["message"]
    assert "(pip install '.[http]')" in error["message"]


def test_the_command_line_of_a_bundle(bundled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    place, manifest = bundled
    link = tmp_path / "npc"
    link.symlink_to(place / "frameshard")
    result = subprocess.run(
        [link, "--version"], capture_output=True, text=True, env={}, cwd=tmp_path, timeout=sidecars.DEADLINE_S
    )
    assert f"frameshard {manifest['frameshard']}\n" in result.stdout, result.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="no emulated Haswell here (Debian: qemu-user)")
def test_a_bundle_runs_on_haswell(bundled: tuple[Path, dict[str, Any]], tiny_model: Callable[[str], Path]) -> None:
    """qemu supports nothing newer than AVX2, and ends other programs with SIGILL."""
    place, manifest = bundled
    if manifest["system"]["cpu"]["level"] != "x86-64-v3":
        pytest.skip("this environment's llama-cpp-python was compiled for newer CPUs, as the manifest says")
    sidecar = place / "sidecar"
    environment = {
        "PYTHONHOME": str(sidecar / "home"),
        "PYTHONPATH": str(sidecar / "packages"),
        "LD_LIBRARY_PATH": str(sidecar / "lib"),
        "PYTHONSAFEPATH": "1",
    }
    command = ["qemu-x86_64", "-cpu", "Haswell", sidecar / "home" / "bin" / "python3", "-m", "frameshard", "bench"]
    command += ["--model", tiny_model("llama"), "--device", "cpu", "--threads", "1", "--repeat", "1", "--json"]
    command += ["--prompt", "16", "--generate", "2"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)


def test_the_manifest_tells_what_is_there(bundled: tuple[Path, dict[str, Any]], model_path: Path) -> None:
    place, manifest = bundled
    assert manifest == json.loads((place / "manifest.json").read_text())
    system = manifest["system"]
    assert system["os"] == "linux"
    if system["machine"] == "x86_64":
        features = cpu.compiled_for()
        assert features
        assert system["cpu"] == {"level": cpu.level(features), "flags": cpu.needed_flags(features)}
    (model,) = manifest["models"]
    assert model["sha256"] == hashlib.sha256(model_path.read_bytes()).hexdigest()
    assert (place / model["path"]).stat().st_size == model["bytes"] == model_path.stat().st_size
    assert {"frameshard", "llama-cpp-python", "numpy", "pyzmq", "msgpack", "trio"} <= set(manifest["packages"])
    total = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    assert 0 <= total - manifest["total_bytes"] < 10_000  # the launchers and the manifest itself
    assert not list(place.rglob("tests"))


def installed_with(modules: Path, place: Path) -> None:
    """Makes a directory with this environment's packages, to which pip seems to have added files of frameshard."""
    place.mkdir()
    ours = metadata.distribution("frameshard")
    site = Path(str(ours.locate_file("")))
    notes = next(site.glob("frameshard-*.dist-info"))
    for entry in site.iterdir():
        if entry.name != "frameshard" and entry != notes:
            (place / entry.name).symlink_to(entry)
    shutil.copytree(notes, place / notes.name)
    (place / "frameshard").mkdir()
    for entry in (site / "frameshard").iterdir():
        if entry.name != "gpu":
            (place / "frameshard" / entry.name).symlink_to(entry)
    shutil.copytree(modules, place / "frameshard" / "gpu")
    record = place / notes.name / "RECORD"
    lines = [line for line in record.read_text().splitlines() if not line.startswith("frameshard/gpu/")]
    lines += [f"frameshard/gpu/{path.name},," for path in modules.iterdir()]
    record.write_text("\n".join(lines) + "\n")


@fake_modules.needs_compiler
def test_a_gpu_module_is_carried_with_what_it_is_linked_to(tmp_path: Path) -> None:
    toolkit, modules = tmp_path / "a toolkit" / "libtoolkit.so.1", tmp_path / "modules"
    toolkit.parent.mkdir()
    modules.mkdir()
    subprocess.run(["cc", "-shared", "-o", toolkit, "-Wl,-soname,libtoolkit.so.1", "-x", "c", "/dev/null"], check=True)
    libraries = ("-Wl,--no-as-needed", str(toolkit), f"-Wl,-rpath,{toolkit.parent}")
    fake_modules.compile_module(modules, "vulkan", libraries=libraries)
    (modules / "ggml-vulkan.json").write_text('{"driver": "a driver for tests"}')
    installed_with(modules, tmp_path / "site")
    command = [sys.executable, "-S", "-m", "frameshard", "bundle", tmp_path / "made", "--json"]
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    made = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, **options)
    assert made.returncode == 0, made.stderr
    manifest = json.loads(made.stdout)
    assert manifest["system"]["gpu_modules"] == {"vulkan": {"driver": "a driver for tests"}}
    carried = [path.stat().st_size for path in (*modules.iterdir(), toolkit)]
    assert manifest["bytes"]["GPU module vulkan"] == sum(carried)

    toolkit.unlink()
    place = tmp_path / "a game's place"
    shutil.move(tmp_path / "made", place)
    told = subprocess.run([place / "frameshard", "doctor", "--json"], env={}, **options)
    assert told.returncode == 0, told.stderr
    devices = json.loads(told.stdout)["devices"]
    assert devices["module vulkan"] == "works"
    assert devices["module cuda"].startswith("not used: this build has no module for CUDA")
    assert devices["auto"] == "Vulkan0"


def test_every_part_has_its_licence(bundled: tuple[Path, dict[str, Any]]) -> None:
    place, manifest = bundled
    parts = {*manifest["packages"], "llama.cpp", "python"}
    parts |= {path.name.partition(".so")[0] for path in (place / "sidecar" / "lib").iterdir()}
    there = {path.name for path in (place / "licences").iterdir() if any(file.is_file() for file in path.rglob("*"))}
    assert parts - set(manifest["without_licence_text"]) == there
    assert "llama-cpp-python" in there
    assert list((place / "licences" / "pyzmq").rglob("*zeromq*"))  # it is part of pyzmq's wheel


def test_nothing_of_the_machine_that_made_it_is_in_a_bundle(bundled: tuple[Path, dict[str, Any]]) -> None:
    place, _ = bundled
    packages = place / "sidecar" / "packages"
    notes = {path.name for folder in packages.glob("*.dist-info") for path in folder.iterdir()}
    assert "METADATA" in notes
    assert not notes & {"direct_url.json", "INSTALLER", "RECORD", "REQUESTED"}
    compiled = [*packages.rglob("*.pyc"), *(place / "sidecar" / "home").rglob("*.pyc")]
    assert compiled
    for path in compiled:
        (name,) = names_of(marshal.loads(path.read_bytes()[16:]))
        assert name.startswith("sidecar/")


def names_of(code: CodeType) -> set[str]:
    return {code.co_filename}.union(*(names_of(each) for each in code.co_consts if isinstance(each, CodeType)))


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for options in (["--with-models"], []):
        command = ["--model", str(tmp_path / "locked.gguf"), *options]
        ended = locked_out(tmp_path / "locked.gguf", str(tmp_path / "b"), *command)
        assert refusal(ended)["name"] == "model_not_found"
        assert f"cannot read {tmp_path / 'locked.gguf'}: Permission denied" in ended.stderr
        assert not (tmp_path / "b").exists()
    library = tmp_path / "libgame.so"
    ended = locked_out(library, str(tmp_path / "b"), "--client", str(library))
    assert f"cannot read {library}: Permission denied" in refusal(ended)["message"]


LOCKED = """
import builtins, os, sys
locked, real = sys.argv.pop(1), builtins.open
def opens(file, *args, **options):
    if os.fspath(file) == locked:
        raise PermissionError(13, "Permission denied", locked)
    return real(file, *args, **options)
builtins.open = opens
from frameshard.cli import main
sys.exit(main(["bundle", "--json", *sys.argv[1:]]))
"""


def locked_out(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A bundle by a user who may not read a file. Modes of files do not stop tests that run as root."""
    path.touch()
    command = [sys.executable, "-c", LOCKED, str(path), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_paths_that_cannot_be_looked_at_are_refused(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    assert "too long" in refusal(bundle(long))["message"]
    assert "too long" in refusal(bundle(tmp_path / "b", "--client", long))["message"]
    assert "too long" in refusal(bundle(tmp_path / "b", "--model", long))["message"]


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "save.dat").write_text("precious")
    assert refusal(bundle(tmp_path))["name"] == "bad_argument"
    assert [path.name for path in tmp_path.iterdir()] == ["save.dat"]


@pytest.mark.parametrize("name", ["no/such.gguf", "hf:nonsense", ""])
def test_a_missing_model_is_found_before_anything_is_written(name: str, tmp_path: Path) -> None:
    assert refusal(bundle(tmp_path / "b", "--model", name))["name"] == "model_not_found"
    assert not (tmp_path / "b").exists()


def test_a_missing_part_of_a_model_is_named(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    first.touch()
    assert "m-00002-of-00002.gguf is missing" in refusal(bundle(tmp_path / "b", "--model", first))["message"]


@pytest.mark.parametrize("option", ["--model", "--client"])
def test_two_files_of_one_name_are_refused(option: str, tmp_path: Path) -> None:
    """One would replace the other."""
    paths = [tmp_path / folder / "same.gguf" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    error = refusal(bundle(tmp_path / "b", "--with-models", option, paths[0], option, paths[1]))
    assert error["name"] == "bad_argument"
    assert all(str(path) in error["message"] for path in paths)
    assert not (tmp_path / "b").exists()


def test_a_bundle_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    """Writing a large file fails, as on a full disk."""
    size = (1 << 17, 1 << 17)
    place = tmp_path / "b"
    error = refusal(bundle(place, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, size)))
    assert error["name"] == "bad_argument"
    assert error["message"].startswith(f"cannot write {place}: ")
    assert not place.exists()


@pytest.mark.skipif("FRAMESHARD_BINDINGS" not in os.environ, reason="`make bindings` runs this one")
def test_a_client_library_brings_what_it_needs(tmp_path: Path) -> None:
    place = tmp_path / "b"
    result = bundle(place, "--client", Path(os.environ["FRAMESHARD_BINDINGS"]) / "libframeshard.so")
    assert result.returncode == 0, result.stderr
    told = subprocess.run(["ldd", place / "client" / "libframeshard.so"], capture_output=True, text=True).stdout
    found = dict(re.findall(r"(lib[a-z0-9_+-]+)\.so[.0-9]* => (\S+)", told))
    assert {"libzmq", "libsodium"} <= set(found)
    for name in ("libzmq", "libsodium"):
        assert Path(found[name]).parent == place / "client"
        assert list((place / "licences" / name).iterdir())
