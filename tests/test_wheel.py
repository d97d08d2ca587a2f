"""The wheel contains the sidecar: as pip has installed it, and as `make bindings` builds it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
LIBRARY = {"frameshard/libframeshard_device.so", "frameshard/frameshard_vulkan_layer.json"}


def wanted() -> set[str]:
    """The files that a wheel must have: the package, the shard device with its layer for Vulkan, and the profiles of
    known machines."""
    package = REPO / "sdk" / "frameshard"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    machines = {f"frameshard/plan/profiles/{path.name}" for path in (REPO / "profiles").glob("*.json")}
    return {name for name in files if "__pycache__" not in name} | machines | LIBRARY


def check(names: set[str]) -> None:
    inside = {name for name in names if not re.match(r"\.\./|frameshard-[^/]+\.dist-info/|.*__pycache__/", name)}
    assert inside == wanted()
    assert any(re.fullmatch(r"frameshard-[^/]+\.dist-info/licenses/LICENSE", name) for name in names)


def installed() -> metadata.Distribution:
    try:
        return metadata.distribution("frameshard")
    except metadata.PackageNotFoundError:
        pytest.skip("run from the source tree: frameshard is not installed")


def test_what_is_installed_is_whole() -> None:
    distribution = installed()
    check({str(file) for file in distribution.files or []})
    assert [(entry.group, entry.name) for entry in distribution.entry_points] == [("console_scripts", "frameshard")]
    needed = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in distribution.requires or [] if "extra" not in line}
    packages = {
        "anyio",
        "jinja2",
        "llama-cpp-python",
        "llguidance",
        "msgpack",
        "numpy",
        "nvidia-ml-py",
        "pyzmq",
        "trio",
    }
    assert needed == packages
    assert "llama-cpp-python==0.3.36" in (distribution.requires or [])


@pytest.mark.skipif(
    "FRAMESHARD_BINDINGS" not in os.environ, reason="builds for a minute: `make bindings` runs this one"
)
def test_pip_wheel(tmp_path: Path) -> None:
    """The wheel is built, installed into an empty directory, and imported from there."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(REPO)]
    # The build directory is not that of `make build`.
    subprocess.run([*build, f"--config-settings=build-dir={tmp_path / 'build'}"], check=True, timeout=900)
    (wheel,) = tmp_path.glob("frameshard-*-py3-none-*.whl")
    check(set(zipfile.ZipFile(wheel).namelist()))
    place = tmp_path / "place"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), str(wheel)], check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "FRAMESHARD_DEVICE_LIB"}
    device = "n.ShardDevice('emulated', vram_budget_bytes=1 << 28, n_threads=1)"
    probe = f"from frameshard import native as n; {device}; print(n)"
    result = subprocess.run(
        [sys.executable, "-c", probe], env={**environment, "PYTHONPATH": str(place)}, capture_output=True, text=True
    )
    assert str(place) in result.stdout, result.stderr
