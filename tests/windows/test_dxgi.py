"""VRAM that Windows counts. Wine has DXGI too: with its renderer `no3d` it shows a GPU of 128 MiB that nobody uses."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frameshard.engine.dxgi import DxgiObserver

MIB = 1 << 20
LOOK = """
import json, pathlib, sys
from frameshard.engine.observer import find_observer
observer = find_observer()
mine = [observer.source, observer.used(), observer.totals(), observer.others()]
observer.pid += 4
pathlib.Path(sys.argv[1]).write_text(json.dumps([mine, observer.used(), observer.totals()]))
"""


def is_wine() -> bool:
    return sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


@pytest.mark.skipif(not is_wine(), reason="needs the GPU that Wine shows")
def test_windows_counts_the_vram_of_this_process_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "WINE_D3D_CONFIG": "renderer=no3d"}
    said = tmp_path / "said"
    # No pipe: Wine's desktop, which starts with DXGI, would keep it open.
    nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.run([sys.executable, "-c", LOOK, said], env=environment, check=True, timeout=60, **nowhere)
    mine, used_of_another, totals_of_another = json.loads(said.read_text())
    assert mine == ["dxgi", 0, [128 * MIB, 128 * MIB], {}]
    assert used_of_another is None
    assert totals_of_another is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows may have a GPU")
def test_other_systems_have_no_dxgi() -> None:
    observer = DxgiObserver()
    assert (observer.source, observer.used(), observer.totals()) == (None, None, None)
