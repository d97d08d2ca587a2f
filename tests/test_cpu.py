"""The native libraries run on every x86-64 CPU since Haswell. A ggml for another CPU gives an error, not a crash."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

import frameshard
from frameshard import cpu
from frameshard.errors import Unsupported

sys.path.insert(0, str(Path(__file__).parents[1] / "native" / "tools"))
import gpu_modules
import llama_wheel

HASWELL = frozenset({"avx", "avx2", "bmi2", "f16c", "fma"})
SAPPHIRE_RAPIDS = HASWELL | {"avx512", "avx512_vbmi", "avx512_vnni", "avx512_bf16", "amx_int8"}
# The registers that Haswell lacks: those of AVX-512 (also mask registers, and xmm16 to ymm31) and of AMX.
BEYOND = re.compile(r"%(?:zmm\d+|tmm\d|k[0-7]|[xy]mm(?:1[6-9]|2\d|3[01]))\b")

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64")


# --- What is built ------------------------------------------------------------------------------------------------


def beyond_haswell(library: Path) -> list[str]:
    """The instructions in ``library`` that Haswell lacks."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\tret" in told.stdout, f"objdump sees no code in {library}"
    return [line.strip() for line in told.stdout.splitlines() if BEYOND.search(line)]


def native_libraries() -> list[Path]:
    ours = Path(frameshard.__file__).parent.glob("libframeshard_device.so")
    theirs = (Path(llama_cpp.__file__).parent / "lib").glob("lib*.so")
    # The libraries for GPUs are left out: they have no code for special CPUs, and take minutes to disassemble.
    return [path for path in (*ours, *theirs) if not re.match(r"libggml-(cuda|hip|musa|sycl|vulkan)", path.name)]


def chosen_native() -> bool:
    """Whether ``make build`` was called with CMAKE_ARGS=-DGGML_NATIVE=ON."""
    chosen = Path(sys.prefix) / "cmake_args"
    return chosen.is_file() and "native" in chosen.read_text().lower()


@x86
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here (Debian: binutils)")
@pytest.mark.skipif(chosen_native(), reason="this environment was built for one CPU, as its CMAKE_ARGS asked")
def test_nothing_that_is_built_needs_more_than_haswell() -> None:
    libraries = native_libraries()
    assert {"libframeshard_device", "libggml-cpu", "libggml-base", "libllama", "libmtmd"} <= {
        path.name.partition(".so")[0] for path in libraries
    }
    for library in libraries:
        assert not beyond_haswell(library)[:5], library
    assert cpu.compiled_for() == HASWELL


@x86
@pytest.mark.skipif(shutil.which("objdump") is None or shutil.which("gcc") is None, reason="needs gcc and objdump")
@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("-mavx512f", "void f(float *x) { for (int i = 0; i < 64; i++) x[i] += 1.0f; }"),
        ("-mamx-tile", 'void f(void) { __asm__ volatile("tilezero %tmm0"); }'),
        ("-mavx2", ""),
    ],
)
def test_the_search_finds_what_it_looks_for(flag: str, code: str, tmp_path: Path) -> None:
    source, library = tmp_path / "f.c", tmp_path / "f.so"
    source.write_text(code + "\nint g(void) { return 1; }\n")
    wide = ["-mprefer-vector-width=512"] if "512" in flag else []
    subprocess.run(["gcc", "-O3", "-shared", "-fPIC", flag, *wide, "-o", library, source], check=True)
    assert bool(beyond_haswell(library)) == bool(code)


@x86
def test_a_wheel_is_kept_for_all_cpus_unless_it_is_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(given: str) -> set[str]:
        found = set()
        for features in ("avx2 avx512f amx_tile", "avx2"):
            monkeypatch.setattr(llama_wheel, "cpu_features", lambda features=features: features)
            found.add(llama_wheel.key(llama_wheel.cmake_args(given.split())))
        return found

    assert len(keys("")) == 1
    assert len(keys("-DGGML_OPENMP=OFF")) == 1
    assert keys("-DGGML_OPENMP=OFF") != keys("")
    for native in ("-DGGML_NATIVE=ON", "-DGGML_NATIVE:BOOL=1", "-DCMAKE_C_FLAGS=-march=native"):
        assert len(keys(native)) == 2, native


@x86
def test_what_is_given_wins() -> None:
    args = llama_wheel.cmake_args(["-DGGML_NATIVE=ON"])
    assert [arg for arg in args if arg.startswith("-DGGML_NATIVE=")][-1] == "-DGGML_NATIVE=ON"
    args = gpu_modules.for_module("cuda", ["-DGGML_CUDA=on", "-DCMAKE_CUDA_ARCHITECTURES=89"])
    assert args[-1] == "-DCMAKE_CUDA_ARCHITECTURES=89"


BOTH = ["-DGGML_CUDA=on", "-DCUDAToolkit_ROOT=/c", "-DGGML_VULKAN:BOOL=1", "-DVulkan_INCLUDE_DIR=/v"]
BOTH += ["-DGGML_NATIVE=ON"]


def test_quoted_arguments_stay_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the command line of make to the tools."""
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    rule = re.search(r"^\$\(VENV\)/cmake_args:.*?^FORCE:\n", makefile, re.MULTILINE | re.DOTALL)
    assert rule is not None
    (tmp_path / "Makefile").write_text(f"VENV := .\n./python: ;\n{rule[0]}")
    (tmp_path / "cmake_args").touch()
    given = """-DCMAKE_C_FLAGS="-O2 -g" '-DX=a;b'"""
    times = []
    for _ in range(2):
        subprocess.run(["make", "-s", "cmake_args", f"CMAKE_ARGS={given}"], cwd=tmp_path, check=True)
        times.append((tmp_path / "cmake_args").stat().st_mtime_ns)
    assert times[0] == times[1]
    monkeypatch.setenv("CMAKE_ARGS", (tmp_path / "cmake_args").read_text().strip())
    assert gpu_modules.given() == ["-DCMAKE_C_FLAGS=-O2 -g", "-DX=a;b"]
    assert gpu_modules.joined(["-DX=a;b", "-DY=c"]) == "-DX=a;b -DY=c"
    assert gpu_modules.joined(["-DX=a b"]) != gpu_modules.joined(["-DX=a", "b"])
    monkeypatch.setenv("CMAKE_ARGS", '-DX="a')
    with pytest.raises(SystemExit, match="CMAKE_ARGS cannot be split"):
        gpu_modules.given()


def test_each_part_is_built_with_what_is_about_it() -> None:
    assert gpu_modules.wanted(BOTH) == ["cuda", "vulkan"]
    assert gpu_modules.wanted([*BOTH, "-DGGML_CUDA=OFF"]) == ["vulkan"]
    assert gpu_modules.wanted(["-DGGML_METAL=on", "-DGGML_VULKAN_DEBUG=on"]) == []
    assert gpu_modules.for_wheel(BOTH) == ["-DGGML_NATIVE=ON"]
    assert gpu_modules.for_module("vulkan", BOTH) == BOTH[2:]
    assert gpu_modules.for_module("cuda", BOTH) == ["-DCMAKE_CUDA_ARCHITECTURES=native", *BOTH[:2], BOTH[4]]
    assert gpu_modules.key("cuda", BOTH) != gpu_modules.key("cuda", BOTH[1:])


# --- What is run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "has", "avoid"),
    [
        (SAPPHIRE_RAPIDS, {"avx2", "amx_tile", "amx_int8"}, True),
        (SAPPHIRE_RAPIDS, {"avx2", "avx512f"}, False),
        (HASWELL, {"avx2", "amx_tile", "amx_int8"}, False),
        (SAPPHIRE_RAPIDS, None, True),
        (None, {"avx2", "amx_int8"}, True),  # ggml chooses among several files
        (None, {"avx2"}, False),
        (frozenset(), None, False),
    ],
)
def test_amx_is_avoided_where_both_have_it(
    features: set[str] | None, has: set[str] | None, avoid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "compiled_for", lambda: features)
    monkeypatch.setattr(cpu, "flags", lambda: has)
    assert cpu.must_avoid_amx() is avoid


LOAD = """
import sys, llama_cpp
from frameshard import cpu
from frameshard.engine import llamalog, runtime
from frameshard.wire.engine import EngineConfig

said = []
log = llama_cpp.llama_log_callback(lambda _level, text, _data: said.append(text.decode(errors="replace")))
llamalog.install = lambda: llama_cpp.llama_log_set(log, None)
compiled_for, flags = cpu.compiled_for(), cpu.flags()
if sys.argv[2] == "amx":
    cpu.compiled_for = lambda: compiled_for | {"amx_int8"}
    cpu.flags = lambda: flags | {"amx_int8"}
with runtime.Runtime.load(EngineConfig(model=sys.argv[1], device="cpu", n_ctx=256, n_threads=1)) as loaded:
    loaded.decode_tokens(0, [5, 6, 7])
print("".join(said))
"""


@x86
def test_a_ggml_with_amx_is_loaded_without_its_buffer_types(tiny_model: Callable[[str], Path]) -> None:
    """The test looks at repacked weights. They use a buffer type of the same kind, on any CPU with AVX2."""

    def load(kind: str) -> tuple[str, str]:
        model = str(tiny_model("qwen3moe"))
        result = subprocess.run(
            [sys.executable, "-c", LOAD, model, kind], capture_output=True, text=True, check=True, timeout=120
        )
        return result.stdout, result.stderr

    buffers, log = load("as it is")
    assert "CPU_REPACK model buffer" in buffers
    assert "AMX" not in log
    buffers, log = load("amx")
    assert "CPU_REPACK model buffer" not in buffers
    assert "model buffer" in buffers
    assert "AMX" in log


@x86
def test_a_cpu_that_lacks_what_ggml_was_compiled_for_is_told_so(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frameshard import ggml
    from frameshard.engine.runtime import Runtime
    from frameshard.wire.engine import EngineConfig

    features = cpu.compiled_for()
    assert features
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"avx", "sse4_2"}))  # Sandy Bridge
    for use in (ggml.gpu_devices, lambda: Runtime.load(EngineConfig(model=str(model_path), device="cpu"))):
        with pytest.raises(Unsupported) as caught:
            use()
        assert {"avx2", "bmi2", "f16c", "fma"} <= set(caught.value.detail["missing"])
        assert "avx2" in str(caught.value)


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (frozenset(), "x86-64-v2"),
        (HASWELL, "x86-64-v3"),
        (HASWELL | {"avx512"}, "x86-64-v4"),
        (SAPPHIRE_RAPIDS, None),
    ],
)
def test_levels(features: frozenset[str], level: str | None) -> None:
    assert cpu.level(features) == level
    assert set(cpu.needed_flags(features)) >= {flag for name in features - {cpu.AMX} for flag in cpu.NEEDS[name]}
