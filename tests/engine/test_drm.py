"""VRAM that Linux's DRM drivers count, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from frameshard.engine.drm import DrmObserver

MIB = 1 << 20
GPU = "0000:03:00.0"

AMDGPU = f"""pos:\t0
flags:\t02100002
drm-driver:\tamdgpu
drm-client-id:\t{{client}}
drm-pdev:\t{GPU}
drm-total-vram:\t900 MiB
drm-shared-vram:\t0
drm-resident-vram:\t{{vram}}
drm-memory-vram:\t7 KiB
drm-resident-gtt:\t4096 MiB
drm-engine-gfx:\t12 ns
"""
XE = """drm-driver:\txe
drm-client-id:\t4
drm-pdev:\t0000:04:00.0
drm-resident-system:\t64 MiB
drm-resident-vram0:\t100 MiB
drm-resident-vram1:\t28 MiB
"""
I915 = """drm-driver:\ti915
drm-client-id:\t9
drm-pdev:\t0000:05:00.0
drm-resident-system0:\t8 MiB
drm-resident-local0:\t3072 KiB
"""
OLD_AMDGPU = f"drm-driver:\tamdgpu\ndrm-client-id:\t6\ndrm-pdev:\t{GPU}\ndrm-memory-vram:\t2048 KiB\n"
INTEGRATED = "drm-driver:\ti915\ndrm-client-id:\t9\ndrm-pdev:\t0000:00:02.0\ndrm-resident-system0:\t8 MiB\n"


class Machine:
    """Directories in place of /proc and /sys, with one process."""

    def __init__(self, tmp_path: Path) -> None:
        self.sys, self._proc = tmp_path / "sys", tmp_path / "proc"
        self.observer = DrmObserver(self._proc, self.sys)
        self._process = self._proc / str(self.observer.pid)
        for name in ("fd", "fdinfo"):
            (self._process / name).mkdir(parents=True)

    def opens(self, file: str, info: str) -> None:
        number = str(len(list((self._process / "fd").iterdir())))
        (self._process / "fd" / number).symlink_to(file)
        (self._process / "fdinfo" / number).write_text(info)

    def has(self, gpu: str, used: int, total: int) -> None:
        directory = self.sys / "bus" / "pci" / "devices" / gpu
        directory.mkdir(parents=True)
        (directory / "mem_info_vram_used").write_text(f"{used}\n")
        (directory / "mem_info_vram_total").write_text(f"{total}\n")


def test_every_client_counts_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.opens("/dev/dri/renderD128", AMDGPU.format(client=1, vram="512 MiB"))
    machine.opens("/dev/dri/renderD128", AMDGPU.format(client=1, vram="512 MiB"))  # dup() of the first
    machine.opens("/dev/dri/card0", AMDGPU.format(client=2, vram="1024 KiB"))
    machine.opens("/dev/dri/renderD129", XE)
    machine.opens("/dev/dri/renderD130", I915)
    machine.opens("/tmp/notes", AMDGPU.format(client=3, vram="99 MiB"))
    assert machine.observer.used() == (512 + 1 + 128 + 3) * MIB


def test_bytes_without_a_unit_and_the_older_key_are_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.opens("/dev/dri/renderD128", AMDGPU.format(client=1, vram="12345"))
    machine.opens("/dev/dri/renderD128", OLD_AMDGPU)
    assert machine.observer.used() == 12345 + 2 * MIB


def test_a_driver_without_figures_is_not_taken_for_one_that_counts_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.observer.used() is None
    machine.opens("/dev/dri/renderD128", "drm-driver:\tvgem\ndrm-client-id:\t1\n")
    machine.opens("/dev/dri/renderD129", INTEGRATED)
    machine.opens("/dev/dri/renderD130", AMDGPU.format(client=1, vram="much"))
    assert machine.observer.used() == 7 * 1024  # of the last one, whose older key can be read
    assert machine.observer.totals() is None


def test_free_memory_is_that_of_the_gpus_in_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has(GPU, used=3000 * MIB, total=8192 * MIB)
    machine.has("0000:09:00.0", used=10 * MIB, total=512 * MIB)  # another GPU, which the process does not use
    assert machine.observer.totals() is None
    machine.opens("/dev/dri/renderD128", AMDGPU.format(client=1, vram="512 MiB"))
    assert machine.observer.totals() == (5192 * MIB, 8192 * MIB)
    machine.opens("/dev/dri/renderD129", XE)  # its driver does not tell
    assert machine.observer.totals() is None


def test_a_process_that_has_ended_has_no_figures(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.observer.pid = 1 << 22
    assert (machine.observer.used(), machine.observer.totals(), machine.observer.source) == (None, None, None)
    (machine.sys / "class" / "drm" / "renderD128").mkdir(parents=True)
    assert machine.observer.source == "drm"
