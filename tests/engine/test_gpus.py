"""The choice of a device for ``auto`` among GPU modules that work and modules that are broken in all ways. The modules
are small libraries that are compiled here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fake_modules
import frameshard
from frameshard import errors, ggml, system
from frameshard.engine import gpus
from sidecars import in_trio, until_ready

pytestmark = [
    fake_modules.needs_compiler,
    pytest.mark.skipif(any(map(ggml.has_inside, ggml.MODULES)), reason="llama-cpp-python has a GPU backend inside"),
]

Make = Callable[..., None]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a GPU module in the only directory in which frameshard looks for them."""
    directory = tmp_path / "gpu"
    directory.mkdir()
    monkeypatch.setenv("FRAMESHARD_GPU_MODULES", str(directory))
    return functools.partial(fake_modules.compile_module, directory)


BROKEN = [
    ("NO_EXPORTS", "is no GPU module of frameshard"),
    ('BUILT_FROM="0.0.1 abcdef"', "was built from ggml 0.0.1 abcdef, and "),
    ("RETURNS_NULL", "finds no driver that it can use"),
    ("ABORTS", "ended the process that asked it, with signal 6"),
    ("EXITS", "ended the process that asked it, without an error"),
    ("HANGS", "did not answer within 3 s"),
    ("NO_DEVICE", "it has no device"),
    ("DOES_NOT_OPEN", "CUDA0 cannot be opened"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN, ids=[broken.partition("=")[0] for broken, _ in BROKEN])
def test_auto_passes_over_a_broken_module_and_says_why(
    broken: str, reason: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("cuda", broken)
    make("vulkan")
    if broken == "HANGS":
        monkeypatch.setattr(gpus, "TRY_S", 3.0)
        with pytest.raises(gpus.NotWorking, match=reason):
            gpus.try_module("cuda")
        return
    choice = gpus.choose()
    assert choice.device == "Vulkan0"
    (why,) = choice.passed_over
    assert why.startswith("CUDA: ")
    assert reason in why
    assert ("the driver's own words" in why) == (broken.partition("=")[0] not in ("NO_EXPORTS", "BUILT_FROM"))
    assert "load_backend" not in why


def test_a_library_of_a_driver_that_is_missing_is_named(make: Make, tmp_path: Path) -> None:
    driver = tmp_path / "libdriver.so.1"
    subprocess.run(["cc", "-shared", "-o", driver, "-Wl,-soname,libdriver.so.1", "-x", "c", "/dev/null"], check=True)
    make("cuda", libraries=("-Wl,--no-as-needed", str(driver)))
    driver.unlink()
    cuda, vulkan = gpus.choose().passed_over
    assert cuda.startswith("CUDA: libggml-cuda.so does not load: libdriver.so.1: cannot open shared object file")
    assert vulkan.startswith("Vulkan: this build has no module for Vulkan")


def test_a_gpu_with_too_little_memory_is_passed_over(make: Make) -> None:
    make("cuda")
    assert gpus.choose(lambda: 8 << 20) == gpus.Choice("CUDA0")
    choice = gpus.choose(lambda: (8 << 20) + 1)
    assert choice.device == "cpu"
    assert choice.passed_over[0] == "CUDA0: 8 of 16 MiB are free, and the model needs about 9 MiB"


INSIDE = """
import sys
from frameshard import ggml
from frameshard.engine import gpus
assert ggml.registry().ggml_backend_load(sys.argv[1].encode())
assert gpus.choose() == gpus.Choice("CUDA0"), gpus.choose()
assert ggml.device_handle("CUDA0")
two = gpus.choose(lambda: 9 << 20).passed_over
assert [why.partition(":")[0] for why in two] == ["CUDA0", "Vulkan"], two
"""


def test_a_backend_inside_llama_cpp_needs_no_module(make: Make, tmp_path: Path) -> None:
    """It is registered with ggml before frameshard looks, as here."""
    make("cuda")
    inside = tmp_path / "inside.so"
    (tmp_path / "gpu" / "libggml-cuda.so").rename(inside)
    subprocess.run([sys.executable, "-c", INSIDE, inside], check=True, timeout=120)


def test_without_a_gpu_the_need_is_not_computed(make: Make) -> None:
    assert gpus.choose(lambda: 1 // 0).device == "cpu"


def test_a_device_that_is_named_does_not_become_another(make: Make) -> None:
    make("cuda", 'BUILT_FROM="0.0.1 abcdef"')
    with pytest.raises(errors.VersionMismatch) as caught:
        ggml.device_handle("CUDA0")
    assert caught.value.detail["found"] == "0.0.1 abcdef"
    with pytest.raises(errors.UnknownDevice, match=r"'Vulkan0'; there are: .*; this build has no module"):
        ggml.device_handle("Vulkan0")


@in_trio
async def test_a_client_is_told(make: Make, tiny_model: Callable[[str], Path]) -> None:
    """The engine takes the CPU, although the driver of a better device has crashed."""
    make("cuda", "ABORTS")
    make("vulkan")  # 8 MiB: not enough
    async with frameshard.launch(tiny_model("llama"), device="auto", n_threads=1) as client:
        model = await client.model_info()
    assert model.device == "cpu"
    cuda, vulkan = model.passed_over.splitlines()
    assert "signal 6" in cuda
    assert vulkan.startswith("Vulkan0: 8 of 16 MiB are free")


@in_trio
async def test_an_engine_that_is_started_again_keeps_the_device(
    make: Make, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A host may have taken the memory of a GPU in the meantime."""
    async with frameshard.launch(tiny_model("llama"), device="auto", n_threads=1) as client:
        before = await client.model_info()
        make("cuda", f'ASKED="{tmp_path / "asked"}"')
        pid = (await client.stats()).broker.engine_pid
        assert pid is not None
        system.kill(pid)
        await until_ready(client, restarts=1)
        assert await client.model_info() == before
    assert before.device == "cpu"
    assert not (tmp_path / "asked").exists()
    gpus.try_module("cuda")
    assert (tmp_path / "asked").exists()


def test_doctor_tells_all_of_it(make: Make) -> None:
    make("cuda", "ABORTS")
    make("vulkan")
    command = [sys.executable, "-m", "frameshard", "doctor", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert told.returncode == 0, told.stderr
    devices = json.loads(told.stdout)["devices"]
    assert "with signal 6: " in devices["module cuda"]
    assert devices["module vulkan"] == "works"
    assert devices["Vulkan0"] == "a GPU for tests, 8 of 16 MiB free"
    assert devices["auto"] == "Vulkan0"


ONE_GGML = """
from frameshard import ggml, native
native._load(), ggml.registry(), ggml.base()
lines = open("/proc/self/maps").read().splitlines()
names = {line.rpartition("/")[2] for line in lines if "libggml-base" in line}
assert len(names) == 1, names
"""


def test_there_is_one_ggml_in_the_process() -> None:
    """A second one would have a registry of devices of its own, and not the engine's abort callback."""
    subprocess.run([sys.executable, "-c", ONE_GGML], check=True, timeout=60)
