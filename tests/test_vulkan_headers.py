"""What is checked before llama.cpp is compiled for Vulkan, in processes of their own with a given SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "native" / "tools"


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """A Vulkan SDK with headers of 1.3.239."""
    root = tmp_path / "sdk"
    for name in ("include/vulkan/vulkan_core.h", "bin/glslc", "lib/libvulkan.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "bin/glslc").chmod(0o755)
    config = root / "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
    config.parent.mkdir(parents=True)
    config.touch()
    set_version(root, 239)
    return root


def set_version(sdk: Path, patch: int) -> None:
    (sdk / "include/vulkan/vulkan_core.h").write_text(
        f"#define VK_HEADER_VERSION {patch}\n"
        "#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)\n"
    )


def further_arguments(sdk: Path, tmp_path: Path, *given: str) -> subprocess.CompletedProcess[str]:
    code = f"import vulkan; print(vulkan.cmake_args({['-DGGML_VULKAN=on', *given]!r}))"
    (tmp_path / "nothing").mkdir(exist_ok=True)
    environment = {**os.environ, "VULKAN_SDK": str(sdk), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PATH"] = str(tmp_path / "nothing")  # without apt
    return subprocess.run([sys.executable, "-c", code], cwd=TOOLS, env=environment, capture_output=True, text=True)


def test_old_headers_are_refused_with_what_to_do(sdk: Path, tmp_path: Path) -> None:
    refused = further_arguments(sdk, tmp_path)
    assert refused.returncode == 1
    assert "1.3.239 are older than 1.3.272" in refused.stderr
    assert "VULKAN_SDK" in refused.stderr
    assert "-DVulkan_INCLUDE_DIR=" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_new_or_named_headers_are_taken_as_they_are(sdk: Path, tmp_path: Path) -> None:
    named = further_arguments(sdk, tmp_path, "-DVulkan_INCLUDE_DIR=/elsewhere")
    assert (named.returncode, named.stdout.strip()) == (0, "[]")
    set_version(sdk, 272)
    new = further_arguments(sdk, tmp_path)
    assert (new.returncode, new.stdout.strip(), new.stderr) == (0, "[]", "")
