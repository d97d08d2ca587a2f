"""ggml, as llama_cpp has loaded it: its devices, and the GPU modules that are loaded into it.

A GPU module is one of ggml's GPU backends as a library of its own. It is in the folder ``gpu`` beside this file if it
was built. The library of a driver, to which it is linked, may be missing on a machine; only this module does not load
then. A driver may also crash or hang when it is asked for its devices: :mod:`frameshard.engine.gpus` asks in a process
that may die. A llama-cpp-python that was built with a GPU backend inside needs no module for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import cpu, errors

LIBRARY_FILE = {"win32": "{}.dll", "darwin": "lib{}.dylib"}.get(sys.platform, "lib{}.so")

MODULES = {"cuda": "CUDA", "vulkan": "Vulkan"}
"""The GPU modules, the best first. Each has the name of its backend in ggml, with which its devices' names begin."""

VULKAN_LAYER = "VK_LAYER_FRAMESHARD_ggml"
"""The Vulkan layer in the shard device's library (native/src/vulkan_layer.cpp)."""
LAYER_FILE = "frameshard_vulkan_layer.json"
"""The file by which Vulkan's loader finds the layer. It is beside the library."""

_before: dict[str, str | None] = {}  # the variables that this process has changed, as they were

_GPU_TYPES = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU

_AbortCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_on_abort: Any = None  # ggml keeps the pointer for the life of the process


def _loaded(library: str) -> ctypes.CDLL:
    """The functions of a library of ggml that llama.cpp has loaded.

    They are looked up by way of libllama. A wheel has copies of each library instead of links to it, so a library that
    is opened by its path may be a second ggml, with devices of its own. On Windows there are no copies, and a library
    does not pass on the functions of those that it uses.

    :raises Unsupported: it was compiled for a CPU with other features.
    """
    _ask_for_layer()
    import llama_cpp

    cpu.check()
    if sys.platform == "win32":
        directory = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")
        return ctypes.CDLL(str(directory / LIBRARY_FILE.format(library)))
    llama = llama_cpp.llama_cpp._lib
    return ctypes.CDLL(llama._name, handle=llama._handle)


def _ask_for_layer() -> None:
    """Asks Vulkan's loader for our layer, in addition to those that others ask for. Buffers are in memory that the CPU
    cannot write directly then: that is given back 5 times as fast. Both are read when ggml opens the first driver."""
    directory = Path(os.environ.get("FRAMESHARD_DEVICE_LIB") or __file__).parent
    if "VK_ADD_LAYER_PATH" in _before or not (directory / LAYER_FILE).is_file():
        return
    wanted = {"GGML_VK_DISABLE_HOST_VISIBLE_VIDMEM": "1"}
    for variable, value in (("VK_ADD_LAYER_PATH", str(directory)), ("VK_INSTANCE_LAYERS", VULKAN_LAYER)):
        others = [each for each in os.environ.get(variable, "").split(os.pathsep) if each not in ("", value)]
        wanted[variable] = os.pathsep.join([*others, value])
    _set_variables(wanted)


def start_llama_cpp() -> None:
    """Starts llama.cpp. A ggml that is linked to Vulkan opens its driver now."""
    _ask_for_layer()
    import llama_cpp

    llama_cpp.llama_backend_init()


def disable_early_kernels() -> None:
    """Has ggml's CUDA backend start each kernel only when the one before it has ended. Without this a kernel may start
    earlier and wait for the other one itself (programmatic dependent launch). To be called before this process
    computes."""
    _set_variables({"GGML_CUDA_PDL": "0"})


def _set_variables(values: Mapping[str, str]) -> None:
    _before.update({variable: os.environ.get(variable) for variable in values if variable not in _before})
    os.environ.update(values)


def environment_before() -> dict[str, str]:
    """The environment of this process, as it was before this module changed it."""
    values = {**os.environ, **_before}
    return {variable: value for variable, value in values.items() if value is not None}


def registry() -> ctypes.CDLL:
    """The library with ggml's registry of backends and devices.

    :raises Unsupported: it was compiled for a CPU with other features.
    """
    ggml = _loaded("ggml")
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name in ("load", "dev_by_name", "reg_by_name"):
        getattr(ggml, f"ggml_backend_{name}").argtypes = [ctypes.c_char_p]
        getattr(ggml, f"ggml_backend_{name}").restype = ctypes.c_void_p
    return ggml


def base() -> ctypes.CDLL:
    """The library with the devices' own functions.

    :raises Unsupported: it was compiled for a CPU with other features.
    """
    base = _loaded("ggml-base")
    for name in ("name", "type", "description"):
        getattr(base, f"ggml_backend_dev_{name}").argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_name.restype = ctypes.c_char_p
    base.ggml_backend_dev_description.restype = ctypes.c_char_p
    base.ggml_version.restype = ctypes.c_char_p
    base.ggml_commit.restype = ctypes.c_char_p
    base.ggml_set_abort_callback.argtypes = [_AbortCallback]
    base.ggml_set_abort_callback.restype = ctypes.c_void_p
    return base


def on_abort(tell: Callable[[str], None]) -> None:
    """Makes ggml call `tell` before it aborts the process, in any thread. The argument is the reason: file, line and
    message. The process aborts when `tell` returns."""
    global _on_abort
    _on_abort = _AbortCallback(lambda why: tell((why or b"").decode("utf-8", "replace")))
    base().ggml_set_abort_callback(_on_abort)


def version() -> str:
    """ggml's version and commit."""
    return f"{base().ggml_version().decode()} {base().ggml_commit().decode()}"


# --- devices ----------------------------------------------------------------------------------------------------------


def gpu_handles() -> dict[str, int]:
    """ggml's handles of the GPUs that are registered, by name, such as ``CUDA0``. GPUs of a module are registered when
    it is loaded."""
    ggml = registry()
    devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    gpus = {_text("name", device): device for device in devices if base().ggml_backend_dev_type(device) in _GPU_TYPES}
    return {name: device for name, device in gpus.items() if not name.startswith("FRAMESHARD")}


def gpu_devices() -> list[str]:
    """The names of the GPUs that are registered."""
    return list(gpu_handles())


def description(device: int) -> str:
    """What a device is, as its driver tells it.

    :param device: ggml's handle of it.
    """
    return _text("description", device)


def _text(what: str, device: int) -> str:
    value: bytes = getattr(base(), f"ggml_backend_dev_{what}")(device)
    return value.decode("utf-8", "replace")


def device_handle(name: str) -> int:
    """ggml's handle of a device, for ``llama_model_params.devices``. Loads the module that the device belongs to.

    :raises UnknownDevice: there is no such device; the message says why.
    :raises VersionMismatch: the module was built from another ggml.
    """
    load_module_of(name)
    handle: int | None = registry().ggml_backend_dev_by_name(name.encode())
    if not handle:
        raise errors.UnknownDevice(f"no device named {name!r}; there are: {gpu_devices()}", devices=gpu_devices())
    return handle


# --- modules ----------------------------------------------------------------------------------------------------------


def module_path(module: str) -> Path:
    """Where a GPU module is if it was built.

    :param module: a key of :data:`MODULES`.
    """
    directory = os.environ.get("FRAMESHARD_GPU_MODULES") or Path(__file__).parent / "gpu"
    return Path(directory) / LIBRARY_FILE.format(f"ggml-{module}")


def has_inside(module: str) -> bool:
    """Whether ggml has the backend of a GPU module already: it was built with it, or the module is loaded."""
    return bool(registry().ggml_backend_reg_by_name(MODULES[module].encode()))


def open_module(module: str) -> Path:
    """Loads a GPU module with the libraries that it is linked to, without asking the driver for devices.

    :returns: its path.
    :raises Unsupported: it was not built, or a library is missing.
    :raises VersionMismatch: it was built from another ggml than the one that runs.
    """
    path = module_path(module)
    if not path.is_file():
        how = f"make build CMAKE_ARGS=-DGGML_{module.upper()}=on"
        raise errors.Unsupported(f"this build has no module for {MODULES[module]} ({how})", module=module)
    running = version()  # loads ggml, which the module must find in the process
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise errors.Unsupported(f"{path.name} does not load: {reason}", module=module) from None
    try:
        tell = library.frameshard_built_from
        _ = library.ggml_backend_init
    except AttributeError:
        raise errors.VersionMismatch(
            f"{path.name} is no GPU module of frameshard: reinstall frameshard", module=module
        ) from None
    tell.restype = ctypes.c_char_p
    if (built := (tell() or b"").decode("utf-8", "replace")) != running:
        raise errors.VersionMismatch(
            f"{path.name} was built from ggml {built}, and {running} runs: reinstall frameshard",
            module=module,
            found=built,
            needed=running,
        )
    return path


def load_module(module: str) -> None:
    """Loads a GPU module and registers its devices. Does nothing if ggml has that backend already. A broken driver may
    end the process.

    :raises Unsupported: it was not built, a library is missing, or the driver is refused.
    :raises VersionMismatch: it was built from another ggml than the one that runs.
    """
    if has_inside(module):
        return
    path = open_module(module)
    if not registry().ggml_backend_load(str(path).encode()):
        raise errors.Unsupported(f"{path.name} finds no driver that it can use", module=module)


def load_module_of(device: str) -> None:
    """Loads the module that a device belongs to by its name, if there is one.

    :raises UnknownDevice: the module does not load; the message says why.
    :raises VersionMismatch: it was built from another ggml.
    """
    for module, name in MODULES.items():
        if device.startswith(name):
            try:
                load_module(module)
            except errors.Unsupported as error:
                devices = ["cpu", "emulated", *gpu_devices()]
                there = f"no device named {device!r}; there are: {', '.join(devices)}"
                raise errors.UnknownDevice(f"{there}; {error.message}", devices=devices) from None
